"""Multi-head latent attention on CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels import reference
from octavo_kernels.attention_metadata import AttentionMetadata
from octavo_kernels.attention_options import AttentionOptions
from octavo_kernels.cpu.attention import MAX_HEAD_SIZE, has_dense_blocks, paged_attention
from octavo_kernels.cpu.library import DTYPES, Library, as_contiguous, get_library, threads_for


def _library(x: Tensor, weight: Tensor, kv_cache: Tensor) -> Library | None:
    """The C kernels, where they can compute this."""
    if kv_cache.dtype == torch.int8:
        raise ValueError("an int8 KV cache is not for latent attention; use float32 or bfloat16")
    known = {x.dtype, weight.dtype, kv_cache.dtype} <= DTYPES.keys() and weight.is_contiguous()
    return get_library() if known and has_dense_blocks(kv_cache) and kv_cache.shape[4] <= MAX_HEAD_SIZE else None


def _head_linear(library: Library, x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Multiply ``x [T, heads, width or more]`` head by head; results go into the first columns of ``out``."""
    heads, width, channels = weight.shape
    op = library.pack(
        "head_linear",
        x.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        x.shape[0],
        heads,
        width,
        channels,
        x.stride(0),
        x.stride(1),
        out.stride(0),
        out.stride(1),
        DTYPES[x.dtype],
        DTYPES[weight.dtype],
    )
    library.run(op, threads_for(x.shape[0] * weight.numel()))


def latent_queries(
    q: Tensor,
    latent: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    key_weight: Tensor,
    norm_weight: Tensor,
    eps: float,
) -> Tensor:
    """See `octavo_kernels.latent_queries`."""
    library = _library(q, key_weight, kv_cache)
    if library is None or norm_weight.dtype not in (q.dtype, torch.float32) or latent.dtype != q.dtype:
        return reference.latent_queries(
            q, latent, positions, cos_sin_cache, kv_cache, slot_mapping, key_weight, norm_weight, eps
        )
    q, latent = as_contiguous(q), as_contiguous(latent)
    positions, slot_mapping = as_contiguous(positions, torch.int64), as_contiguous(slot_mapping, torch.int64)
    table = as_contiguous(cos_sin_cache)
    rows, heads, size = q.shape
    queries = q.new_empty((rows, heads, latent.shape[1]))
    op = library.pack(
        "latent_cache",
        q.data_ptr(),
        latent.data_ptr(),
        positions.data_ptr(),
        table.data_ptr(),
        kv_cache.data_ptr(),
        slot_mapping.data_ptr(),
        norm_weight.data_ptr(),
        queries.data_ptr(),
        rows,
        heads,
        size,
        norm_weight.numel(),
        table.shape[1],
        table.shape[0],
        kv_cache.shape[3],
        kv_cache.stride(1) * kv_cache.element_size(),
        DTYPES[q.dtype],
        DTYPES[kv_cache.dtype],
        DTYPES[norm_weight.dtype],
        eps,
    )
    library.run(op, threads_for(latent.numel() + q.numel()))
    _head_linear(library, q, key_weight, queries)
    return queries


def latent_attention(
    queries: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, scale: float, value_weight: Tensor
) -> Tensor:
    """See `octavo_kernels.latent_attention`."""
    library = _library(queries, value_weight, kv_cache)
    if library is None:
        return reference.latent_attention(queries, kv_cache, metadata, scale, value_weight)
    # Keys are values, too: what is not read of the result costs an eighth of the work with values.
    attended = paged_attention(queries, kv_cache.expand(2, -1, -1, -1, -1), metadata, AttentionOptions(scale))
    out = queries.new_empty((*queries.shape[:2], value_weight.shape[2]))
    _head_linear(library, attended, value_weight, out)
    return out
