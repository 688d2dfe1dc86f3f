"""Granite 3 (dense) and Granite 4."""

from __future__ import annotations

from typing import ClassVar

from octavo.interface.config_checks import MAX_EXPERTS, MAX_FACTOR, MAX_WIDTH
from octavo.interface.model_config.declarations import choice, integer, number
from octavo.interface.model_config.text import TextConfig


class GraniteConfig(TextConfig):
    """Multipliers of embeddings, of what blocks add, of scores, and a divisor of logits."""

    embedding_multiplier: float = number(0.0, MAX_FACTOR, 1.0, above=True)
    residual_multiplier: float = number(0.0, MAX_FACTOR, 1.0, above=True)
    attention_multiplier: float = number(0.0, MAX_FACTOR, 1.0, above=True)
    logits_scaling: float = number(0.0, MAX_FACTOR, 1.0, above=True)


class GraniteMoeHybridConfig(GraniteConfig):
    """Granite 4."""

    kinds_of_layers: ClassVar[tuple[str, ...]] = ("full_attention", "attention", "mamba", "linear_attention")

    num_local_experts: int = integer(0, MAX_EXPERTS, 8)
    shared_intermediate_size: int = integer(1, MAX_WIDTH * 4, 1024)
    position_embedding_type: str | None = choice(("rope", "nope"), None, 'must be "rope", "nope" or null')
