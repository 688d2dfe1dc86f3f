"""LFM2, dense and with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from octavo.interface.config_checks import MAX_FACTOR, MAX_LAYERS, MAX_WIDTH, Fields
from octavo.interface.model_config.declarations import flag, integer, integers, number
from octavo.interface.model_config.experts import ExpertsConfig
from octavo.interface.model_config.hybrid import MAX_TAPS, HybridConfig
from octavo.interface.state_spec import StateSpec

_CONV = "conv"


class _ConvConfig(HybridConfig):
    """Layers with a short convolution or with attention, whose MLPs have SiLU and no biases."""

    kinds_of_layers: ClassVar[tuple[str, ...]] = ("full_attention", _CONV)
    aliases: ClassVar[Mapping[str, str]] = {"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings"}
    ignored: ClassVar[frozenset[str]] = frozenset({"hidden_act", "attention_bias", "mlp_bias"})

    num_key_value_heads: int | None = 8
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1e6
    tie_word_embeddings: bool = True
    conv_bias: bool = flag(False)
    conv_L_cache: int = integer(2, MAX_TAPS, 3)  # noqa: N815

    def state_of(self, ranks: int) -> StateSpec:
        """See `HybridConfig`."""
        return StateSpec(self.num_recurrent_layers, 0, 0, 0, 0, self.conv_L_cache, self.hidden_size // ranks)


class Lfm2Config(_ConvConfig):
    """LFM2 (dense); `inner_size` is what is made of ``intermediate_size``."""

    aliases: ClassVar[Mapping[str, str]] = {**_ConvConfig.aliases, "block_ff_dim": "intermediate_size"}

    block_auto_adjust_ff_dim: bool = flag(True)
    block_ffn_dim_multiplier: float | None = number(0.0, MAX_FACTOR, 1.0, above=True, null=True)
    block_multiple_of: int = integer(1, MAX_WIDTH, 256)
    full_attn_idxs: list[int] | None = integers("must be a list of layers")

    def is_recurrent(self, layer: int) -> bool:
        """See `HybridConfig`."""
        if self.layer_types is not None:
            return self.layer_types[layer] == _CONV
        return self.full_attn_idxs is not None and layer not in self.full_attn_idxs

    @property
    def inner_size(self) -> int:
        """See `TextConfig`."""
        if not self.block_auto_adjust_ff_dim:
            return self.intermediate_size
        size = int(2 * self.intermediate_size / 3)
        if self.block_ffn_dim_multiplier is None:
            return size
        of = self.block_multiple_of
        return -(-int(self.block_ffn_dim_multiplier * size) // of) * of

    def check(self, fields: Fields) -> None:
        """See `TextConfig`."""
        super().check(fields)
        if self.inner_size < 1:
            raise fields.error(f"{fields.name('intermediate_size')} ({self.intermediate_size}) leaves MLPs no width")


class Lfm2MoeConfig(_ConvConfig, ExpertsConfig):
    """LFM2 with experts behind the first ``num_dense_layers`` layers."""

    aliases: ClassVar[Mapping[str, str]] = {**ExpertsConfig.aliases, **_ConvConfig.aliases}

    num_experts: int = 32
    num_experts_per_tok: int = 4
    intermediate_size: int = 7168
    moe_intermediate_size: int | None = 1792
    norm_topk_prob: bool = True
    num_dense_layers: int = integer(0, MAX_LAYERS, 2)
    use_expert_bias: bool = flag(True)
    routed_scaling_factor: float = number(0.0, MAX_FACTOR, 1.0, above=True)

    def is_recurrent(self, layer: int) -> bool:
        """See `HybridConfig`."""
        return self.layer_types is not None and self.layer_types[layer] == _CONV
