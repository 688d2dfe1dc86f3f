"""The language models that LLaVA is built around, by model_type of text_config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self, cast

from octavo.interface.config_checks import Name
from octavo.interface.model_config.declarations import flag, text
from octavo.interface.model_config.llama import LlamaConfig, MistralConfig
from octavo.interface.model_config.qwen2 import Qwen2Config
from octavo.interface.model_config.text import TextConfig, unsupported_text


class LlavaConfig(TextConfig):
    """Fields beside the language model's: those of the projector of image features."""

    projector_hidden_act: str = text("gelu")
    multimodal_projector_bias: bool = flag(True)

    @classmethod
    def parse(cls, config: Mapping[str, Any], source: str, name: Name = str) -> Self:
        """See `TextConfig`; with the fields and defaults of the language model's family."""
        kind = str(config.get("model_type") or "llama")
        if kind not in TEXTS:
            raise unsupported_text(config, TEXTS, source)
        return cast("Self", super(LlavaConfig, TEXTS[kind]).parse(config, source, name))


class LlavaLlamaConfig(LlamaConfig, LlavaConfig):
    """Fields of LLaVA with a Llama."""

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    max_position_embeddings: int | None = 2048


class LlavaMistralConfig(MistralConfig, LlavaConfig):
    """Fields of LLaVA with a Mistral."""

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    max_position_embeddings: int | None = 131072


class LlavaQwen2Config(Qwen2Config, LlavaConfig):
    """Fields of LLaVA with a Qwen2."""

    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 22016
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    max_position_embeddings: int | None = 32768


TEXTS: dict[str, type[LlavaConfig]] = {
    "llama": LlavaLlamaConfig,
    "mistral": LlavaMistralConfig,
    "qwen2": LlavaQwen2Config,
}
