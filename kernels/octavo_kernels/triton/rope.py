"""Norms of q and k heads, rotary embedding and the write into the KV cache, straight from the QKV projection's output.

One launch instead of four (two norms, the rotation, the write). A program has some heads of one row: query heads are
written to a new tensor, key and value heads to the cache, rounded once to its dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.triton.dependent_launch import pdl_options, wait_for_previous_kernel

HEADS = 4  # a program: with 128 elements a head, 4 a thread; a row of an 8B model makes a dozen programs
FLOAT8_MAX = 448.0  # of e4m3; beyond it a conversion would give NaN


@triton.jit
def normed(x, weight, dtype: tl.constexpr, scale):
    """RMS norm as in transformers: rounded to the model's dtype before (a float32 weight: not) and after the weight is
    applied."""
    normed = x.to(tl.float32) * scale
    if weight.dtype != tl.float32:
        normed = normed.to(dtype).to(tl.float32)
    return (normed * weight.to(tl.float32)[None, :]).to(dtype)


@triton.jit
def rope_and_cache_kernel(
    qkv_ptr,
    qkv_stride,
    positions_ptr,
    table_ptr,
    table_stride,
    num_positions,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    q_out_ptr,
    kv_ptr,
    half_stride,
    block_stride,
    head_stride,
    slot_stride,
    slots_ptr,
    k_inverse,
    v_inverse,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ROT_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Grid (rows, tiles of HEADS heads)."""
    wait_for_previous_kernel()
    row = tl.program_id(0).to(tl.int64)
    # The grid's second axis counts query tiles, then key tiles, then value tiles: a program has heads of one kind.
    q_tiles: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    kv_tiles: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    tile = tl.program_id(1)
    is_q = tile < q_tiles
    is_v = tile >= q_tiles + kv_tiles
    first = tl.where(is_q, tile, tl.where(is_v, tile - q_tiles - kv_tiles, tile - q_tiles)) * HEADS
    head = first + tl.arange(0, HEADS)
    column = tl.arange(0, HEAD_PAD)
    known = (head < tl.where(is_q, NUM_HEADS, NUM_KV_HEADS))[:, None] & (column < HEAD_SIZE)[None, :]
    begin = tl.where(is_q, 0, tl.where(is_v, NUM_HEADS + NUM_KV_HEADS, NUM_HEADS))
    source = qkv_ptr + row * qkv_stride + (begin + head)[:, None] * HEAD_SIZE
    x = tl.load(source + column[None, :], mask=known, other=0.0)

    if not is_v:
        half: tl.constexpr = ROT_DIM // 2
        partner = tl.where(column < half, column + half, column - half)
        rotated = column < ROT_DIM
        if ROT_DIM > 0:
            other = tl.load(source + partner[None, :], mask=known & rotated[None, :], other=0.0)
        if NORM:
            weight_ptr = q_norm_ptr
            if not is_q:
                weight_ptr = k_norm_ptr
            wide = x.to(tl.float32)
            scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / HEAD_SIZE + eps)[:, None]
            x = normed(x, tl.load(weight_ptr + column, mask=column < HEAD_SIZE, other=0.0), x.dtype, scale)
            if ROT_DIM > 0:
                other = normed(other, tl.load(weight_ptr + partner, mask=rotated, other=0.0), x.dtype, scale)
        if ROT_DIM > 0:
            position = tl.load(positions_ptr + row)
            # Padding rows may have any position: clamp it to the table.
            position = tl.minimum(tl.maximum(position, 0), num_positions - 1)
            entry = table_ptr + position * table_stride + tl.where(column < half, column, column - half)
            cos = tl.load(entry, mask=rotated, other=1.0)
            sin = tl.load(entry + half, mask=rotated, other=0.0)
            sin = tl.where(column < half, -sin, sin)
            turned = x.to(tl.float32) * cos[None, :] + other.to(tl.float32) * sin[None, :]
            x = tl.where(rotated[None, :], turned.to(x.dtype), x)

    if is_q:
        tl.store(q_out_ptr + (row * NUM_HEADS + head[:, None]) * HEAD_SIZE + column[None, :], x, mask=known)
    else:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        if slot >= 0:
            offset = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride
            if is_v:
                offset += half_stride
            target = kv_ptr + offset + head.to(tl.int64)[:, None] * head_stride + column[None, :]
            if LIMIT > 0:  # fp8
                wide = x.to(tl.float32) * tl.where(is_v, v_inverse, k_inverse)
                stored = tl.minimum(tl.maximum(wide, -LIMIT), LIMIT).to(kv_ptr.dtype.element_ty)
            else:
                stored = x.to(kv_ptr.dtype.element_ty)
            tl.store(target, stored, mask=known)


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
    """See `octavo_kernels.rope_and_cache`. Raises ValueError for one norm without the other, or scales without fp8."""
    if (q_norm_weight is None) != (k_norm_weight is None):
        raise ValueError("q_norm_weight and k_norm_weight come together or not at all")
    if kv_cache.stride(4) != 1:
        raise ValueError(f"the elements of a head do not lie side by side in the KV cache: {kv_cache.stride()}")
    if qkv.stride(1) != 1:
        qkv = qkv.contiguous()
    q = torch.empty(qkv.shape[0], num_heads, head_size, dtype=qkv.dtype, device=qkv.device)
    if not q.numel():
        return q
    is_float8 = kv_cache.dtype == torch.float8_e4m3fn
    if not is_float8 and not k_scale == v_scale == 1.0:
        raise ValueError(f"k_scale and v_scale are for an fp8 KV cache; this one is {kv_cache.dtype}")
    table = cos_sin_cache
    heads = min(HEADS, triton.next_power_of_2(num_kv_heads))
    tiles = triton.cdiv(num_heads, heads) + 2 * triton.cdiv(num_kv_heads, heads)
    rope_and_cache_kernel[(qkv.shape[0], tiles)](
        qkv,
        qkv.stride(0),
        positions,
        qkv if table is None else table,
        0 if table is None else table.stride(0),
        0 if table is None else table.shape[0],
        qkv if q_norm_weight is None else q_norm_weight,
        qkv if k_norm_weight is None else k_norm_weight,
        eps,
        q,
        kv_cache,
        *kv_cache.stride()[:4],
        slot_mapping,
        1.0 / k_scale,
        1.0 / v_scale,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        ROT_DIM=0 if table is None else table.shape[1],
        BLOCK_SIZE=kv_cache.shape[3],
        HEAD_PAD=triton.next_power_of_2(head_size),
        HEADS=heads,
        NORM=q_norm_weight is not None,
        LIMIT=FLOAT8_MAX if is_float8 else 0.0,
        num_warps=4 if head_size * heads >= 256 else 1,
        **pdl_options(qkv.device),
    )
    return q


@triton.jit
def turn(source, target, cos, sin, inside, HALF: tl.constexpr):
    """Turn elements at ``source``, paired with those HALF after them, and store them at ``target``."""
    a = tl.load(source, mask=inside, other=0.0)
    b = tl.load(source + HALF, mask=inside, other=0.0)
    first, second = a.to(tl.float32), b.to(tl.float32)
    to = target.dtype.element_ty
    tl.store(target, (first * cos - second * sin).to(a.dtype).to(to), mask=inside)
    tl.store(target + HALF, (second * cos + first * sin).to(a.dtype).to(to), mask=inside)


@triton.jit
def rope_kernel(
    x_ptr,
    x_stride,
    positions_ptr,
    table_ptr,
    table_stride,
    num_positions,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Grid (rows, tiles of HEADS heads)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    e = tl.arange(0, HALF_PAD)[None, :]
    position = tl.minimum(tl.maximum(tl.load(positions_ptr + row), 0), num_positions - 1)
    entry = table_ptr + position * table_stride + e
    cos = tl.load(entry, mask=e < HALF, other=1.0)
    sin = tl.load(entry + HALF, mask=e < HALF, other=0.0)
    place = x_ptr + row * x_stride + head * HEAD_SIZE + e
    turn(place, place, cos, sin, (head < NUM_HEADS) & (e < HALF), HALF)


def rope_(x: Tensor, positions: Tensor, cos_sin_cache: Tensor, num_heads: int, head_size: int) -> None:
    """See `octavo_kernels.rope_`."""
    if not len(x):
        return
    heads, half = min(4 * HEADS, triton.next_power_of_2(num_heads)), cos_sin_cache.shape[1] // 2
    rope_kernel[(len(x), triton.cdiv(num_heads, heads))](
        x,
        x.stride(0),
        positions,
        cos_sin_cache,
        cos_sin_cache.stride(0),
        cos_sin_cache.shape[0],
        NUM_HEADS=num_heads,
        HEAD_SIZE=head_size,
        HALF=half,
        HALF_PAD=triton.next_power_of_2(half),
        HEADS=heads,
        num_warps=4,
    )
