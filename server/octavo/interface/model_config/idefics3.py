"""Idefics 3 and SmolVLM."""

from __future__ import annotations

from typing import ClassVar

from octavo.interface.config_checks import MAX_WIDTH
from octavo.interface.model_config.declarations import integer
from octavo.interface.model_config.llama import LlamaConfig


class Idefics3Config(LlamaConfig):
    """Fields of Idefics3 with a Llama."""

    text_types: ClassVar[tuple[str, ...]] = ("llama",)

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    max_position_embeddings: int | None = 2048
    scale_factor: int = integer(1, MAX_WIDTH, 2)


class SmolVLMConfig(Idefics3Config):
    """Fields of SmolVLM."""
