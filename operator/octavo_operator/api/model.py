# ruff: noqa: RUF009  (spec_field makes a dataclass field)
"""model: source, names and cache of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from octavo_operator.api.common import SECRET_NAME, SET, Amount, ConfigMapKey, SecretKey
from octavo_operator.api.schema import BYTES, Rule, spec_field


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """`spec.model.chatTemplate`."""

    RULES: ClassVar = (
        Rule("has(self.inline) != has(self.configMapRef)", "chatTemplate: give exactly one of inline and configMapRef"),
    )
    inline: str | None = spec_field("Jinja template.", default=None, minLength=1, maxLength=32768)
    config_map_ref: ConfigMapKey | None = spec_field("ConfigMap that holds the template.", default=None)


@dataclass(frozen=True, kw_only=True)
class CachePVC:
    """`spec.model.cache.pvc`: a claim that the operator creates, or an existing one."""

    RULES: ClassVar = (
        Rule(
            "has(self.existingClaim) != has(self.size)",
            "cache.pvc: give either size, for a claim that is created, or existingClaim",
        ),
        Rule(
            "!has(self.existingClaim) || (!has(self.storageClassName) && !self.retain)",
            "cache.pvc: storageClassName and retain are for claims that the operator creates; leave them out with "
            "existingClaim",
        ),
        Rule(
            "has(self.existingClaim) || has(oldSelf.existingClaim) || (has(self.storageClassName) == "
            "has(oldSelf.storageClassName) && "
            "(!has(self.storageClassName) || self.storageClassName == oldSelf.storageClassName))",
            "cache.pvc.storageClassName cannot be changed, as a claim's cannot; switch cache.mode to emptyDir and "
            "back for a new claim",
        ),
        Rule(
            "has(self.existingClaim) || has(oldSelf.existingClaim) || self.accessModes == oldSelf.accessModes",
            "cache.pvc.accessModes cannot be changed, as a claim's cannot; switch cache.mode to emptyDir and back "
            "for a new claim",
        ),
    )
    existing_claim: str | None = spec_field(
        "Name of an existing PersistentVolumeClaim to use.", default=None, **SECRET_NAME
    )
    size: Amount | None = spec_field(
        "Size of the claim that is created, such as 20Gi. It may be raised later where the storage class allows "
        "expansion.",
        default=None,
        override=BYTES,
    )
    storage_class_name: str | None = spec_field(
        "Storage class of the claim. Default: the cluster's.", default=None, maxLength=253
    )
    access_modes: tuple[str, ...] = spec_field(
        "Access modes of the claim. ReadWriteMany lets several replicas share the cache; ReadWriteOnce allows one "
        "replica, whose old pod stops before the new one starts.",
        default=("ReadWriteOnce",),
        minItems=1,
        maxItems=2,
        items_schema={"type": "string", "enum": ["ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany"]},
    )
    retain: bool = spec_field(
        "Keep the claim and the model in it when the LLMDeployment is deleted. Another one of the same name uses "
        "it again.",
        default=False,
    )


@dataclass(frozen=True, kw_only=True)
class CacheNode:
    """`spec.model.cache.node`: a folder of each node, shared by the pods of a namespace."""

    path: str = spec_field(
        "Folder on the nodes; one of the operator's cache.nodePaths. Pods use a subfolder of their namespace's name.",
        pattern=r"^(/[-A-Za-z0-9_][-A-Za-z0-9._]*)+$",
        maxLength=253,
    )
    max_size: Amount | None = spec_field(
        "Size above which models that no pod serves are removed, least recently used first. Default: unlimited.",
        default=None,
        override=BYTES,
    )


@dataclass(frozen=True, kw_only=True)
class Cache:
    """`spec.model.cache`: where fetched models are kept."""

    RULES: ClassVar = (
        Rule("(self.mode == 'pvc') == has(self.pvc)", "cache: mode pvc needs cache.pvc, and cache.pvc needs mode pvc"),
        Rule(
            "(self.mode == 'node') == has(self.node)",
            "cache: mode node needs cache.node, and cache.node needs mode node",
        ),
        Rule(
            "self.mode == 'emptyDir' || !has(self.sizeLimit)",
            "cache.sizeLimit is for mode emptyDir; a claim has pvc.size, a folder of a node has node.maxSize",
        ),
        Rule(
            "!self.prefetch || (has(self.pvc) && (has(self.pvc.existingClaim) || "
            "self.pvc.accessModes.exists(m, m == 'ReadWriteMany')))",
            "cache.prefetch needs mode pvc and a claim that old pods and the fetching Job mount at the same time: "
            "give accessModes [ReadWriteMany]",
        ),
    )
    mode: str = spec_field(
        "Volume for fetched models. emptyDir: deleted with the pod. pvc: kept, so that the model is fetched once. "
        "node: a folder of the node, so that each node fetches once.",
        default="emptyDir",
        enum=["emptyDir", "pvc", "node"],
    )
    size_limit: Amount | None = spec_field(
        "Maximum size of the emptyDir. Default: unlimited.", default=None, override=BYTES
    )
    pvc: CachePVC | None = spec_field("PersistentVolumeClaim of mode pvc.", default=None)
    node: CacheNode | None = spec_field("Folder of mode node.", default=None)
    prefetch: bool = spec_field(
        "When the model changes, fetch the new one by a Job first: the old pods serve until it is in the cache.",
        default=False,
    )


@dataclass(frozen=True, kw_only=True)
class Model:
    """`spec.model`: source, names and cache of the model."""

    RULES: ClassVar = (
        Rule(
            "!self.uri.contains('://') || self.uri.matches('^(hf|pvc|oci|https|s3|gs|file|pypi)://.')",
            "model.uri: unknown source; use hf://org/name, pvc://claim/path, oci://registry/image@sha256:..., "
            "https://host/file.gguf, s3://bucket/path, gs://bucket/path, file:///path or an alias such as "
            "smollm2-135m-instruct",
        ),
        Rule(
            "self.uri.contains('://') || "
            "self.uri.matches('^[A-Za-z0-9][-A-Za-z0-9._]*(/[A-Za-z0-9][-A-Za-z0-9._]*)?$')",
            "model.uri: neither an alias such as smollm2-135m-instruct nor org/name",
        ),
        Rule(
            "!self.uri.startsWith('hf://') || "
            "self.uri.matches('^hf://[A-Za-z0-9][-A-Za-z0-9._]*/[A-Za-z0-9][-A-Za-z0-9._]*(/[-A-Za-z0-9._/]+)?(:[-A-Za-z0-9._]+)?$')",
            "model.uri: hf:// is followed by org/name, and for one GGUF file of several by /file.gguf or :QUANT",
        ),
        Rule(
            "!self.uri.startsWith('pvc://') || (self.uri.matches('^pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/[^/].*)?$') "
            "&& !self.uri.contains('..'))",
            "model.uri: pvc:// is followed by the name of a claim and the path of the model in it, without '..'",
        ),
        Rule(
            "!self.uri.startsWith('oci://') || (self.uri.matches('^oci://[a-z0-9][-a-z0-9._:/]*@sha256:[0-9a-f]{64}"
            "(//[^/].*)?$') && !self.uri.contains('..'))",
            "model.uri: oci:// is followed by registry/image@sha256:... and, for a file or folder of it, by //path "
            "without '..'; a digest is required, because the image of a tag may change under a running model",
        ),
        Rule(
            "!self.uri.startsWith('https://') || self.uri.matches('^https://[-A-Za-z0-9.]+(:[0-9]+)?/.+')",
            "model.uri: https:// is followed by host/path/file.gguf or by host/path of a folder with safetensors",
        ),
        Rule(
            "!self.uri.matches('^(s3|gs)://') || self.uri.matches('^(s3|gs)://[a-z0-9][-a-z0-9._]+/[^/].*')",
            "model.uri: s3:// and gs:// are followed by bucket/path/file.gguf or by the bucket/path of a folder",
        ),
        Rule(
            "!self.uri.startsWith('file://') || (self.uri.matches('^file:///.+') && !self.uri.contains('..'))",
            "model.uri: file:// is followed by an absolute path in the image, without '..'",
        ),
        Rule(
            "!has(self.revision) || self.uri.startsWith('hf://') || !self.uri.contains('://')",
            "model.revision is for models of a hub (hf://); other sources have none",
        ),
        Rule(
            "!has(self.credentialsSecretRef) || self.uri.startsWith('hf://') || self.uri.startsWith('https://') || "
            "!self.uri.contains('://')",
            "model.credentialsSecretRef is a token for hf:// and https://; s3:// and gs:// take AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY from spec.envFrom",
        ),
        Rule(
            "self.cache.mode == 'emptyDir' || !self.uri.matches('^(pvc|oci|file)://')",
            "model.cache.mode pvc and node are for fetched models; pvc://, oci:// and file:// are read in place",
        ),
        Rule(
            "!has(self.name) || !has(self.aliases) || !self.aliases.exists(a, a == self.name)",
            "model.aliases must not repeat model.name",
        ),
    )
    uri: str = spec_field(
        "Source of the model: hf://org/name (or org/name) from the Hugging Face hub, pvc://claim/path on a "
        "PersistentVolumeClaim, oci://registry/image@sha256:...//path in an image that is mounted (Kubernetes 1.35), "
        "https://host/file.gguf or a folder, s3://bucket/path or gs://bucket/path of either, file:///path in the "
        "engine's image, or an alias of the engine "
        "(smollm2-135m-instruct).",
        minLength=1,
        maxLength=512,
    )
    name: str | None = spec_field(
        "Model name in requests. Default: the name of the LLMDeployment.", default=None, minLength=1, maxLength=253
    )
    aliases: tuple[str, ...] = spec_field(
        "Additional model names in requests.",
        default=(),
        maxItems=16,
        items_schema={"type": "string", "minLength": 1, "maxLength": 253},
        **SET,
    )
    revision: str | None = spec_field(
        "Branch, tag or commit on the hub. Default: its main branch.",
        default=None,
        maxLength=128,
        pattern=r"^[-A-Za-z0-9._/]+$",
    )
    chat_template: ChatTemplate | None = spec_field("Chat template to use instead of the model's own.", default=None)
    credentials_secret_ref: SecretKey | None = spec_field(
        "Secret with the access token for gated or private models (HF_TOKEN of the engine, or a bearer token for "
        "https://).",
        default=None,
    )
    cache: Cache = spec_field("Storage of fetched models.", default=Cache)

    @property
    def source(self) -> str:
        """hf, pvc, oci, https, s3, gs, file, pypi or alias."""
        scheme, mark, _ = self.uri.partition("://")
        if mark:
            return scheme
        return "hf" if "/" in self.uri else "alias"

    @property
    def is_fetched(self) -> bool:
        """True if the container `fetch` downloads it."""
        return self.source not in ("pvc", "oci", "file")
