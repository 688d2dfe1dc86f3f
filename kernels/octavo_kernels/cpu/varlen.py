"""Attention and rotary embedding of whole sequences without a KV cache, on CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels import reference
from octavo_kernels.cpu.attention import MAX_HEAD_SIZE
from octavo_kernels.cpu.library import DTYPES, as_contiguous, get_library, threads_for, threads_for_products


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
    library, dtype = get_library(), DTYPES.get(qkv.dtype)
    if library is None or dtype is None or head_size > MAX_HEAD_SIZE:
        return reference.varlen_attention(
            qkv, query_start_loc, seq_lens, num_heads, num_kv_heads, head_size, scale, window
        )
    qkv = as_contiguous(qkv)
    starts, lengths = as_contiguous(query_start_loc, torch.int32), as_contiguous(seq_lens, torch.int32)
    out = qkv.new_empty((len(qkv), num_heads * head_size))
    op = library.pack(
        "varlen_attention",
        qkv.data_ptr(),
        lengths.data_ptr(),
        starts.data_ptr(),
        out.data_ptr(),
        len(qkv),
        len(lengths),
        num_heads,
        num_kv_heads,
        head_size,
        window or 0,
        dtype,
        scale,
    )
    keys = len(qkv) * num_heads * head_size  # of a sequence at most
    library.run(op, threads_for_products(2 * len(qkv), keys))
    return out


def rope_(x: Tensor, positions: Tensor, cos_sin_cache: Tensor, num_heads: int, head_size: int) -> None:
    """See `octavo_kernels.rope_`."""
    library, dtype = get_library(), DTYPES.get(x.dtype)
    if library is None or dtype is None or x.stride(1) != 1 or cos_sin_cache.dtype != torch.float32:
        return reference.rope_(x, positions, cos_sin_cache, num_heads, head_size)
    positions, table = as_contiguous(positions, torch.int64), as_contiguous(cos_sin_cache)
    op = library.pack(
        "rope",
        x.data_ptr(),
        positions.data_ptr(),
        table.data_ptr(),
        len(x),
        num_heads,
        head_size,
        x.stride(0),
        table.shape[1],
        table.shape[0],
        dtype,
    )
    library.run(op, threads_for(x.numel()))
    return None
