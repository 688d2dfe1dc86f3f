"""Multi-head latent attention: attention of many heads to latents, which are keys and, but for their ends, values.

The attention kernels are those of `attention`: all heads share one cache, so a tile's rows are those of up to 64 heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.attention_metadata import AttentionMetadata
from octavo_kernels.attention_options import AttentionOptions
from octavo_kernels.triton.attention import attend_pages, check_attention
from octavo_kernels.triton.dependent_launch import pdl_options, wait_for_previous_kernel
from octavo_kernels.triton.rope import normed, turn

HEADS = 16  # of a program that turns queries
MOST_HEADS = 64  # of a tile: with 512 elements of output each they fill the registers
MOST_EXACT_HEADS = 16  # in float32
FEW_ROWS = 16  # rows of a tile where there are no more; the least that tensor cores take
MANY_ROWS = 64
CHANNELS = 128


@triton.jit
def latent_cache_kernel(
    q_ptr,
    q_row,
    q_head,
    latent_ptr,
    latent_row,
    positions_ptr,
    table_ptr,
    table_stride,
    num_positions,
    norm_ptr,
    eps,
    queries_ptr,
    cache_ptr,
    block_stride,
    slot_stride,
    slots_ptr,
    NUM_HEADS: tl.constexpr,
    PLAIN: tl.constexpr,
    SIZE: tl.constexpr,
    TURNED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Grid (rows, 1 + tiles of HEADS heads): a latent is normed and cached, the ends of queries are turned."""
    wait_for_previous_kernel()
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    HALF: tl.constexpr = TURNED // 2
    e = tl.arange(0, HALF_PAD)
    # Padding rows may have any position: clamp it to the table.
    position = tl.minimum(tl.maximum(tl.load(positions_ptr + row), 0), num_positions - 1)
    entry = table_ptr + position * table_stride + e
    cos = tl.load(entry, mask=e < HALF, other=1.0)[None, :]
    sin = tl.load(entry + HALF, mask=e < HALF, other=0.0)[None, :]
    if tile == 0:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        if slot >= 0:
            source = latent_ptr + row * latent_row
            target = cache_ptr + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride
            d = tl.arange(0, SIZE_PAD)
            x = tl.load(source + d, mask=d < SIZE, other=0.0)[None, :]
            wide = x.to(tl.float32)
            scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / SIZE + eps)[:, None]
            kept = normed(x, tl.load(norm_ptr + d, mask=d < SIZE, other=0.0), x.dtype, scale)
            tl.store((target + d)[None, :], kept.to(cache_ptr.dtype.element_ty), mask=(d < SIZE)[None, :])
            ends = (e < HALF)[None, :]
            turn(source + SIZE + e[None, :], target + SIZE + e[None, :], cos, sin, ends, HALF)
    else:
        head = (tile - 1) * HEADS + tl.arange(0, HEADS)[:, None]
        ends = (head < NUM_HEADS) & (e < HALF)[None, :]
        source = q_ptr + row * q_row + head * q_head + PLAIN + e[None, :]
        target = queries_ptr + (row * NUM_HEADS + head) * (SIZE + TURNED) + SIZE + e[None, :]
        turn(source, target, cos, sin, ends, HALF)


@triton.jit(do_not_specialize=["num_rows"])
def head_linear_kernel(
    x_ptr,
    x_row,
    x_head,
    weight_ptr,
    out_ptr,
    out_row,
    out_head,
    num_rows,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (tiles of rows, tiles of channels, heads): the tiles of rows that share a weight are neighbours."""
    wait_for_previous_kernel()
    head = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    rows = m.to(tl.int64)[:, None]
    there, wanted = (m < num_rows)[:, None], (n < CHANNELS)[None, :]
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in tl.range(0, WIDTH, BLOCK_K):
        at = first + k
        x = tl.load(x_ptr + rows * x_row + head * x_head + at[None, :], mask=there & (at < WIDTH)[None, :], other=0.0)
        weights = weight_ptr + (head * WIDTH + at[:, None]) * CHANNELS + n[None, :]
        w = tl.load(weights, mask=(at < WIDTH)[:, None] & wanted, other=0.0)
        sums = tl.dot(x, w.to(x.dtype), sums, input_precision=PRECISION)
    target = out_ptr + rows * out_row + head * out_head + n[None, :]
    tl.store(target, sums.to(out_ptr.dtype.element_ty), mask=there & wanted)


def head_linear(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """``x [T, heads, width or more]`` times each head's own ``weight [heads, width, channels]``, into the first
    channels of ``out [T, heads, channels or more]``."""
    (rows, heads, _), (_, width, channels) = x.shape, weight.shape
    block_m = FEW_ROWS if rows <= FEW_ROWS or x.dtype == torch.float32 else MANY_ROWS
    block_n = min(CHANNELS, max(16, triton.next_power_of_2(channels)))
    block_k = min(64, max(16, triton.next_power_of_2(width)))
    head_linear_kernel[(triton.cdiv(rows, block_m), triton.cdiv(channels, block_n), heads)](
        x,
        x.stride(0),
        x.stride(1),
        weight.contiguous(),
        out,
        out.stride(0),
        out.stride(1),
        rows,
        WIDTH=width,
        CHANNELS=channels,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=3,
        **pdl_options(x.device),
    )


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
    (rows, heads, size), turned = q.shape, cos_sin_cache.shape[1]
    if q.stride(2) != 1:
        q = q.contiguous()
    if latent.stride(1) != 1:
        latent = latent.contiguous()
    queries = q.new_empty((rows, heads, latent.shape[1]))
    if not rows:
        return queries
    tile = min(HEADS, triton.next_power_of_2(heads))
    latent_cache_kernel[(rows, 1 + triton.cdiv(heads, tile))](
        q,
        *q.stride()[:2],
        latent,
        latent.stride(0),
        positions,
        cos_sin_cache,
        cos_sin_cache.stride(0),
        cos_sin_cache.shape[0],
        norm_weight,
        eps,
        queries,
        kv_cache,
        kv_cache.stride(1),
        kv_cache.stride(3),
        slot_mapping,
        NUM_HEADS=heads,
        PLAIN=size - turned,
        SIZE=norm_weight.numel(),
        TURNED=turned,
        BLOCK_SIZE=kv_cache.shape[3],
        SIZE_PAD=triton.next_power_of_2(norm_weight.numel()),
        HALF_PAD=triton.next_power_of_2(turned // 2),
        HEADS=tile,
        num_warps=1,
        **pdl_options(q.device),
    )
    head_linear(q, key_weight, queries)
    return queries


def latent_attention(
    queries: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, scale: float, value_weight: Tensor
) -> Tensor:
    """See `octavo_kernels.latent_attention`. Raises ValueError for a cache of another dtype than the queries."""
    if kv_cache.dtype != queries.dtype:
        raise ValueError(f"a KV cache in {kv_cache.dtype} does not go with latent queries in {queries.dtype}")
    heads, size, channels = value_weight.shape
    most = MOST_EXACT_HEADS if queries.dtype == torch.float32 else MOST_HEADS
    shared = max(count for count in range(1, min(most, heads) + 1) if heads % count == 0)
    pages = kv_cache.expand(-1, -1, heads // shared, -1, -1)  # of every tile of heads the same
    check_attention(queries[..., :size], pages, scale)
    attended = attend_pages(queries, pages, metadata, AttentionOptions(scale), turned=queries.shape[2] - size)
    out = queries.new_empty((*queries.shape[:2], channels))
    if out.numel():
        head_linear(attended, value_weight, out)
    return out
