"""Low-rank adapters: a program has a tile of rows of one slot.

Rows are sorted by slot, once a step; up to TILE rows are not, then each is a tile alone. Either way the tile has the
same shape, K is cut by its length and the width alone, and its parts are added in order: a row's bits depend neither on
the rows beside it nor on how many there are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels import reference
from octavo_kernels.lora import AdapterTable, RowTiles, SlotTable
from octavo_kernels.triton.dependent_launch import pdl_options, wait_for_previous_kernel
from octavo_kernels.triton.moe import moe_sort

TILE = 16  # rows: the fewest that tensor cores take
BLOCK_N = 128  # outputs of a program that expands
SPLIT_COLUMNS = 512  # of K that a program sums up at least, where several share it
MOST_SPLITS = 8
SPLIT_NUMBERS = 512  # that all parts of a row are at most: wider rows have programs enough


def num_splits(columns: int, width: int) -> int:
    """The parts of K where ``columns`` become ``width`` numbers."""
    return max(1, min(MOST_SPLITS, columns // SPLIT_COLUMNS, SPLIT_NUMBERS // width))


@triton.jit
def tile_rows(slots_ptr, rows_ptr, tile, ALONE: tl.constexpr, ROWS: tl.constexpr):
    """The slot of a tile, below 0: there is nothing to do; and its rows, -1: none. ALONE: a tile is one row."""
    lane = tl.arange(0, ROWS)
    slot = tl.load(slots_ptr + tile).to(tl.int64)
    rows = tl.where(lane == 0, tile, -1) if ALONE else tl.load(rows_ptr + tile * ROWS + lane)
    return slot, rows.to(tl.int64)


@triton.jit(do_not_specialize=["num_rows"])
def lora_shrink_kernel(
    x_ptr,
    x_stride,
    slots_ptr,
    rows_ptr,
    ranks_ptr,
    ranks_stride,
    a_ptr,
    a_stride,
    h_ptr,
    num_rows,
    K,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    ALONE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (tiles, blocks of BLOCK_J numbers, parts of K): ``h [SPLITS, num_rows, WIDTH]``."""
    wait_for_previous_kernel()
    slot, row = tile_rows(slots_ptr, rows_ptr, tl.program_id(0), ALONE, ROWS)
    if slot < 0:
        return
    rank = tl.load(ranks_ptr + slot * ranks_stride)
    if rank == 0:
        return
    split = tl.program_id(2)
    j = tl.program_id(1) * BLOCK_J + tl.arange(0, BLOCK_J)
    k = tl.arange(0, BLOCK_K)
    real = (row >= 0)[None, :]
    held = ((j < WIDTH) & (j % RANK < rank))[:, None]
    weights = a_ptr + slot * a_stride + j.to(tl.int64)[:, None] * K + k[None, :]
    rows = x_ptr + tl.maximum(row, 0)[None, :] * x_stride + k[:, None]
    blocks = tl.cdiv(K, BLOCK_K)
    each = tl.cdiv(blocks, SPLITS)
    sums = tl.zeros((BLOCK_J, ROWS), dtype=tl.float32)
    for block in range(split * each, tl.minimum((split + 1) * each, blocks)):
        left = K - block * BLOCK_K
        a = tl.load(weights + block * BLOCK_K, mask=held & (k < left)[None, :], other=0.0)
        x = tl.load(rows + block * BLOCK_K, mask=real & (k < left)[:, None], other=0.0)
        sums = tl.dot(a, x.to(a.dtype), sums, input_precision=PRECISION)
    place = (split * num_rows + tl.maximum(row, 0)) * WIDTH
    tl.store(h_ptr + place[None, :] + j[:, None], sums, mask=held & real)


@triton.jit(do_not_specialize=["first", "count"])
def lora_gather_kernel(
    ids_ptr,
    slots_ptr,
    ranks_ptr,
    ranks_stride,
    a_ptr,
    a_stride,
    h_ptr,
    first,
    count,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
):
    """Grid (rows): ``h [rows, RANK]``."""
    wait_for_previous_kernel()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        return
    held = tl.arange(0, RANK_PAD) < tl.load(ranks_ptr + slot * ranks_stride)
    id = tl.load(ids_ptr + row) - first
    r = tl.arange(0, RANK_PAD)
    a = tl.load(a_ptr + slot * a_stride + id * RANK + r, mask=held & (id >= 0) & (id < count), other=0.0)
    tl.store(h_ptr + row * RANK + r, a.to(tl.float32), mask=held)


@triton.jit(do_not_specialize=["num_rows"])
def lora_expand_kernel(
    y_ptr,
    y_stride,
    slots_ptr,
    rows_ptr,
    ranks_ptr,
    ranks_stride,
    b_ptr,
    b_stride,
    offsets_ptr,
    h_ptr,
    num_rows,
    N,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    ALONE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (tiles, blocks of BLOCK_N outputs of the widest part, parts): ``y [num_rows, N]`` grows. ALIGNED: parts
    begin at multiples of 16."""
    wait_for_previous_kernel()
    slot, row = tile_rows(slots_ptr, rows_ptr, tl.program_id(0), ALONE, ROWS)
    if slot < 0:
        return
    rank = tl.load(ranks_ptr + slot * ranks_stride)
    part = tl.program_id(2)
    end = tl.load(offsets_ptr + part + 1)
    begin = tl.load(offsets_ptr + part) + tl.program_id(1) * BLOCK_N
    if (rank == 0) | (begin >= end):
        return
    if ALIGNED:
        begin, end = tl.multiple_of(begin, 16), tl.multiple_of(end, 16)
    n = begin + tl.arange(0, BLOCK_N)
    inside = (n < end)[None, :]
    real = (row >= 0)[:, None]
    row = tl.maximum(row, 0)
    sums = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
    for first in range(0, rank, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        held = r < rank
        h = tl.zeros((ROWS, BLOCK_R), dtype=tl.float32)
        for split in tl.static_range(SPLITS):
            place = (split * num_rows + row) * WIDTH + part * RANK
            h += tl.load(h_ptr + place[:, None] + r[None, :], mask=real & held[None, :], other=0.0)
        weights = b_ptr + slot * b_stride + r.to(tl.int64)[:, None] * N + n[None, :]
        b = tl.load(weights, mask=held[:, None] & inside, other=0.0)
        sums = tl.dot(h, b.to(tl.float32), sums, input_precision=PRECISION)
    results = y_ptr + row[:, None] * y_stride + n[None, :]
    y = tl.load(results, mask=real & inside, other=0.0).to(tl.float32) + sums
    tl.store(results, y.to(y_ptr.dtype.element_ty), mask=real & inside)


def lora_tiles(slots: Tensor, num_slots: int) -> RowTiles | None:
    """See `octavo_kernels.lora_tiles`. Reads no tensor on the host, so it can be captured in a graph."""
    if len(slots) <= TILE:
        return None
    return RowTiles(*moe_sort(slots, max(2, num_slots), TILE))


def lora_shrink(x: Tensor, table: AdapterTable, slots: Tensor, tiles: RowTiles | None = None) -> Tensor:
    """See `octavo_kernels.lora_shrink`: in parts ``[S, T, table.width]``, which are to be added."""
    if not isinstance(table, SlotTable):
        return reference.lora_shrink(x, table, slots)
    x = x if x.stride(1) == 1 else x.contiguous()
    a, width = table.placed_a, table.width
    splits, block_j = num_splits(x.shape[1], width), min(64, max(16, triton.next_power_of_2(width)))
    h = torch.empty(splits, len(x), width, dtype=torch.float32, device=x.device)
    tile_slots, rows = _tiles(slots, tiles)
    if len(tile_slots):
        is_exact = a.dtype == torch.float32
        lora_shrink_kernel[(len(tile_slots), triton.cdiv(width, block_j), splits)](
            x,
            x.stride(0),
            tile_slots,
            rows,
            table.placed_ranks,
            table.placed_ranks.stride(0),
            a,
            a.stride(0),
            h,
            len(x),
            x.shape[1],
            WIDTH=width,
            RANK=table.max_rank,
            SPLITS=splits,
            ALONE=tiles is None,
            ROWS=TILE,
            BLOCK_J=block_j,
            BLOCK_K=32 if is_exact else 128,
            PRECISION="ieee" if is_exact else "tf32",
            num_warps=4,
            num_stages=2 if is_exact else 3,
            **pdl_options(x.device),
        )
    return h


def lora_gather(ids: Tensor, table: AdapterTable, slots: Tensor, first: int, count: int) -> Tensor:
    """See `octavo_kernels.lora_gather`: one part, as `lora_shrink` has it."""
    if not isinstance(table, SlotTable):
        return reference.lora_gather(ids, table, slots, first, count)
    h = torch.empty(1, len(ids), table.width, dtype=torch.float32, device=ids.device)
    if len(ids):
        lora_gather_kernel[(len(ids),)](
            ids,
            slots,
            table.placed_ranks,
            table.placed_ranks.stride(0),
            table.placed_a,
            table.placed_a.stride(0),
            h,
            first,
            count,
            RANK=table.max_rank,
            RANK_PAD=triton.next_power_of_2(table.max_rank),
            num_warps=1,
            **pdl_options(ids.device),
        )
    return h


def lora_expand_(y: Tensor, h: Tensor, table: AdapterTable, slots: Tensor, tiles: RowTiles | None = None) -> None:
    """See `octavo_kernels.lora_expand_`."""
    if not isinstance(table, SlotTable):
        return reference.lora_expand_(y, h, table, slots)
    assert y.stride(1) == 1, "a layer's product has rows that lie apart"
    b = table.placed_b
    tile_slots, rows = _tiles(slots, tiles)
    if len(tile_slots):
        lora_expand_kernel[(len(tile_slots), triton.cdiv(table.widest, BLOCK_N), table.parts)](
            y,
            y.stride(0),
            tile_slots,
            rows,
            table.placed_ranks,
            table.placed_ranks.stride(0),
            b,
            b.stride(0),
            table.placed_offsets,
            h,
            len(y),
            b.shape[2],
            WIDTH=table.width,
            RANK=table.max_rank,
            SPLITS=len(h),
            ALONE=tiles is None,
            ALIGNED=table.is_aligned,
            ROWS=TILE,
            BLOCK_R=min(64, max(16, triton.next_power_of_2(table.max_rank))),
            BLOCK_N=BLOCK_N,
            # B is exact in TF32 where it has 16 bits; h is made so by three products.
            PRECISION="ieee" if b.dtype == torch.float32 else "tf32x3",
            num_warps=4,
            num_stages=2,
            **pdl_options(y.device),
        )
    return None


def _tiles(slots: Tensor, tiles: RowTiles | None) -> tuple[Tensor, Tensor]:
    """Return the slot of each tile and the rows of all tiles."""
    return (slots, slots) if tiles is None else (tiles.slots, tiles.rows)
