"""Linear layers: cuBLAS, and a Triton kernel for at most 16 rows, where reading the weight takes all the time.

The weight is the long operand of the tensor cores and the activations the short one, so that 64 weight rows and 16
activations make one product of a warp group. K is split until every multiprocessor has enough bytes in flight.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from octavo_kernels.gpu_parts import is_on
from octavo_kernels.triton.dependent_launch import pdl_options, prefetch_constants, wait_for_previous_kernel
from octavo_kernels.triton.devices import HOPPER, Facts, facts
from octavo_kernels.triton.split_k import MAX_TILES, counters, empty_parts, is_last_part, sum_of_parts

MAX_ROWS = 16
DTYPES = (torch.bfloat16, torch.float16)
BLOCK_N = 64  # rows of the weight: the shortest that wgmma takes
# 3 stages of (64 + 16) x 128 x 2 bytes are 60 KB of a Hopper's 227 (180 KB in flight in all), 40 KB of 99 elsewhere.
PROGRAMS_PER_SM, PROGRAMS_PER_SMALL_SM = 3, 2
MAX_SPLITS = 8
# Blocks of its weight that a program asks for before it waits: a block more than its stages.
PREFETCH_BLOCKS = tl.constexpr(4)
# Smaller weights, in bytes, are read in a few microseconds, so the counters and sums of parts cost too much: they are
# for cuBLAS unless MEASURED says otherwise.
MIN_WEIGHT_BYTES = 8 << 20


@dataclass(frozen=True)
class SmallConfig:
    """The columns of a tile, the parts that K is split into, and the warps and pipeline stages of a program."""

    block_k: int
    splits: int
    num_warps: int = 4
    num_stages: int = 3


# (N, K) of a weight -> its launch, None for cuBLAS; measured by benchmarks/gpu/layers.py. `small_config` has a rule for
# all others.
MEASURED: dict[tuple[int, int], SmallConfig | None] = {}


def small_config(n: int, k: int, device: Facts = HOPPER) -> SmallConfig | None:
    """The configuration to multiply at most 16 rows by a weight [n, k]; None if cuBLAS is faster."""
    if (n, k) in MEASURED:
        return MEASURED[n, k]
    return None if 2 * n * k < MIN_WEIGHT_BYTES else split_config(n, k, device)


@cache  # for all layers of a model
def split_config(n: int, k: int, device: Facts = HOPPER) -> SmallConfig | None:
    """The launch of the kernel for a weight [n, k] of any size; None where it has none."""
    if k % 64 or not BLOCK_N <= n <= BLOCK_N * MAX_TILES:
        return None
    block_k = 128 if k % 128 == 0 else 64
    blocks = k // block_k
    # Numbers of parts of equal length, none of them empty.
    choices = {triton.cdiv(blocks, triton.cdiv(blocks, s)) for s in range(1, max(1, min(MAX_SPLITS, blocks // 2)) + 1)}
    durations = {splits: estimated_duration(n, k, block_k, splits, device) for splits in choices}
    # The fewest parts within 5 % of the best duration.
    return SmallConfig(block_k, min(s for s in choices if 20 * durations[s] <= 21 * min(durations.values())))


def estimated_duration(n: int, k: int, block_k: int, splits: int, device: Facts = HOPPER) -> int:
    """Estimate the duration of ``splits`` parts, in units of the time that a program needs for one column of its tile.

    Programs run in waves, and each reads its part of K. A start costs as much as 128 columns, the sum of a part 64.
    """
    programs = device.multiprocessors * (PROGRAMS_PER_SM if device.has_large_memory else PROGRAMS_PER_SMALL_SM)
    waves: int = triton.cdiv(triton.cdiv(n, BLOCK_N) * splits, programs)
    columns: int = triton.cdiv(k // block_k, splits) * block_k
    return waves * (columns + 128 + 64 * (splits > 1))


@triton.jit(do_not_specialize=["num_rows"])
def small_linear_kernel(
    x_ptr,
    x_stride,
    weight_ptr,
    weight_stride,
    bias_ptr,
    out_ptr,
    parts_ptr,
    arrived_ptr,
    num_rows,
    N,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Grid (tiles of BLOCK_N weight rows, parts of K)."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    blocks: tl.constexpr = K // BLOCK_K
    each: tl.constexpr = (blocks + SPLITS - 1) // SPLITS
    begin = split * each
    weight_rows = weight_ptr + tl.minimum(n, N - 1).to(tl.int64)[:, None] * weight_stride
    # Weights are written when they are loaded, before any step, so they may be prefetched before the wait, in lines of
    # 128 bytes. After this program's part of a row lies the next program's; after the end of the row there is nothing.
    line: tl.constexpr = 1024 // weight_ptr.dtype.element_ty.primitive_bitwidth
    lines = begin * BLOCK_K + tl.arange(0, PREFETCH_BLOCKS * BLOCK_K // line) * line
    prefetch_constants(weight_rows + tl.minimum(lines, K - 1)[None, :])
    wait_for_previous_kernel()
    weights = weight_rows + k[None, :]
    rows = x_ptr + row.to(tl.int64)[None, :] * x_stride + k[:, None]
    row_mask = (row < num_rows)[None, :]
    sums = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    for block in range(begin, tl.minimum(begin + each, blocks)):
        w = tl.load(weights + block * BLOCK_K, eviction_policy="evict_first")
        x = tl.load(rows + block * BLOCK_K, mask=row_mask, other=0.0)
        sums = tl.dot(w, x, sums)
    wanted = (n < N)[:, None] & row_mask
    place = row[None, :] * N + n[:, None]
    if SPLITS > 1:
        size = num_rows * N
        if not is_last_part(sums, parts_ptr, place, wanted, size, split, arrived_ptr + tile, SPLITS):
            return
        sums = sum_of_parts(sums, parts_ptr, place, wanted, size, SPLITS)
    if HAS_BIAS:
        sums += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    tl.store(out_ptr + place, sums.to(out_ptr.dtype.element_ty), mask=wanted)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `octavo_kernels.linear`."""
    if (
        x.device.type != "cpu"
        and x.ndim == 2
        and 0 < len(x) <= MAX_ROWS
        and x.dtype in DTYPES
        and is_on("small-linear")
    ):
        config = small_config(len(weight), weight.shape[1], facts(x.device))
        if config is not None and x.dtype == weight.dtype and x.stride(1) == weight.stride(1) == 1:
            return small_linear(x, weight, bias, config)
    return functional.linear(x, weight, bias)


def small_linear(x: Tensor, weight: Tensor, bias: Tensor | None, config: SmallConfig) -> Tensor:
    """``x [T, K]`` of at most 16 rows times ``weight [N, K]^T``."""
    (rows, k), n = x.shape, len(weight)
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(n, BLOCK_N)
    parts = out
    if config.splits > 1:
        parts = empty_parts(config.splits, rows * n, x.device)
    small_linear_kernel[(tiles, config.splits)](
        x,
        x.stride(0),
        weight,
        weight.stride(0),
        weight if bias is None else bias,
        out,
        parts,
        counters(x.device),
        rows,
        n,
        K=k,
        ROWS=MAX_ROWS,
        BLOCK_N=BLOCK_N,
        BLOCK_K=config.block_k,
        SPLITS=config.splits,
        HAS_BIAS=bias is not None,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **pdl_options(x.device),
    )
    return out
