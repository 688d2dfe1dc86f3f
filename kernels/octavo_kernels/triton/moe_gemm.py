"""Products of rows with the weights of their experts: a program has one tile of channels of one expert.

As in ``group_weight.py`` the weight is the long operand of the tensor cores, and codes become numbers in the registers
that these read. K is never split and its blocks are added in one order, so a row's result depends neither on its tile
nor on the tile's shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.moe import StackedWeight
from octavo_kernels.scaled_weight import BLOCK, ScaledWeight
from octavo_kernels.triton.activation import gated_product
from octavo_kernels.triton.dependent_launch import pdl_options, wait_for_previous_kernel
from octavo_kernels.triton.devices import facts
from octavo_kernels.triton.group_weight import scales_at, values_of
from octavo_kernels.triton.scaled_weight import quantize_tokens

TILE_WORDS = tl.constexpr(1024)  # 4 KB: `group_weight.TILE` channels
NEIGHBOURS = tl.constexpr(4)  # tiles of rows whose programs share a tile of channels in the L2 cache


@dataclass(frozen=True)
class MoeConfig:
    """Rows and channels of a tile (with gates so many of both), warps and stages of a program."""

    rows: int
    channels: int
    gated_channels: int
    num_warps: int
    num_stages: int


# By the most rows that an expert has on average. Not measured yet: no GPU was at hand.
CONFIGS = {
    16: MoeConfig(16, 64, 64, num_warps=4, num_stages=4),
    64: MoeConfig(64, 128, 64, num_warps=8, num_stages=4),
    1 << 30: MoeConfig(128, 128, 64, num_warps=8, num_stages=3),
}
SMALL_CONFIGS = {  # for 99 KB
    16: MoeConfig(16, 64, 64, num_warps=4, num_stages=3),
    64: MoeConfig(64, 64, 64, num_warps=8, num_stages=3),
    1 << 30: MoeConfig(128, 64, 64, num_warps=8, num_stages=2),
}
EXACT = MoeConfig(16, 64, 64, num_warps=4, num_stages=2)  # float32, which does not use tensor cores


def config_for(rows: int, experts: int, dtype: torch.dtype, device: torch.device) -> MoeConfig:
    """The tiles for so many ``rows``, each counted once for each of its experts."""
    if dtype == torch.float32:
        return EXACT
    configs = CONFIGS if facts(device).has_large_memory else SMALL_CONFIGS
    return next(config for most, config in configs.items() if rows <= most * experts)


@triton.jit
def add_product(
    sums,
    x,
    x_scale,
    weight_ptr,
    scales_ptr,
    zeros_ptr,
    n,
    block,
    N,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    FORM: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    IN_BLOCKS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``sums [channels, rows]`` plus the product of one block of columns of channels ``n``, all below N, and ``x``."""
    if FORM == "plain" or FORM == "scaled":
        k = block * BLOCK_K + tl.arange(0, BLOCK_K)
        pointers = weight_ptr + n[:, None] * K + k[None, :]
        if K % BLOCK_K:
            w = tl.load(pointers, mask=(k < K)[None, :], other=0.0)
        else:
            w = tl.load(pointers)
    else:
        blocks: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
        words = weight_ptr + (n // 64 * blocks + block) * TILE_WORDS + n % 64 * 16
        codes = tl.load(words[:, None] + tl.arange(0, 16)[None, :]).to(tl.uint32, bitcast=True)
        w = values_of(codes, scales_ptr, zeros_ptr, n, block, N, K, GROUP, FORM, HAS_ZEROS, GROUP < K, n.shape[0])
        w = w.to(x.dtype)
    if IN_BLOCKS:
        left = tl.load(scales_ptr + block * N + n)
        sums += tl.dot(w, x) * left[:, None] * x_scale[None, :]
    elif FORM != "scaled":
        sums = tl.dot(w, x, sums, input_precision=PRECISION)
    elif sums.dtype == tl.int32:
        sums = tl.dot(w, x, sums, out_dtype=tl.int32)
    else:  # of FP8 not too many products are added by the tensor cores themselves, see scaled_weight.py
        sums += tl.dot(w, x)
    return sums


@triton.jit(do_not_specialize=["num_tiles", "x_scales_stride"])
def moe_gemm_kernel(
    x_ptr,
    x_stride,
    x_scales_ptr,
    x_scales_stride,
    ids_ptr,
    slots_ptr,
    tiles_ptr,
    row_weights_ptr,
    weight_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    limit,
    num_tiles,
    E: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    SHARE: tl.constexpr,
    GROUP: tl.constexpr,
    FORM: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    IN_BLOCKS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WEIGHS: tl.constexpr,
    DIRECT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (tiles of rows * tiles of BLOCK_N channels): ``out [choices, N]``, row c of x row ``c // SHARE``.

    The rows of a tile are those of ``slots`` (-1: none), its expert is that of ``tiles`` (-1: there is nothing to do).
    DIRECT: a tile is one choice, whose expert is that of ``ids``. With an ACTIVATION experts have 2 N channels, gates
    and then ups. WEIGHS: 1 before the bias (of x), 2 after it.
    """
    wait_for_previous_kernel()
    GATED: tl.constexpr = ACTIVATION != ""
    INTEGERS: tl.constexpr = FORM == "scaled" and weight_ptr.dtype.element_ty == tl.int8
    # One scale a channel is applied to the sum.
    LATE: tl.constexpr = FORM != "plain" and GROUP >= K and not IN_BLOCKS
    blocks: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    COLUMNS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    band = tl.program_id(0) // (NEIGHBOURS * COLUMNS)
    height = tl.minimum(num_tiles - band * NEIGHBOURS, NEIGHBOURS)
    within = tl.program_id(0) % (NEIGHBOURS * COLUMNS)
    tile = band * NEIGHBOURS + within % height
    column = within // height
    lane = tl.arange(0, ROWS)
    if DIRECT:
        expert = tl.load(ids_ptr + tile)
        if expert >= E:
            expert = -1
        choice = tl.where(lane == 0, tile, -1)
    else:
        expert = tl.load(tiles_ptr + tile)
        choice = tl.load(slots_ptr + tile * ROWS + lane)
    if expert < 0:
        return
    own = column * BLOCK_N + tl.arange(0, BLOCK_N)
    channel = tl.minimum(own, N - 1)
    EACH: tl.constexpr = 2 * N if GATED else N
    CHANNELS: tl.constexpr = E * EACH
    n = expert.to(tl.int64) * EACH + channel
    row = tl.maximum(choice, 0) // SHARE
    k = tl.arange(0, BLOCK_K)
    rows = x_ptr + row.to(tl.int64)[None, :] * x_stride + k[:, None]
    x_scale = tl.full([ROWS], 1.0, tl.float32)
    if FORM == "scaled" and not IN_BLOCKS:
        x_scale = tl.load(x_scales_ptr + row)
    sums_type: tl.constexpr = tl.int32 if INTEGERS else tl.float32
    sums = tl.zeros((BLOCK_N, ROWS), dtype=sums_type)
    ups = tl.zeros((BLOCK_N, ROWS), dtype=sums_type)
    for block in range(blocks):
        if K % BLOCK_K:
            x = tl.load(rows + block * BLOCK_K, mask=(k < K - block * BLOCK_K)[:, None], other=0.0)
        else:
            x = tl.load(rows + block * BLOCK_K)
        if IN_BLOCKS:
            x_scale = tl.load(x_scales_ptr + block * x_scales_stride + row)
        sums = add_product(
            sums,
            x,
            x_scale,
            weight_ptr,
            scales_ptr,
            zeros_ptr,
            n,
            block,
            CHANNELS,
            K,
            GROUP,
            FORM,
            HAS_ZEROS,
            IN_BLOCKS,
            BLOCK_K,
            PRECISION,
        )
        if GATED:
            ups = add_product(
                ups,
                x,
                x_scale,
                weight_ptr,
                scales_ptr,
                zeros_ptr,
                n + N,
                block,
                CHANNELS,
                K,
                GROUP,
                FORM,
                HAS_ZEROS,
                IN_BLOCKS,
                BLOCK_K,
                PRECISION,
            )
    wanted = (own < N)[:, None] & (choice >= 0)[None, :]
    factor = tl.full([ROWS], 1.0, tl.float32)
    if WEIGHS > 0:
        factor = tl.load(row_weights_ptr + choice, mask=choice >= 0, other=0.0)
    sums = finished(sums, x_scale, factor, scales_ptr, bias_ptr, n, LATE, HAS_BIAS, WEIGHS)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if GATED:
        ups = finished(ups, x_scale, factor, scales_ptr, bias_ptr, n + N, LATE, HAS_BIAS, WEIGHS)
        out = gated_product(sums, ups, limit, ACTIVATION, dtype)
    else:
        out = sums.to(dtype)
    place = tl.maximum(choice, 0).to(tl.int64)[None, :] * N + own[:, None]
    tl.store(out_ptr + place, out, mask=wanted)


@triton.jit
def finished(
    sums,
    x_scale,
    factor,
    scales_ptr,
    bias_ptr,
    n,
    SCALED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WEIGHS: tl.constexpr,
):
    """Sums [channels, rows] with what waits for their end: scales, the row's weight, the bias."""
    sums = sums.to(tl.float32)
    if SCALED:
        sums = sums * scales_at(scales_ptr + n)[:, None] * x_scale[None, :]
    if WEIGHS == 1:
        sums = sums * factor[None, :]
    if HAS_BIAS:
        sums += tl.load(bias_ptr + n)[:, None]
    if WEIGHS == 2:
        sums = sums * factor[None, :]
    return sums


@dataclass(frozen=True)
class Routes:
    """The assignment of rows to experts: choice c of T * k is row c // k, has expert ``ids[c]`` and weight
    ``weights[c]``. ``slots`` and ``tiles``: see `moe_gemm_kernel`; without ``slots`` every choice is a tile."""

    ids: Tensor
    weights: Tensor
    slots: Tensor | None
    tiles: Tensor
    num_experts: int


def expert_product(
    x: Tensor,
    weight: Tensor | StackedWeight,
    bias: Tensor | None,
    routes: Routes,
    config: MoeConfig,
    share: int,
    activation: str = "",
    weighs: int = 0,
    limit: float = 0.0,
) -> Tensor:
    """Multiply each choice's row by its expert's weight [N, K]: ``[choices, N]`` in x.dtype, see `moe_gemm_kernel`.

    Choice c reads row ``c // share`` of ``x``. With an ``activation`` half as many channels: gates, then ups.
    """
    k, dtype = x.shape[1], x.dtype
    channels = weight.shape[1] if isinstance(weight, Tensor) else weight.channels
    n = channels // 2 if activation else channels
    held = _arguments(weight, k, dtype)
    x_scales = x
    if held["FORM"] == "scaled":
        assert isinstance(weight, StackedWeight) and isinstance(weight.weight, ScaledWeight)
        x, x_scales = quantize_tokens(x, weight.weight.values.dtype, weight.weight.blocks)
    num_tiles = routes.tiles.numel()
    out = torch.empty(routes.ids.numel(), n, dtype=dtype, device=x.device)
    block_n = config.gated_channels if activation else config.channels
    moe_gemm_kernel[(num_tiles * triton.cdiv(n, block_n),)](
        x,
        x.stride(0),
        x_scales,
        x_scales.stride(1),
        routes.ids,
        routes.ids if routes.slots is None else routes.slots,
        routes.tiles,
        routes.weights,
        *held.pop("pointers"),
        x if bias is None else bias,
        out,
        float(limit),
        num_tiles,
        E=routes.num_experts,
        N=n,
        K=k,
        SHARE=share,
        ACTIVATION=activation,
        HAS_BIAS=bias is not None,
        WEIGHS=weighs,
        DIRECT=routes.slots is None,
        ROWS=config.rows,
        BLOCK_N=block_n,
        PRECISION="ieee" if dtype == torch.float32 else "tf32",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **held,
        **pdl_options(x.device),
    )
    return out


def _arguments(weight: Tensor | StackedWeight, k: int, dtype: torch.dtype) -> dict[str, Any]:
    """The kernel's pointers to a weight, and constants for its form."""
    if isinstance(weight, Tensor):
        form = {"FORM": "plain", "GROUP": k, "HAS_ZEROS": False, "IN_BLOCKS": False}
        return form | {"BLOCK_K": 32 if dtype == torch.float32 else 64, "pointers": (weight, weight, weight)}
    held = weight.weight
    if isinstance(held, ScaledWeight):
        form = {"FORM": "scaled", "GROUP": k, "HAS_ZEROS": False, "IN_BLOCKS": held.blocks > 1}
        return form | {"BLOCK_K": BLOCK, "pointers": (held.values, held.scales, held.scales)}
    zeros = held.codes if held.zeros is None else held.zeros
    form = {"FORM": held.form, "GROUP": held.group, "HAS_ZEROS": held.zeros is not None, "IN_BLOCKS": False}
    return form | {"BLOCK_K": held.block, "pointers": (held.codes, held.scales, zeros)}
