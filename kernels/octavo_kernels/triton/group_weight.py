"""Linear layers with weights in groups (`octavo_kernels.group_weight`): 4 or 8 bits a weight, activations of 16 bits.

As in ``small_linear.py`` the weight is the long operand of the tensor cores. Its codes come in 16 bytes a thread and
become numbers in the registers that the tensor cores read: nothing is written back. Up to 32 rows 4-bit integers stay
integers with an offset, a pair of them in two instructions; a product with the offsets alone takes these out again, and
the sum of a group is scaled in float32. Everything else is dequantised, scale included; only one scale a channel waits
for the sum. From DEQUANTIZE_ROWS rows on arithmetic takes the time: the weight is dequantised to memory once, for
cuBLAS.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from octavo_kernels.group_weight import TILE, WORDS, GroupWeight
from octavo_kernels.triton.dependent_launch import pdl_options, prefetch_constants, wait_for_previous_kernel
from octavo_kernels.triton.devices import facts
from octavo_kernels.triton.split_k import (
    TileConfig,
    counters,
    empty_parts,
    is_last_part,
    splits_of,
    sum_of_parts,
    tile_config,
)

DTYPES = (torch.bfloat16, torch.float16)
DEQUANTIZE_ROWS = 512
PREFETCH_BLOCKS = tl.constexpr(4)  # that a program asks for before it waits: a block more than its stages
TILE_WORDS = tl.constexpr(TILE * WORDS)
FLOAT_SHIFT = tl.constexpr(0x4B000000)  # 2^23 in float32: the bits below are an integer that is added


# By the most rows that they are for. Shared memory of a program: stages x (4 KB of codes for 64 channels + rows x 256
# bytes). Not measured yet: no GPU was at hand.
CONFIGS = {
    16: TileConfig(16, 64, num_warps=4, num_stages=4, programs_per_sm=6),
    32: TileConfig(32, 64, num_warps=4, num_stages=4, programs_per_sm=4),
    64: TileConfig(64, 128, num_warps=8, num_stages=4, programs_per_sm=2),
    DEQUANTIZE_ROWS - 1: TileConfig(128, 128, num_warps=8, num_stages=3, programs_per_sm=2),
}
SMALL_CONFIGS = {  # for 99 KB
    16: TileConfig(16, 64, num_warps=4, num_stages=4, programs_per_sm=2),
    32: TileConfig(32, 64, num_warps=4, num_stages=3, programs_per_sm=2),
    64: TileConfig(64, 64, num_warps=4, num_stages=3, programs_per_sm=1),
    DEQUANTIZE_ROWS - 1: TileConfig(128, 64, num_warps=8, num_stages=2, programs_per_sm=1),
}


def group_row_counts(weight: GroupWeight) -> list[int]:
    """See `octavo_kernels.group_row_counts`."""
    most: dict[tuple[TileConfig, int], int] = {}
    configs = configs_for(weight)
    for rows in (*range(16, DEQUANTIZE_ROWS, 16), DEQUANTIZE_ROWS - 1):  # the least tile of rows
        config = tile_config(configs, rows, weight.channels)
        most[config, _splits(config, rows, weight)] = rows
    return [*most.values(), DEQUANTIZE_ROWS]


def configs_for(weight: GroupWeight) -> dict[int, TileConfig]:
    """The tiles for the device of ``weight``, by the most rows that they are for."""
    return CONFIGS if facts(weight.codes.device).has_large_memory else SMALL_CONFIGS


def _splits(config: TileConfig, rows: int, weight: GroupWeight) -> int:
    tiles: int = triton.cdiv(weight.channels, config.channels) * triton.cdiv(rows, config.rows)
    programs = config.programs_per_sm * facts(weight.codes.device).multiprocessors
    return splits_of(tiles, weight.codes.shape[1], programs)


@triton.jit
def pair_of_integers(words, SHIFT: tl.constexpr, dtype: tl.constexpr):
    """The nibbles at bits SHIFT and SHIFT + 16, each as 128 (bfloat16) or 1024 (float16) more than it is."""
    offset: tl.constexpr = 0x64006400 if dtype == tl.float16 else 0x43004300
    bits = ((words >> SHIFT) & 0x000F000F) | offset
    low, high = bits.to(tl.uint16), (bits >> 16).to(tl.uint16)
    return tl.join(low.to(dtype, bitcast=True), high.to(dtype, bitcast=True))


@triton.jit
def integers_of(words, BLOCK_N: tl.constexpr, dtype: tl.constexpr):
    """4-bit codes [BLOCK_N, 128] of uint32 [BLOCK_N, 16], with the offset of `pair_of_integers`."""
    words = tl.reshape(words, (BLOCK_N, 4, 4))  # thread, word
    first = tl.join(pair_of_integers(words, 0, dtype), pair_of_integers(words, 4, dtype))
    second = tl.join(pair_of_integers(words, 8, dtype), pair_of_integers(words, 12, dtype))
    codes = tl.join(first, second)  # [n, thread, word, odd, eight, sixteen]
    return tl.reshape(tl.permute(codes, (0, 2, 5, 4, 1, 3)), (BLOCK_N, 128))


@triton.jit
def number_of(words, SHIFT: tl.constexpr, FORM: tl.constexpr):
    """The code at bit SHIFT as float32: an integer with 2^23 added, or a floating-point number times a power of 2."""
    code = words >> SHIFT
    if FORM == "int4":
        bits = (code & 0xF) | FLOAT_SHIFT
    elif FORM == "int8":
        bits = (code & 0xFF) | FLOAT_SHIFT
    elif FORM == "e2m1":
        bits = ((code & 0x8) << 28) | ((code & 0x7) << 22)
    else:
        bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def numbers_of(words, BLOCK_N: tl.constexpr, FORM: tl.constexpr):
    """Codes float32 [BLOCK_N, columns of a block] of uint32 [BLOCK_N, 16], see `number_of`."""
    words = tl.reshape(words, (BLOCK_N, 4, 4))  # thread, word
    if FORM == "int4" or FORM == "e2m1":
        a = tl.join(number_of(words, 0, FORM), number_of(words, 16, FORM))
        b = tl.join(number_of(words, 4, FORM), number_of(words, 20, FORM))
        c = tl.join(number_of(words, 8, FORM), number_of(words, 24, FORM))
        d = tl.join(number_of(words, 12, FORM), number_of(words, 28, FORM))
        codes = tl.join(tl.join(a, b), tl.join(c, d))  # [n, thread, word, odd, eight, sixteen]
        out = tl.reshape(tl.permute(codes, (0, 2, 5, 4, 1, 3)), (BLOCK_N, 128))
    else:
        a = tl.join(number_of(words, 0, FORM), number_of(words, 8, FORM))
        b = tl.join(number_of(words, 16, FORM), number_of(words, 24, FORM))
        codes = tl.join(a, b)  # [n, thread, word, odd, eight]
        out = tl.reshape(tl.permute(codes, (0, 2, 4, 1, 3)), (BLOCK_N, 64))
    return out


@triton.jit
def scales_at(pointers):
    """Scales as float32; uint8 are exponents e of 2^(e - 127)."""
    scales = tl.load(pointers)
    if scales.dtype == tl.uint8:
        exponent = scales.to(tl.uint32)
        # 2^-127 has no exponent of its own.
        out = tl.where(exponent == 0, 0x00400000, exponent << 23).to(tl.float32, bitcast=True)
    else:
        out = scales.to(tl.float32)
    return out


@triton.jit
def values_of(
    words,
    scales_ptr,
    zeros_ptr,
    n,
    block,
    N,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    FORM: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Elements float32 [BLOCK_N, columns of a block] of channels ``n``, which lie below N; not SCALED: before that."""
    BLOCK_K: tl.constexpr = 128 if FORM == "int4" or FORM == "e2m1" else 64
    EACH: tl.constexpr = BLOCK_K if GROUP % BLOCK_K == 0 else GROUP  # columns with one scale in a block
    COUNT: tl.constexpr = BLOCK_K // EACH
    groups: tl.constexpr = (K + GROUP - 1) // GROUP
    group = tl.minimum(block * BLOCK_K // GROUP + tl.arange(0, COUNT), groups - 1)
    place = group[None, :] * N + n[:, None]
    values = tl.reshape(numbers_of(words, BLOCK_N, FORM), (BLOCK_N, COUNT, EACH))
    if FORM == "e2m1":
        values = values * 2.0**126
    elif FORM == "e4m3":
        values = values * 2.0**120
    elif HAS_ZEROS:
        zeros = tl.load(zeros_ptr + place).to(tl.float32)
        values = values - (tl.reshape(zeros, (BLOCK_N, COUNT, 1)) + 8388608.0)
    else:
        values = values - (8388608.0 + (8.0 if FORM == "int4" else 128.0))
    if SCALED:
        values = values * tl.reshape(scales_at(scales_ptr + place), (BLOCK_N, COUNT, 1))
    return tl.reshape(values, (BLOCK_N, BLOCK_K))


@triton.jit(do_not_specialize=["num_rows"])
def group_linear_kernel(
    x_ptr,
    x_stride,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    parts_ptr,
    arrived_ptr,
    num_rows,
    N,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    FORM: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Grid (tiles of BLOCK_N channels, parts of K, tiles of ROWS rows)."""
    BLOCK_K: tl.constexpr = 128 if FORM == "int4" or FORM == "e2m1" else 64
    SCALE_ROWS: tl.constexpr = GROUP >= K  # one scale a channel is applied to the sum
    INTEGERS: tl.constexpr = ROWS <= 32 and FORM == "int4" and GROUP % BLOCK_K == 0
    blocks: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    each: tl.constexpr = (blocks + SPLITS - 1) // SPLITS
    tile = tl.program_id(0)
    split = tl.program_id(1)
    begin = split * each
    own = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    n = tl.minimum(own, N - 1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    channels = codes_ptr + (n // 64).to(tl.int64) * (blocks * TILE_WORDS) + n % 64 * 16
    # Weights are written when they are loaded, before any step: they may be asked for before the wait. Nothing lies
    # after the last block.
    ahead = tl.minimum(begin + tl.arange(0, PREFETCH_BLOCKS), blocks - 1) * TILE_WORDS
    prefetch_constants(channels[:, None] + ahead[None, :])
    wait_for_previous_kernel()
    words = channels[:, None] + tl.arange(0, 16)[None, :]
    rows = x_ptr + row.to(tl.int64)[None, :] * x_stride + k[:, None]
    row_mask = (row < num_rows)[None, :]
    sums = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    for block in range(begin, tl.minimum(begin + each, blocks)):
        codes = tl.load(words + block * TILE_WORDS, eviction_policy="evict_first").to(tl.uint32, bitcast=True)
        mask = row_mask
        if K % BLOCK_K:
            mask = mask & (k < K - block * BLOCK_K)[:, None]
        x = tl.load(rows + block * BLOCK_K, mask=mask, other=0.0)
        if INTEGERS:
            place = block * BLOCK_K // GROUP * N + n
            offset = tl.full((BLOCK_N,), 8.0, tl.float32)
            if HAS_ZEROS:
                offset = tl.load(zeros_ptr + place).to(tl.float32)
            offset = -offset - (128.0 if x.dtype == tl.bfloat16 else 1024.0)
            part = tl.dot(tl.broadcast_to(offset.to(x.dtype)[:, None], (BLOCK_N, BLOCK_K)), x)
            part = tl.dot(integers_of(codes, BLOCK_N, x.dtype), x, part)
            sums += part if SCALE_ROWS else part * scales_at(scales_ptr + place)[:, None]
        else:
            w = values_of(codes, scales_ptr, zeros_ptr, n, block, N, K, GROUP, FORM, HAS_ZEROS, not SCALE_ROWS, BLOCK_N)
            sums = tl.dot(w.to(x.dtype), x, sums)
    wanted = (own < N)[:, None] & row_mask
    place = row[None, :] * N + own[:, None]
    if SPLITS > 1:
        arrived = arrived_ptr + tl.program_id(2) * tl.num_programs(0) + tile
        size = num_rows.to(tl.int64) * N
        if not is_last_part(sums, parts_ptr, place, wanted, size, split, arrived, SPLITS):
            return
        sums = sum_of_parts(sums, parts_ptr, place, wanted, size, SPLITS)
    if SCALE_ROWS:
        sums = sums * scales_at(scales_ptr + n)[:, None]
    if HAS_BIAS:
        sums += tl.load(bias_ptr + n).to(tl.float32)[:, None]
    tl.store(out_ptr + place, sums.to(out_ptr.dtype.element_ty), mask=wanted)


@triton.jit
def group_dequantize_kernel(
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    out_ptr,
    N,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    FORM: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
):
    """Grid (blocks of columns, tiles of 64 channels): columns in the order of the codes."""
    wait_for_previous_kernel()
    BLOCK_K: tl.constexpr = 128 if FORM == "int4" or FORM == "e2m1" else 64
    blocks: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    block = tl.program_id(0)
    row = tl.arange(0, 64)
    own = tl.program_id(1) * 64 + row
    at = (tl.program_id(1).to(tl.int64) * blocks + block) * TILE_WORDS
    words = tl.load(codes_ptr + at + row[:, None] * 16 + tl.arange(0, 16)[None, :]).to(tl.uint32, bitcast=True)
    w = values_of(words, scales_ptr, zeros_ptr, tl.minimum(own, N - 1), block, N, K, GROUP, FORM, HAS_ZEROS, True, 64)
    k = block * BLOCK_K + tl.arange(0, BLOCK_K)
    place = own[:, None].to(tl.int64) * K + k[None, :]
    tl.store(out_ptr + place, w.to(out_ptr.dtype.element_ty), mask=(own < N)[:, None] & (k < K)[None, :])


def group_dequantize(weight: GroupWeight, dtype: torch.dtype) -> Tensor:
    """See `octavo_kernels.group_dequantize`."""
    values = _dequantize(weight, dtype)
    if weight.order is None:
        return values
    out = torch.empty_like(values)
    out[:, weight.order] = values
    return out


def group_linear(x: Tensor, weight: GroupWeight, bias: Tensor | None = None) -> Tensor:
    """See `octavo_kernels.group_linear`."""
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    if x.dtype not in DTYPES or len(x) >= DEQUANTIZE_ROWS or not len(x):
        return functional.linear(x, _dequantize(weight, x.dtype), bias)
    config = tile_config(configs_for(weight), len(x), weight.channels)
    return launch(x if x.stride(1) == 1 else x.contiguous(), weight, bias, config)


def launch(
    x: Tensor, weight: GroupWeight, bias: Tensor | None, config: TileConfig, splits: int | None = None
) -> Tensor:
    """``x [T, width]``, columns in the order of the codes, times the weight, by one launch; ``splits`` parts of K."""
    (rows, k), n = x.shape, weight.channels
    if splits is None:
        splits = _splits(config, rows, weight)
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    group_linear_kernel[(triton.cdiv(n, config.channels), splits, triton.cdiv(rows, config.rows))](
        x,
        x.stride(0),
        weight.codes,
        weight.scales,
        weight.codes if weight.zeros is None else weight.zeros,
        weight.codes if bias is None else bias,
        out,
        empty_parts(splits, rows * n, x.device) if splits > 1 else out,
        counters(x.device),
        rows,
        n,
        K=k,
        GROUP=weight.group,
        FORM=weight.form,
        HAS_ZEROS=weight.zeros is not None,
        HAS_BIAS=bias is not None,
        ROWS=config.rows,
        BLOCK_N=config.channels,
        SPLITS=splits,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **pdl_options(x.device),
    )
    return out


def _dequantize(weight: GroupWeight, dtype: torch.dtype) -> Tensor:
    """The weight [channels, width], columns in the order of the codes."""
    codes = weight.codes
    out = torch.empty(weight.channels, weight.width, dtype=dtype, device=codes.device)
    group_dequantize_kernel[(codes.shape[1], codes.shape[0])](
        codes,
        weight.scales,
        codes if weight.zeros is None else weight.zeros,
        out,
        weight.channels,
        K=weight.width,
        GROUP=weight.group,
        FORM=weight.form,
        HAS_ZEROS=weight.zeros is not None,
        num_warps=4,
        **pdl_options(codes.device),
    )
    return out
