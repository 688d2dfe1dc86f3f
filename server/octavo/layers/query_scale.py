"""Attention whose queries grow with their position, so that it stays sharp in long texts (Llama 4, Ministral 3)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import octavo_kernels
from octavo.interface.engine_config import ModelConfig
from octavo.layers.attention import ForwardContext, SelfAttention


class QueryScale(nn.Module):
    """Multiply queries at position p by 1 + ``growth`` log(1 + floor(p / every)); p begins at ``first``.

    ``table`` float32 [max_model_len, head_size] is a table of rotations that turn by nothing and stretch.
    """

    table: Tensor

    def __init__(self, config: ModelConfig, every: int, growth: float, first: int = 0) -> None:
        super().__init__()
        positions = torch.arange(first, first + config.max_model_len, dtype=torch.float32)
        scales = torch.log1p(torch.floor(positions / every)) * growth + 1.0
        half = scales[:, None].expand(-1, config.head_size // 2)
        self.register_buffer("table", torch.cat([half, torch.zeros_like(half)], dim=-1), persistent=False)


class GrowingQueryAttention(SelfAttention):
    """``query_scale`` is one module that layers share. To stretch before turning is to stretch after it."""

    query_scale: QueryScale | None

    def forward(self, x: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """See `SelfAttention`."""
        qkv = self.qkv_proj(x)
        if self.query_scale is not None:
            octavo_kernels.rope_(qkv, positions, self.query_scale.table, self.attn.num_heads, self.attn.head_size)
        attended: Tensor = self.attn(qkv, positions, ctx)
        return attended
