"""Linear layers in 8 bits: activations quantised row by row, then int8 or FP8 tensor cores.

Integers are summed exactly. The tensor cores sum FP8 products with fewer bits than float32 has, so their sums are taken
over at most 128 columns and added in float32; that is also where blocks of columns change their scales. Where torch has
a product of FP8 rows it is used from MIN_TORCH_ROWS rows on.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.scaled_weight import BLOCK, HIGHEST, ScaledWeight
from octavo_kernels.triton.dependent_launch import pdl_options, prefetch_constants, wait_for_previous_kernel
from octavo_kernels.triton.devices import Facts, facts
from octavo_kernels.triton.split_k import (
    TileConfig,
    counters,
    empty_parts,
    is_last_part,
    splits_of,
    sum_of_parts,
    tile_config,
)

MAX_COLUMNS = 8192  # of a row that a program of quantize_kernel holds at a time
MIN_TORCH_ROWS = 65
MAX_SPLIT_ROWS = 64  # with more, a device that is full is left alone: the variants of a kernel come to an end
PREFETCH_BLOCKS = tl.constexpr(4)


# By the most rows that they are for; a stage is (rows + channels) x 128 bytes. Not measured yet: no GPU was at hand.
CONFIGS = {
    16: TileConfig(16, 64, num_warps=4, num_stages=4, programs_per_sm=5),
    64: TileConfig(64, 128, num_warps=8, num_stages=4, programs_per_sm=2),
    1 << 30: TileConfig(128, 128, num_warps=8, num_stages=4, programs_per_sm=1),
}
SMALL_CONFIGS = {  # for 99 KB
    16: TileConfig(16, 64, num_warps=4, num_stages=4, programs_per_sm=2),
    64: TileConfig(64, 128, num_warps=8, num_stages=3, programs_per_sm=1),
    1 << 30: TileConfig(128, 128, num_warps=8, num_stages=3, programs_per_sm=1),
}


@triton.jit(do_not_specialize=["scales_stride"])
def quantize_kernel(
    x_ptr,
    x_stride,
    values_ptr,
    scales_ptr,
    scales_stride,
    HIGHEST: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (rows, groups of GROUP columns), COLUMNS of one at a time."""
    wait_for_previous_kernel()
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * GROUP
    end: tl.constexpr = WIDTH if WIDTH < GROUP else GROUP
    highest = 0.0
    for at in range(0, end, COLUMNS):
        k = start + at + tl.arange(0, COLUMNS)
        x = tl.load(x_ptr + row * x_stride + k, mask=(k < WIDTH) & (k < start + GROUP), other=0.0).to(tl.float32)
        # A row with NaN has an infinite scale: its products are NaN.
        highest = tl.maximum(highest, tl.max(tl.where(x != x, float("inf"), tl.abs(x)), axis=0))
    inverse = tl.where(highest > 0, HIGHEST / highest, 0.0)
    tl.store(scales_ptr + tl.program_id(1) * scales_stride + row, highest / HIGHEST)
    for at in range(0, end, COLUMNS):
        k = start + at + tl.arange(0, COLUMNS)
        mask = (k < WIDTH) & (k < start + GROUP)
        x = tl.load(x_ptr + row * x_stride + k, mask=mask, other=0.0).to(tl.float32) * inverse
        x = tl.minimum(tl.maximum(tl.where(x != x, 0.0, x), -HIGHEST), HIGHEST)
        if values_ptr.dtype.element_ty == tl.int8:
            # Adding 1.5 * 2^23 rounds to an integer, ties to even.
            x = (x + 12582912.0) - 12582912.0
        tl.store(values_ptr + row * WIDTH + k, x.to(values_ptr.dtype.element_ty), mask=mask)


def quantize_tokens(x: Tensor, dtype: torch.dtype, blocks: int = 1) -> tuple[Tensor, Tensor]:
    """See `octavo_kernels.quantize_tokens`."""
    rows, width = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    values = torch.empty(rows, width, dtype=dtype, device=x.device)
    scales = torch.empty(blocks, rows, dtype=torch.float32, device=x.device)
    group = BLOCK if blocks > 1 else triton.next_power_of_2(width)
    columns = min(group, MAX_COLUMNS)
    if rows:
        quantize_kernel[(rows, blocks)](
            x,
            x.stride(0),
            values,
            scales,
            rows,
            HIGHEST=HIGHEST[dtype],
            WIDTH=width,
            GROUP=group,
            COLUMNS=columns,
            num_warps=1 if columns <= 512 else 8,
            **pdl_options(x.device),
        )
    return values, scales.t()


@triton.jit(do_not_specialize=["num_rows", "x_scales_stride"])
def scaled_linear_kernel(
    x_ptr,
    x_scales_ptr,
    x_scales_stride,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    parts_ptr,
    arrived_ptr,
    num_rows,
    N,
    K: tl.constexpr,
    IN_BLOCKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Grid (tiles of BLOCK_N channels, parts of K, tiles of ROWS rows)."""
    INTEGERS: tl.constexpr = weight_ptr.dtype.element_ty == tl.int8
    BLOCK_K: tl.constexpr = 128
    blocks: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    each: tl.constexpr = (blocks + SPLITS - 1) // SPLITS
    tile = tl.program_id(0)
    split = tl.program_id(1)
    begin = split * each
    own = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    n = tl.minimum(own, N - 1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    known = tl.minimum(row, num_rows - 1)
    k = tl.arange(0, BLOCK_K)
    channels = weight_ptr + n.to(tl.int64)[:, None] * K
    # Weights are written before any step: they may be asked for before the wait. A line is 128 of their bytes.
    ahead = tl.minimum(begin + tl.arange(0, PREFETCH_BLOCKS), blocks - 1) * BLOCK_K
    prefetch_constants(channels + ahead[None, :])
    wait_for_previous_kernel()
    weights = channels + k[None, :]
    rows = x_ptr + known.to(tl.int64)[None, :] * K + k[:, None]
    sums = tl.zeros((BLOCK_N, ROWS), dtype=tl.int32 if INTEGERS else tl.float32)
    for block in range(begin, tl.minimum(begin + each, blocks)):
        if K % BLOCK_K:
            inside = k < K - block * BLOCK_K
            w = tl.load(weights + block * BLOCK_K, mask=inside[None, :], other=0.0)
            x = tl.load(rows + block * BLOCK_K, mask=inside[:, None], other=0.0)
        else:
            w = tl.load(weights + block * BLOCK_K)
            x = tl.load(rows + block * BLOCK_K)
        if INTEGERS:
            sums = tl.dot(w, x, sums, out_dtype=tl.int32)
        elif IN_BLOCKS:
            left = tl.load(scales_ptr + block * N + n)
            right = tl.load(x_scales_ptr + block * x_scales_stride + known)
            sums += tl.dot(w, x) * left[:, None] * right[None, :]
        else:
            sums += tl.dot(w, x)
    total = sums.to(tl.float32)
    wanted = (own < N)[:, None] & (row < num_rows)[None, :]
    place = row[None, :].to(tl.int64) * N + own[:, None]
    if SPLITS > 1:
        arrived = arrived_ptr + tl.program_id(2) * tl.num_programs(0) + tile
        size = num_rows.to(tl.int64) * N
        if not is_last_part(total, parts_ptr, place, wanted, size, split, arrived, SPLITS):
            return
        total = sum_of_parts(total, parts_ptr, place, wanted, size, SPLITS)
    if not IN_BLOCKS:
        total = total * tl.load(scales_ptr + n)[:, None] * tl.load(x_scales_ptr + known)[None, :]
    if HAS_BIAS:
        total += tl.load(bias_ptr + n).to(tl.float32)[:, None]
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=wanted)


def scaled_linear(x: Tensor, weight: ScaledWeight, bias: Tensor | None = None) -> Tensor:
    """See `octavo_kernels.scaled_linear`."""
    values, scales = quantize_tokens(x, weight.values.dtype, weight.blocks)
    if len(x) >= MIN_TORCH_ROWS and _torch_takes(x, weight):
        return torch._scaled_mm(values, weight.values.t(), scales, weight.scales, bias=bias, out_dtype=x.dtype)
    return launch(values, scales, weight, bias, x.dtype)


def _torch_takes(x: Tensor, weight: ScaledWeight) -> bool:
    """True if torch multiplies FP8 with a scale for each row: on GPUs with FP8, to bfloat16, in sizes of 16."""
    return (
        x.device.type == "cuda"
        and weight.values.dtype == torch.float8_e4m3fn
        and weight.blocks == 1
        and x.dtype == torch.bfloat16
        and not any(size % 16 for size in weight.values.shape)
    )


def scaled_row_counts(weight: ScaledWeight) -> list[int]:
    """See `octavo_kernels.scaled_row_counts`."""
    return _row_counts(*weight.values.shape, facts(weight.values.device))


@cache  # for all layers of a model
def _row_counts(n: int, k: int, device: Facts) -> list[int]:
    most: dict[tuple[TileConfig, int], int] = {}
    # What is launched changes only where another tile of rows begins, and no more once tiles alone fill the device.
    for rows in (16, *range(64, 128 * device.multiprocessors + 1, 64)):
        config = tile_config(configs_for(device), rows, n)
        most[config, _splits(config, rows, n, k, device)] = rows
    return list(most.values())


def configs_for(device: Facts) -> dict[int, TileConfig]:
    """The tiles for a device, by the most rows that they are for."""
    return CONFIGS if device.has_large_memory else SMALL_CONFIGS


def _splits(config: TileConfig, rows: int, n: int, k: int, device: Facts) -> int:
    tiles: int = triton.cdiv(n, config.channels) * triton.cdiv(rows, config.rows)
    programs = config.programs_per_sm * device.multiprocessors
    if rows > MAX_SPLIT_ROWS and tiles >= programs:
        return 1
    return splits_of(tiles, triton.cdiv(k, 128), programs)


def launch(x: Tensor, x_scales: Tensor, weight: ScaledWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Quantised ``x [T, K]`` times the weight, by one launch: ``[T, N]`` in ``dtype``."""
    (rows, k), n = x.shape, len(weight.values)
    out = torch.empty(rows, n, dtype=dtype, device=x.device)
    if not rows:
        return out
    device = facts(x.device)
    config = tile_config(configs_for(device), rows, n)
    splits = _splits(config, rows, n, k, device)
    scaled_linear_kernel[(triton.cdiv(n, config.channels), splits, triton.cdiv(rows, config.rows))](
        x,
        x_scales,
        x_scales.stride(1),
        weight.values,
        weight.scales,
        weight.scales if bias is None else bias,
        out,
        empty_parts(splits, rows * n, x.device) if splits > 1 else out,
        counters(x.device),
        rows,
        n,
        K=k,
        IN_BLOCKS=weight.blocks > 1,
        HAS_BIAS=bias is not None,
        ROWS=config.rows,
        BLOCK_N=config.channels,
        SPLITS=splits,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **pdl_options(x.device),
    )
    return out
