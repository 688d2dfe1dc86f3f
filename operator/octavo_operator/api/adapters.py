"""adapters: LoRA adapters beside the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from octavo_operator.api.common import SECRET_NAME
from octavo_operator.api.schema import Rule, spec_field

MAX_ADAPTERS = 64


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """One of `spec.adapters`."""

    RULES: ClassVar = (
        Rule(
            "self.uri.matches('^(hf://[A-Za-z0-9][-A-Za-z0-9._]*/[A-Za-z0-9][-A-Za-z0-9._]*|https://[-A-Za-z0-9.]+"
            "(:[0-9]+)?/.+|(s3|gs)://[a-z0-9][-a-z0-9._]+/[^/].*|pypi://.+==.+/.+|pvc://[a-z0-9][-a-z0-9.]*/[^/].*|"
            "file:///.+)$') && !self.uri.contains('..')",
            "adapters: uri is hf://org/name, https://host/folder, s3://bucket/folder, gs://bucket/folder, "
            "pypi://dist==version/folder/, pvc://claim/folder of a claim that the pods mount, or file:///folder, "
            "without '..'",
        ),
        Rule(
            "!has(self.revision) || self.uri.startsWith('hf://')",
            "adapters: revision is for adapters of a hub (hf://); other sources have none",
        ),
    )
    name: str = spec_field(
        "Name in requests, in the field model.", minLength=1, maxLength=128, pattern="^[A-Za-z0-9][-A-Za-z0-9._/]*$"
    )
    uri: str = spec_field(
        "Folder with adapter_config.json and adapter_model.safetensors, as PEFT saves them: hf://org/name, "
        "https://host/folder, s3://bucket/folder, gs://bucket/folder, pypi://dist==version/folder/, "
        "pvc://claim/folder of a claim that the pods mount (model.uri, volumes), or file:///folder in a pod.",
        minLength=1,
        maxLength=512,
    )
    revision: str | None = spec_field(
        "Branch, tag or commit on the hub. Default: its main branch.",
        default=None,
        maxLength=128,
        pattern="^[-A-Za-z0-9._/]+$",
    )
    digest: str | None = spec_field(
        "sha256:HEX that adapter_model.safetensors must have. Default: any.",
        default=None,
        pattern="^sha256:[0-9a-f]{64}$",
    )


@dataclass(frozen=True, kw_only=True)
class AdapterCredentials:
    """`spec.adapterCredentialsSecretRef`."""

    name: str = spec_field("Name of a Secret in the same namespace.", **SECRET_NAME)
