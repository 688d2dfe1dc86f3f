"""Mixtures of experts: rows are sorted by expert, multiplied tile by tile, and added up in the order of their choices.

Grids are upper bounds that depend on shapes alone, so a captured graph serves any routing. Steps of at most
MAX_DIRECT rows are not sorted: a tile of the products is then one choice of one row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels import reference
from octavo_kernels.moe import Experts, ExpertTable
from octavo_kernels.triton import moe_gemm
from octavo_kernels.triton.dependent_launch import pdl_options, wait_for_previous_kernel
from octavo_kernels.triton.moe_gemm import MoeConfig, Routes, config_for, expert_product

MAX_DIRECT = 4  # rows
MAX_ROWS = 4096  # at a time: bounds the memory for what experts give
LANES = 1024  # choices that a program of the sort looks at at once
BLOCK = 1024  # columns of a program that adds up


@triton.jit(do_not_specialize=["num_choices", "num_tiles"])
def moe_sort_kernel(
    ids_ptr,
    slots_ptr,
    tiles_ptr,
    num_choices,
    num_tiles,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Grid (experts): the choices whose id this expert is, in ``slots [tiles, ROWS]``, padded with -1 to whole tiles,
    and the expert of each tile in ``tiles``, -1 after the last. Ids that are no expert's are left out.

    Every program counts for itself where its expert's tiles begin: nothing is shared between programs.
    """
    wait_for_previous_kernel()
    expert = tl.program_id(0)
    lane = tl.arange(0, LANES)
    bins = tl.arange(0, E_PAD)
    counts = tl.zeros([E_PAD], tl.int32)
    for at in range(0, num_choices, LANES):
        ids = tl.load(ids_ptr + at + lane, mask=at + lane < num_choices, other=-1)
        known = (ids >= 0) & (ids < E)
        counts += tl.histogram(tl.where(known, ids, 0), E_PAD, mask=known)
    tiles = (counts + ROWS - 1) // ROWS
    first = tl.sum(tl.where(bins < expert, tiles, 0))
    mine = tl.sum(tl.where(bins == expert, tiles, 0))
    slots = slots_ptr + first * ROWS
    seen = 0
    for at in range(0, num_choices, LANES):
        ids = tl.load(ids_ptr + at + lane, mask=at + lane < num_choices, other=-1)
        match = (ids == expert).to(tl.int32)
        tl.store(slots + seen + tl.cumsum(match, 0) - 1, at + lane, mask=match > 0)
        seen += tl.sum(match)
    rest = seen + tl.arange(0, ROWS)
    tl.store(slots + rest, -1, mask=rest < mine * ROWS)
    for at in range(0, mine, LANES):
        tl.store(tiles_ptr + first + at + lane, expert, mask=at + lane < mine)
    for at in range(tl.sum(tiles) + expert * LANES, num_tiles, E * LANES):
        tl.store(tiles_ptr + at + lane, -1, mask=at + lane < num_tiles)


def moe_sort(ids: Tensor, experts: int, rows: int) -> tuple[Tensor, Tensor]:
    """Choices int32 ``ids [T, k]`` in tiles of ``rows`` of one expert each: see `moe_sort_kernel`.

    There are as many tiles as any routing can need.
    """
    choices = ids.numel()
    tiles = min(choices, (choices + min(experts, choices) * (rows - 1)) // rows)
    slots = torch.empty(tiles * rows, dtype=torch.int32, device=ids.device)
    owners = torch.empty(tiles, dtype=torch.int32, device=ids.device)
    moe_sort_kernel[(experts,)](
        ids,
        slots,
        owners,
        choices,
        tiles,
        E=experts,
        E_PAD=triton.next_power_of_2(experts),
        ROWS=rows,
        LANES=LANES,
        num_warps=4,
        **pdl_options(ids.device),
    )
    return slots, owners


@triton.jit
def moe_sum_kernel(
    parts_ptr,
    ids_ptr,
    shared_ptr,
    shared_stride,
    gate_ptr,
    out_ptr,
    E: tl.constexpr,
    TOPK: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_GATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows, blocks of BLOCK columns): the sum of a row's ``parts [rows * TOPK, WIDTH]`` in their order."""
    wait_for_previous_kernel()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(TOPK):
        id = tl.load(ids_ptr + row * TOPK + i)
        known = inside & (id >= 0) & (id < E)  # of others there are no parts
        total += tl.load(parts_ptr + (row * TOPK + i) * WIDTH + columns, mask=known, other=0.0).to(tl.float32)
    if HAS_SHARED:
        shared = tl.load(shared_ptr + row * shared_stride + columns, mask=inside, other=0.0).to(tl.float32)
        if HAS_GATE:
            shared = shared / (1.0 + tl.exp(-tl.load(gate_ptr + row).to(tl.float32)))
        total += shared
    tl.store(out_ptr + row * WIDTH + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


def moe_sum(
    parts: Tensor, ids: Tensor, experts: int, shared: Tensor | None, shared_gate: Tensor | None, out: Tensor
) -> None:
    """The sum of ``parts [T * k, H]`` of each row, and of what is shared, to ``out [T, H]``."""
    (rows, k), width = ids.shape, parts.shape[1]
    if shared is not None and shared.stride(1) != 1:
        shared = shared.contiguous()
    moe_sum_kernel[(rows, triton.cdiv(width, BLOCK))](
        parts,
        ids,
        parts if shared is None else shared,
        0 if shared is None else shared.stride(0),
        parts if shared_gate is None else shared_gate.contiguous(),
        out,
        E=experts,
        TOPK=k,
        WIDTH=width,
        HAS_SHARED=shared is not None,
        HAS_GATE=shared_gate is not None,
        BLOCK=BLOCK,
        num_warps=4,
        **pdl_options(parts.device),
    )


def fused_moe(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: Experts,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """See `octavo_kernels.fused_moe`. Reads no tensor on the host, so it can be captured in a graph."""
    if isinstance(experts.gate_up, ExpertTable) or isinstance(experts.down, ExpertTable):
        return reference.fused_moe(x, ids, weights, experts, shared, shared_gate, out_dtype)  # the CPU's form
    x = x if x.stride(1) == 1 else x.contiguous()
    ids, weights = ids.contiguous(), weights.contiguous()
    out = torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device)
    for start in range(0, len(x), MAX_ROWS):
        part = slice(start, start + MAX_ROWS)
        beside = None if shared is None else shared[part]
        gate = None if shared_gate is None else shared_gate[part]
        _fused_moe(x[part], ids[part], weights[part], experts, beside, gate, out[part])
    return out


def _fused_moe(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: Experts,
    shared: Tensor | None,
    shared_gate: Tensor | None,
    out: Tensor,
) -> None:
    assert not isinstance(experts.gate_up, ExpertTable) and not isinstance(experts.down, ExpertTable)
    config = _config(len(x), ids.shape[1], experts, x)
    slots, tiles = (None, ids) if config is None else moe_sort(ids, experts.num_experts, config.rows)
    routes = Routes(ids, weights, slots, tiles, experts.num_experts)
    shape = config or config_for(1, 1, x.dtype, x.device)
    first, then = (1, 0) if experts.weighs_input else (0, 2)
    inner = expert_product(
        x, experts.gate_up, experts.gate_up_bias, routes, shape, ids.shape[1], experts.activation, first, experts.limit
    )
    parts = expert_product(inner, experts.down, experts.down_bias, routes, shape, 1, "", then)
    moe_sum(parts, ids, experts.num_experts, shared, shared_gate, out)


def _config(rows: int, k: int, experts: Experts, x: Tensor) -> MoeConfig | None:
    """The tiles for so many rows like ``x``'s; None: they are not sorted."""
    return None if rows <= MAX_DIRECT else config_for(rows * k, experts.num_experts, x.dtype, x.device)


def moe_row_counts(experts: Experts, k: int) -> list[int]:
    """See `octavo_kernels.moe_row_counts`."""
    # The first with each kind of tile.
    sorted_rows = {MAX_DIRECT + 1, *(most * experts.num_experts // k + 1 for most in moe_gemm.CONFIGS)}
    return [1, *sorted(rows for rows in sorted_rows if MAX_DIRECT < rows <= MAX_ROWS)]
