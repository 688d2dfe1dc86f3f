"""Rotary embedding with cache write, paged attention and block copies on CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels import reference
from octavo_kernels.cpu.runtime import DTYPES, dense, get_library
from octavo_kernels.metadata import AttentionMetadata

MAX_HEAD_SIZE = 512  # csrc/attention.c


def rope_and_cache(
    qkv: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor | None,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    library, dtype, kv_dtype = get_library(), DTYPES.get(qkv.dtype), DTYPES.get(kv_cache.dtype)
    usual = all(w is None or w.dtype == qkv.dtype for w in (q_norm_weight, k_norm_weight))
    usual = usual and (cos_sin_cache is None or cos_sin_cache.dtype == torch.float32) and kv_cache.is_contiguous()
    usual = usual and k_scale == v_scale == 1.0
    if library is None or dtype is None or kv_dtype is None or not usual:
        return reference.rope_and_cache(
            qkv, positions, cos_sin_cache, kv_cache, slot_mapping, num_heads, num_kv_heads, head_size,
            q_norm_weight, k_norm_weight, eps, k_scale, v_scale,
        )  # fmt: skip
    qkv, positions, slot_mapping = dense(qkv), dense(positions, torch.int64), dense(slot_mapping, torch.int64)
    table = None if cos_sin_cache is None else dense(cos_sin_cache)
    rows = qkv.shape[0]
    q = qkv.new_empty((rows, num_heads, head_size))
    op = library.pack(
        "rope_and_cache",
        qkv.data_ptr(),
        positions.data_ptr(),
        0 if table is None else table.data_ptr(),
        kv_cache.data_ptr(),
        slot_mapping.data_ptr(),
        0 if q_norm_weight is None else q_norm_weight.data_ptr(),
        0 if k_norm_weight is None else k_norm_weight.data_ptr(),
        q.data_ptr(),
        rows,
        num_heads,
        num_kv_heads,
        head_size,
        0 if table is None else table.shape[1],
        1 if table is None else table.shape[0],
        kv_cache.shape[3],
        kv_cache.shape[1],
        dtype,
        kv_dtype,
        eps,
    )
    library.run(op, 1 if qkv.numel() < 16384 else None)
    return q


def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    library, dtype, kv_dtype = get_library(), DTYPES.get(q.dtype), DTYPES.get(kv_cache.dtype)
    rows, num_heads, head_size = q.shape
    if (
        library is None
        or dtype is None
        or kv_dtype is None
        or head_size > MAX_HEAD_SIZE
        or not kv_cache.is_contiguous()
        or not k_scale == v_scale == 1.0
    ):
        return reference.paged_attention(q, kv_cache, metadata, scale, window, softcap, k_scale, v_scale)
    q = dense(q)
    table = metadata.block_table
    if table.dtype != torch.int32 or table.stride(-1) != 1:
        table = table.to(torch.int32).contiguous()
    seq_lens, starts = dense(metadata.seq_lens, torch.int32), dense(metadata.query_start_loc, torch.int32)
    out = torch.empty_like(q)
    op = library.pack(
        "paged_attention",
        q.data_ptr(),
        kv_cache.data_ptr(),
        table.data_ptr(),
        seq_lens.data_ptr(),
        starts.data_ptr(),
        out.data_ptr(),
        rows,
        min(metadata.num_actual_tokens, rows),
        seq_lens.shape[0],
        num_heads,
        kv_cache.shape[2],
        head_size,
        kv_cache.shape[3],
        kv_cache.shape[1],
        table.stride(0),
        window or 0,
        dtype,
        kv_dtype,
        scale,
        softcap or 0.0,
    )
    library.run(op)
    return out


def copy_blocks(kv_caches: list[Tensor], pairs: Tensor) -> None:
    library = get_library()
    if pairs.numel() == 0:
        return
    if library is None or not all(c.is_contiguous() and c.shape == kv_caches[0].shape for c in kv_caches):
        return reference.copy_blocks(kv_caches, pairs)
    pairs = dense(pairs, torch.int64)
    first = kv_caches[0]
    addresses = torch.tensor([cache.data_ptr() for cache in kv_caches], dtype=torch.int64)
    block_bytes = first[0, 0].numel() * first.element_size()
    op = library.pack(
        "copy_blocks",
        addresses.data_ptr(), pairs.data_ptr(), len(kv_caches), pairs.shape[0], first.shape[1], block_bytes,
    )  # fmt: skip
    library.run(op)
