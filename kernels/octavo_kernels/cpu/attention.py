"""Rotary embedding with cache write, paged attention and block copies on CPU; the layouts of CPU caches."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels import reference
from octavo_kernels.attention_metadata import AttentionMetadata
from octavo_kernels.attention_options import AttentionOptions
from octavo_kernels.cpu.library import DTYPES, PAIR_ISAS, as_contiguous, get_library, threads_for

MAX_HEAD_SIZE = 576  # csrc/attention_scratch.h
_BF16_PAIRS, _INT8, _CHUNK, _KV_GROUP = 2, 3, 16, 32  # csrc/attention_ops.h, which describes the layouts


def attention_problem(block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype, head_size: int) -> str | None:
    """Return why these shapes and dtypes are not supported, beginning with the option to change; None if they are."""
    if kv_dtype == torch.float8_e4m3fn:
        return "kv_cache_dtype: an fp8 cache is for GPUs; int8 takes as little memory on a CPU"
    if kv_dtype != torch.int8:
        return None
    if get_library() is None:
        return "kv_cache_dtype: an int8 cache needs the C kernels, which are unavailable"
    if dtype not in DTYPES:
        return f"kv_cache_dtype: an int8 cache does not go with a model in {dtype}; use float32 or bfloat16"
    if block_size % _CHUNK:
        return f"block_size={block_size}: an int8 kv_cache_dtype needs a multiple of {_CHUNK}"
    if head_size % _KV_GROUP or head_size > MAX_HEAD_SIZE:
        return f"head_size={head_size}: an int8 kv_cache_dtype needs a multiple of {_KV_GROUP} up to {MAX_HEAD_SIZE}"
    return None


def kv_scale_bytes(kv_dtype: torch.dtype, head_size: int) -> int:
    """Bytes of the scales of one key or value in a cache, beside its elements."""
    return max(4, head_size // 16) if kv_dtype == torch.int8 else 0


def has_dense_blocks(kv_cache: Tensor) -> bool:
    """Return True if a block's keys are contiguous, and its values too. Blocks may lie anywhere."""
    _, _, heads, block_size, width = kv_cache.shape
    return kv_cache.stride()[2:] == (block_size * width, width, 1) or heads * block_size * width == 0


def has_pair_layout(kv_cache: Tensor) -> bool:
    """Return True if the library keeps this bfloat16 cache in pairs (csrc/attention_ops.h), unlike `reference`."""
    library, (block_size, head_size) = get_library(), kv_cache.shape[3:]
    return (
        library is not None
        and library.isa in PAIR_ISAS
        and kv_cache.dtype == torch.bfloat16
        and len(kv_cache) == 2
        and kv_cache.stride(0) != 0
        and has_dense_blocks(kv_cache)
        and block_size % _CHUNK == head_size % 32 == 0
        and head_size <= MAX_HEAD_SIZE
    )


def to_pair_layout(plain: Tensor) -> Tensor:
    """A plain bfloat16 cache [2, blocks, heads, block size, head size] in the pair layout, which has the same shape."""
    chunks = plain.unflatten(3, (-1, _CHUNK))
    keys = chunks[0].unflatten(-1, (-1, 2)).transpose(3, 4).reshape(plain.shape[1:])
    values = chunks[1].unflatten(3, (-1, 2)).transpose(4, 5).reshape(plain.shape[1:])
    return torch.stack([keys, values])


def from_pair_layout(pair_layout: Tensor) -> Tensor:
    """The inverse of `to_pair_layout`."""
    shape, head_size = pair_layout.shape[1:], pair_layout.shape[-1]
    keys = pair_layout[0].reshape(*shape[:2], -1, head_size // 2, _CHUNK, 2).transpose(3, 4).reshape(shape)
    values = pair_layout[1].reshape(*shape[:2], -1, _CHUNK // 2, head_size, 2).transpose(4, 5).reshape(shape)
    return torch.stack([keys, values])


def _kv_dtype_code(kv_cache: Tensor, dtype: torch.dtype, head_size: int) -> int | None:
    """The code of csrc/attention_ops.h; None for a dtype that the library does not know.

    Raises ValueError for an int8 cache that the library cannot read: the reference backend cannot read it either.
    """
    if kv_cache.dtype != torch.int8:
        return _BF16_PAIRS if has_pair_layout(kv_cache) else DTYPES.get(kv_cache.dtype)
    problem = attention_problem(kv_cache.shape[3], dtype, torch.int8, head_size)
    if problem or kv_cache.shape[4] != head_size + kv_scale_bytes(torch.int8, head_size):
        raise ValueError(
            problem or f"heads of {head_size} do not go with an int8 cache of {kv_cache.shape[4]} bytes each"
        )
    return _INT8


def _reject_int8(kv_cache: Tensor) -> None:
    if kv_cache.dtype == torch.int8:
        raise ValueError("an int8 KV cache is for the C kernels alone, without k_scale and v_scale")


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
    """See `octavo_kernels.rope_and_cache`. Raises ValueError for an int8 cache that needs plain torch."""
    library, dtype, kv_dtype = get_library(), DTYPES.get(qkv.dtype), _kv_dtype_code(kv_cache, qkv.dtype, head_size)
    norms = {weight.dtype for weight in (q_norm_weight, k_norm_weight) if weight is not None}
    supported = len(norms) < 2 and norms <= {qkv.dtype, torch.float32}
    supported = (
        supported and (cos_sin_cache is None or cos_sin_cache.dtype == torch.float32) and has_dense_blocks(kv_cache)
    )
    supported = supported and k_scale == v_scale == 1.0
    pair_layout = kv_dtype == _BF16_PAIRS
    if library is None or dtype is None or kv_dtype is None or not supported:
        _reject_int8(kv_cache)
        plain = from_pair_layout(kv_cache) if pair_layout else kv_cache  # slow; not on the path of any served model
        q = reference.rope_and_cache(
            qkv,
            positions,
            cos_sin_cache,
            plain,
            slot_mapping,
            num_heads,
            num_kv_heads,
            head_size,
            q_norm_weight,
            k_norm_weight,
            eps,
            k_scale,
            v_scale,
        )
        if pair_layout:
            kv_cache.copy_(to_pair_layout(plain))
        return q
    qkv, positions, slot_mapping = (
        as_contiguous(qkv),
        as_contiguous(positions, torch.int64),
        as_contiguous(slot_mapping, torch.int64),
    )
    table = None if cos_sin_cache is None else as_contiguous(cos_sin_cache)
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
        *_byte_strides(kv_cache),
        dtype,
        kv_dtype,
        DTYPES[norms.pop()] if norms else dtype,
        eps,
    )
    library.run(op, threads_for(qkv.numel()))
    return q


def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    options: AttentionOptions,
    limit: Tensor | None = None,
) -> Tensor:
    """See `octavo_kernels.paged_attention`. Raises ValueError for an int8 cache that needs plain torch."""
    rows, num_heads, head_size = q.shape
    sinks = options.sinks
    library, dtype, kv_dtype = get_library(), DTYPES.get(q.dtype), _kv_dtype_code(kv_cache, q.dtype, head_size)
    if (
        library is None
        or dtype is None
        or kv_dtype is None
        or head_size > MAX_HEAD_SIZE
        or not has_dense_blocks(kv_cache)
        or not options.k_scale == options.v_scale == 1.0
        or (sinks is not None and not (sinks.dtype == torch.float32 and sinks.is_contiguous()))
        or (limit is not None and not (limit.dtype == torch.int32 and limit.is_contiguous()))
    ):
        _reject_int8(kv_cache)
        plain = from_pair_layout(kv_cache) if has_pair_layout(kv_cache) else kv_cache
        return reference.paged_attention(q, plain, metadata, options, limit)
    q = as_contiguous(q)
    table = metadata.block_table
    if table.dtype != torch.int32 or table.stride(-1) != 1:
        table = table.to(torch.int32).contiguous()
    seq_lens, starts = (
        as_contiguous(metadata.seq_lens, torch.int32),
        as_contiguous(metadata.query_start_loc, torch.int32),
    )
    out = torch.empty_like(q)
    op = library.pack(
        "paged_attention",
        q.data_ptr(),
        kv_cache.data_ptr(),
        table.data_ptr(),
        seq_lens.data_ptr(),
        starts.data_ptr(),
        0 if sinks is None else sinks.data_ptr(),
        0 if limit is None else limit.data_ptr(),
        out.data_ptr(),
        rows,
        min(metadata.num_actual_tokens, rows),
        seq_lens.shape[0],
        num_heads,
        kv_cache.shape[2],
        head_size,
        kv_cache.shape[3],
        *_byte_strides(kv_cache),
        table.stride(0),
        options.window or 0,
        int(options.chunked),
        dtype,
        kv_dtype,
        options.scale_of(head_size),
        options.softcap or 0.0,
    )
    library.run(op)
    return out


def _byte_strides(kv_cache: Tensor) -> tuple[int, int]:
    """Between blocks, and between keys and values."""
    return kv_cache.stride(1) * kv_cache.element_size(), kv_cache.stride(0) * kv_cache.element_size()


def copy_blocks(blocks: Tensor, pairs: Tensor) -> None:
    """See `octavo_kernels.copy_blocks`."""
    library = get_library()
    if pairs.numel() == 0:
        return
    if library is None or not blocks.is_contiguous():
        return reference.copy_blocks(blocks, pairs)
    pairs = as_contiguous(pairs, torch.int64)
    op = library.pack("copy_blocks", blocks.data_ptr(), pairs.data_ptr(), pairs.shape[0], blocks[0].nbytes)
    library.run(op)
