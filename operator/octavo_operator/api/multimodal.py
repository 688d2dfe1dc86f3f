# ruff: noqa: RUF009  (spec_field makes a dataclass field)
"""engine.multimodal: images in prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo_operator.api.schema import Rule, spec_field


@dataclass(frozen=True, kw_only=True)
class PromptLimits:
    """`spec.engine.multimodal.limitPerPrompt`."""

    image: int | None = spec_field(
        "Maximum number of images in a prompt; 0: none. Default: as many as fit.", default=None, minimum=0, maximum=1000
    )


@dataclass(frozen=True, kw_only=True)
class Multimodal:
    """`spec.engine.multimodal`: what prompts may hold besides text, of models that read it."""

    limit_per_prompt: PromptLimits = spec_field("Limits of a prompt.", default=PromptLimits)
    encoder_cache_tokens: int | None = spec_field(
        (
            "Number of image embeddings in the cache, for running prompts and repeated images. Default: "
            "8192, or those of the largest allowed image if that is more."
        ),
        default=None,
        minimum=1,
        maximum=16777216,
    )
    allowed_media_domains: tuple[str, ...] = spec_field(
        "Hosts from which the engine fetches images that requests name by http and https addresses. Default: none. "
        "Where networkPolicy.egress is set, the pods may reach public addresses at port 443 because of it.",
        default=(),
        maxItems=64,
        items_schema={"type": "string", "minLength": 1, "maxLength": 253},
        rules=(
            Rule(
                "self.all(d, d.matches('^[A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?$'))",
                "engine.multimodal.allowedMediaDomains: names of hosts alone, without https://, port, path or *; "
                "write images.example.com",
            ),
        ),
        **{"x-kubernetes-list-type": "set"},
    )
    allowed_local_media_path: str | None = spec_field(
        "Folder of a volume (spec.volumeMounts) below which requests may name images by file: addresses. Default: "
        "none.",
        default=None,
        maxLength=1024,
        rules=(
            Rule(
                "self.matches('^/[^$]*$') && !self.matches('(^|/)[.][.]?(/|$)')",
                "engine.multimodal.allowedLocalMediaPath: an absolute path without ., .. and $, such as /pictures",
            ),
        ),
    )
    processor_options: dict[str, Any] = spec_field(
        "Settings of the image processor in place of those in the checkpoint's files, by their names there, such as "
        "max_pixels: 1003520. Images that become smaller take fewer tokens and less time.",
        default={},
        override={
            "type": "object",
            "maxProperties": 32,
            "additionalProperties": {"x-kubernetes-preserve-unknown-fields": True},
        },
    )
