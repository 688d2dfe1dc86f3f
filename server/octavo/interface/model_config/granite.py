"""Granite 3 (dense)."""

from __future__ import annotations

from octavo.interface.config_checks import MAX_FACTOR
from octavo.interface.model_config.declarations import number
from octavo.interface.model_config.text import TextConfig


class GraniteConfig(TextConfig):
    """Multipliers of embeddings, of what blocks add, of scores, and a divisor of logits."""

    embedding_multiplier: float = number(0.0, MAX_FACTOR, 1.0, above=True)
    residual_multiplier: float = number(0.0, MAX_FACTOR, 1.0, above=True)
    attention_multiplier: float = number(0.0, MAX_FACTOR, 1.0, above=True)
    logits_scaling: float = number(0.0, MAX_FACTOR, 1.0, above=True)
