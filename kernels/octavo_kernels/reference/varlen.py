"""Attention and rotary embedding of whole sequences without a KV cache, as encoders need them."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels.reference.attention import rotate


def varlen_attention(
    qkv: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """See `octavo_kernels.varlen_attention`."""
    heads = qkv.view(len(qkv), num_heads + 2 * num_kv_heads, head_size)
    wide = torch.float64 if qkv.dtype == torch.float64 else torch.float32
    out = qkv.new_zeros(len(qkv), num_heads * head_size)
    starts, group = query_start_loc.tolist(), num_heads // num_kv_heads
    for r, length in enumerate(seq_lens.tolist()):
        rows = slice(starts[r], starts[r] + length)
        q, k, v = heads[rows].to(wide).split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        if window is not None:
            at = torch.arange(length, device=qkv.device)
            scores = scores.masked_fill((at[:, None] - at[None]).abs() >= window, float("-inf"))
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v)
        out[rows] = attended.reshape(length, -1).to(qkv.dtype)
    return out


def rope_(x: Tensor, positions: Tensor, cos_sin_cache: Tensor, num_heads: int, head_size: int) -> None:
    """See `octavo_kernels.rope_`."""
    heads = x[:, : num_heads * head_size].unflatten(1, (num_heads, head_size))
    table = cos_sin_cache[positions.clamp(0, len(cos_sin_cache) - 1)]
    x[:, : num_heads * head_size] = rotate(heads, table).flatten(1)
