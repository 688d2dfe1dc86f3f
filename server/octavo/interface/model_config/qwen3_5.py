"""Qwen3.5 (text), dense and with experts."""

from __future__ import annotations

from typing import ClassVar

from octavo.interface.config_checks import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Fields
from octavo.interface.model_config.declarations import choice, integer
from octavo.interface.model_config.experts import ExpertsConfig
from octavo.interface.model_config.hybrid import MAX_TAPS, HybridConfig
from octavo.interface.model_config.text import PartialRotaryConfig
from octavo.interface.state_spec import StateSpec

_MAX_HEAD_SIZE = 256  # of recurrent layers, as kernels take them
_LINEAR = "linear_attention"


class Qwen3_5Config(PartialRotaryConfig, HybridConfig):  # noqa: N801
    """Layers with a gated delta net and, every few ones, with attention whose results are gated."""

    kinds_of_layers: ClassVar[tuple[str, ...]] = ("full_attention", _LINEAR)

    partial_rotary_factor: float = 0.25
    num_key_value_heads: int | None = 4
    head_dim: int | None = 256
    full_attention_interval: int = integer(1, MAX_LAYERS, 4)
    linear_conv_kernel_dim: int = integer(2, MAX_TAPS, 4)
    linear_key_head_dim: int = integer(8, _MAX_HEAD_SIZE, 128)
    linear_value_head_dim: int = integer(8, _MAX_HEAD_SIZE, 128)
    linear_num_key_heads: int = integer(1, MAX_HEADS, 16)
    linear_num_value_heads: int = integer(1, MAX_HEADS, 32)
    output_gate_type: str = choice(("swish", "silu"), "swish")  # of the gated delta nets
    attn_output_gate: bool = choice((True,), True)

    def is_recurrent(self, layer: int) -> bool:
        """See `HybridConfig`."""
        if self.layer_types is not None:
            return self.layer_types[layer] == _LINEAR
        return (layer + 1) % self.full_attention_interval != 0

    def state_of(self, ranks: int) -> StateSpec:
        """See `HybridConfig`."""
        return StateSpec(
            self.num_recurrent_layers,
            self.linear_num_key_heads // ranks,
            self.linear_num_value_heads // ranks,
            self.linear_key_head_dim,
            self.linear_value_head_dim,
            self.linear_conv_kernel_dim,
        )

    def check(self, fields: Fields) -> None:
        """See `TextConfig`."""
        super().check(fields)
        for key in ("linear_key_head_dim", "linear_value_head_dim"):
            if getattr(self, key) % 8:
                raise fields.error(f"{fields.name(key)} must be a multiple of 8, got {getattr(self, key)}")
        keys, values = self.linear_num_key_heads, self.linear_num_value_heads
        if values % keys:
            name = fields.name("linear_num_value_heads")
            raise fields.error(f"{fields.name('linear_num_key_heads')} ({keys}) must divide {name} ({values})")
        if self.hidden_act != "silu" and self.num_recurrent_layers:
            fields.refuse("hidden_act", "must be 'silu' where layers are recurrent")


class Qwen3_5MoeConfig(Qwen3_5Config, ExpertsConfig):  # noqa: N801
    """Experts in all layers, beside a shared one. Weights of the chosen ones always add up to 1."""

    ignored: ClassVar[frozenset[str]] = frozenset({"intermediate_size", "norm_topk_prob"})

    num_key_value_heads: int | None = 2
    intermediate_size: int = 512
    num_experts: int = 256
    num_experts_per_tok: int = 8
    moe_intermediate_size: int | None = 512
    shared_expert_intermediate_size: int = integer(1, MAX_WIDTH * 4, 512)
    norm_topk_prob: bool = True

    @property
    def inner_size(self) -> int:
        """See `TextConfig`."""
        return max(self.shared_expert_intermediate_size, self.num_experts_per_tok * self.expert_size)
