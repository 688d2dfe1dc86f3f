"""StableLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from octavo.interface.model_config.declarations import flag, number
from octavo.interface.model_config.text import PartialRotaryConfig


class StableLmConfig(PartialRotaryConfig):
    """Attention and MLP one behind the other or side by side."""

    aliases: ClassVar[Mapping[str, str]] = {"use_qkv_bias": "attention_bias"}

    partial_rotary_factor: float = 0.25
    num_key_value_heads: int | None = 32
    layer_norm_eps: float = number(0.0, 1.0, 1e-5)
    use_parallel_residual: bool = flag(False)
    qk_layernorm: bool = flag(False)
