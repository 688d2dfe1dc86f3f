"""GLM-4 (dense)."""

from __future__ import annotations

from octavo.interface.model_config.text import PartialRotaryConfig


class GlmConfig(PartialRotaryConfig):
    """Fields of the 9B model of 2024."""

    partial_rotary_factor: float = 0.5
    num_key_value_heads: int | None = 2
    head_dim: int | None = 128
    rms_norm_eps: float = 1.5625e-7
    attention_bias: bool = True


class Glm4Config(GlmConfig):
    """Fields of the models of 2025."""
