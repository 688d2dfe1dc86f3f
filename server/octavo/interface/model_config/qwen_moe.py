"""Qwen2-MoE and Qwen3-MoE."""

from __future__ import annotations

from octavo.interface.config_checks import MAX_WIDTH
from octavo.interface.model_config.declarations import flag, integer, integers
from octavo.interface.model_config.experts import ExpertsConfig
from octavo.interface.model_config.qwen2 import Qwen2Config
from octavo.interface.model_config.qwen3 import Qwen3Config


class QwenMoeConfig(Qwen2Config, ExpertsConfig):
    """Experts in the layers that ``mlp_only_layers`` does not name, in every ``decoder_sparse_step``-th of all."""

    decoder_sparse_step: int = integer(1, MAX_WIDTH * 4, 1)
    mlp_only_layers: list[int] | None = integers("must be a list of numbers of layers")

    def is_sparse(self, layer: int) -> bool:
        """True if layer number ``layer`` has experts."""
        return layer not in (self.mlp_only_layers or []) and (layer + 1) % self.decoder_sparse_step == 0


class Qwen2MoeConfig(QwenMoeConfig):
    """Fields of Qwen2-MoE. Without ``layer_types``, every other layer below ``max_window_layers`` may have a window."""

    num_experts: int = 60
    num_experts_per_tok: int = 4
    moe_intermediate_size: int | None = 1408
    num_key_value_heads: int | None = 16
    shared_expert_intermediate_size: int = integer(0, MAX_WIDTH * 4, 5632)
    qkv_bias: bool = flag(True)

    def slides_by_default(self, layer: int) -> bool:
        """See `TextConfig`."""
        return layer % 2 == 0 and layer < self.max_window_layers


class Qwen3MoeConfig(QwenMoeConfig, Qwen3Config):
    """Fields of Qwen3-MoE. If there are windows, all layers have one."""

    head_dim: int | None = None
    num_experts: int = 128
    num_experts_per_tok: int = 8
    moe_intermediate_size: int | None = 768
    num_key_value_heads: int | None = 4

    def slides(self, layer: int) -> bool:
        """See `TextConfig`."""
        return True
