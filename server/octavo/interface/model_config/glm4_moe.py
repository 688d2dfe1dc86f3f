"""GLM-4.5 and 4.6."""

from __future__ import annotations

from octavo.interface.model_config.declarations import flag
from octavo.interface.model_config.experts import GroupedExpertsConfig
from octavo.interface.model_config.text import PartialRotaryConfig


class Glm4MoeConfig(PartialRotaryConfig, GroupedExpertsConfig):
    """Experts from layer ``first_k_dense_replace`` on."""

    partial_rotary_factor: float = 0.5
    num_key_value_heads: int | None = 8
    rms_norm_eps: float = 1e-5
    num_experts: int = 128
    num_experts_per_tok: int = 8
    moe_intermediate_size: int | None = 1408
    first_k_dense_replace: int = 1
    n_group: int | None = 1
    topk_group: int | None = 1
    norm_topk_prob: bool = True
    use_qk_norm: bool = flag(False)
