"""Attention whose results are gated, number by number, by its own input (Qwen3.5)."""

from __future__ import annotations

from torch import Tensor

import octavo_kernels
from octavo.interface.engine_config import ModelConfig
from octavo.layers.attention import ForwardContext, SelfAttention
from octavo.layers.linear import QKVRows, QueryGateLinear
from octavo.layers.parallel import TensorParallel
from octavo.layers.quantization.base import LinearBase
from octavo.layers.rotary import RotaryEmbedding


class GatedSelfAttention(SelfAttention):
    """``attention * sigmoid(q_gate(x))``; the checkpoint's ``q_proj`` holds queries and gates, head by head."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        tp: TensorParallel,
        rotary: RotaryEmbedding | None,
        *,
        bias: bool,
        norm_offset: float | None,
    ) -> None:
        super().__init__(
            config,
            layer,
            tp,
            rotary,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=True,
            norm_offset=norm_offset,
            rows=QKVRows(gated=True),
        )
        self.q_gate = QueryGateLinear(config.hidden_size, config.head_size, config.num_heads, bias, tp)

    @property
    def input_projs(self) -> list[LinearBase]:
        """See `SelfAttention`."""
        return [self.qkv_proj, self.q_gate]

    def forward(self, x: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """See `SelfAttention`."""
        attended = super().forward(x, positions, ctx)
        return octavo_kernels.activate(self.q_gate(x), "sigmoid", up=attended)
