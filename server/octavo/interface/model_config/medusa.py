"""Draft heads of Medusa."""

from __future__ import annotations

from octavo.interface.config_checks import MAX_FACTOR, MAX_HEADS, MAX_VOCAB
from octavo.interface.model_config.declarations import flag, integer, number
from octavo.interface.model_config.text import TextConfig


class MedusaConfig(TextConfig):
    """``num_hidden_layers``: residual blocks of a head."""

    intermediate_size: int = 1
    num_heads: int = integer(1, MAX_HEADS)
    num_lm_heads: int = integer(0, MAX_HEADS)
    draft_vocab_size: int = integer(1, MAX_VOCAB)
    fc_bias: bool = flag(False)
    maps_tokens: bool = flag(False)
    logit_scale: float = number(0.0, MAX_FACTOR, 1.0, above=True)
