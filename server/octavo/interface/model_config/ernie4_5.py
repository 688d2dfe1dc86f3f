"""ERNIE 4.5 (dense)."""

from __future__ import annotations

from octavo.interface.model_config.declarations import flag
from octavo.interface.model_config.text import TextConfig


class Ernie4_5Config(TextConfig):  # noqa: N801
    """One flag for all biases."""

    num_key_value_heads: int | None = 2
    head_dim: int | None = 128
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    rope_theta: float = 5e5
    use_bias: bool = flag(False)
