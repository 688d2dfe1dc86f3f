"""The language models of Qwen2-VL, Qwen2.5-VL and Qwen3-VL."""

from __future__ import annotations

from octavo.interface.model_config.qwen2 import Qwen2Config
from octavo.interface.model_config.qwen3 import Qwen3Config
from octavo.interface.model_config.qwen_moe import Qwen3MoeConfig


class Qwen2VLConfig(Qwen2Config):
    """Fields of Qwen2-VL."""

    num_key_value_heads: int | None = 8
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1e6
    max_window_layers: int = 80


class Qwen2_5_VLConfig(Qwen2VLConfig):  # noqa: N801
    """Fields of Qwen2.5-VL."""


class Qwen3VLConfig(Qwen3Config):
    """Fields of Qwen3-VL."""

    rope_theta: float = 5e5


class Qwen3VLMoeConfig(Qwen3MoeConfig):
    """Fields of Qwen3-VL's mixtures of experts."""

    num_experts: int = 60
    num_experts_per_tok: int = 4
    moe_intermediate_size: int | None = 1408
    num_key_value_heads: int | None = 16
    norm_topk_prob: bool = True
    rope_theta: float = 5e5
