"""DeepSeek V2, V3, R1 and Kimi K2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from octavo.interface.config_checks import MAX_EXPERTS, MAX_WIDTH, Fields
from octavo.interface.model_config.declarations import choice, flag, integer
from octavo.interface.model_config.experts import ExpertsConfig, GroupedExpertsConfig


class DeepseekConfig(GroupedExpertsConfig):
    """Latent attention: heads have several sizes; what is turned of one is ``head_dim``, as in transformers."""

    aliases: ClassVar[Mapping[str, str]] = {**ExpertsConfig.aliases, "qk_rope_head_dim": "head_dim"}

    head_dim: int | None = 64
    kv_lora_rank: int = integer(1, MAX_WIDTH, 512)
    q_lora_rank: int | None = integer(1, MAX_WIDTH, 1536, null=True)
    v_head_dim: int = integer(1, MAX_WIDTH, 128)
    qk_nope_head_dim: int = integer(1, MAX_WIDTH, 128)
    rope_interleave: bool = flag(True)
    moe_layer_freq: int = choice((1,), 1, "must be 1, as DeepSeek's models have it")


class DeepseekV2Config(DeepseekConfig):
    """The chosen experts' scores are used as they are."""

    num_experts: int = 64
    n_shared_experts: int = 2
    moe_intermediate_size: int | None = 1407
    norm_topk_prob: bool = choice((False,), False, "must be False, as DeepSeek V2's models have it")
    scoring_func: str = choice(("softmax",), "softmax", "must be 'softmax', as DeepSeek V2's models have it")
    topk_method: str = choice(("greedy", "group_limited_greedy"), "greedy")

    @property
    def groups(self) -> tuple[int, int] | None:
        """See `ExpertsConfig`."""
        return self.stated_groups if self.topk_method == "group_limited_greedy" else None

    def check(self, fields: Fields) -> None:
        """See `TextConfig`."""
        super().check(fields)
        if self.topk_method == "group_limited_greedy":
            for key in ("n_group", "topk_group"):
                fields.integer(key, 1, MAX_EXPERTS)


class DeepseekV3Config(DeepseekConfig):
    """Experts are chosen within groups."""

    num_experts: int = 256
    num_experts_per_tok: int = 8
    moe_intermediate_size: int | None = 2048
    num_key_value_heads: int | None = 128
    first_k_dense_replace: int = 3
    n_group: int | None = 8
    topk_group: int | None = 4
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5
    scoring_func: str = choice(("sigmoid",), "sigmoid", "must be 'sigmoid', as DeepSeek V3's models have it")
    topk_method: str = choice(("noaux_tc",), "noaux_tc", "must be 'noaux_tc', as DeepSeek V3's models have it")

    @property
    def groups(self) -> tuple[int, int]:
        """See `ExpertsConfig`."""
        return self.stated_groups
