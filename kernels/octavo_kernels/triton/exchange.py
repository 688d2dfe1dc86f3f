"""Exchanges between GPUs that have mapped each other's memory: sums in the order of ranks, gathering, the best of all.

Each rank has a region of one layout: flags, counters, data. A program writes what it has to give into its own region,
meets the program of the same number on every other rank, and reads theirs. Programs meet by numbers that only grow
(those of `_meet`), so that captured launches can be replayed; nothing is reset. What a program reads, the programs of
its number have written, so no other ones are waited for. At the end they meet once more: a region is written again only
when all have read it.

The order of sums, and float32 until the end, are those of the definition (`octavo.layers.parallel.sum_in_order`): the
bits do not depend on how much is added up at once, nor on which of two ways it takes. Small tensors are read whole from
everyone (one shot); of larger ones each rank adds up a part, and reads the sums of the others' parts (two shots), as in
vLLM's and NVIDIA's custom all-reduce.

A launch must have all its programs running at the same time on all ranks: there are few of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.triton.dependent_launch import pdl_options, wait_for_previous_kernel

MOST_RANKS = 64
PROGRAMS = 32  # at most, of a launch
ONE_SHOT_BYTES = 512 << 10  # of a tensor that is read whole from every rank
REGION_BYTES = 8 << 20  # of data, at once
DATA_AT = 16 << 10  # in a region, behind flags and counters
WARPS = 4
TILE_BYTES = WARPS * 32 * 16  # 16 a thread

_COUNTS = tl.constexpr(4 * PROGRAMS * MOST_RANKS)  # behind the flags, int32 [PROGRAMS, MOST_RANKS]
_DATA = tl.constexpr(DATA_AT)
_MOST_RANKS = tl.constexpr(MOST_RANKS)
_POLLS = tl.constexpr(4096)  # between two looks at memory of the host


def region_bytes() -> int:
    """The bytes of a rank's memory that all map. Flags and counters, its first `DATA_AT` bytes, must be 0 before any
    launch."""
    return DATA_AT + REGION_BYTES


@dataclass(frozen=True)
class Exchange:
    """The regions as rank ``rank`` of ``ranks`` sees them.

    ``addresses`` int64 [ranks + 1], on the device: of each rank's region, and of int32 [1 + ranks] in memory of the
    host that the device can reach. Once the first of these numbers is not 0 no program waits any more, and for each
    rank that it would have waited for it sets the number of that rank to 1.
    """

    addresses: Tensor
    rank: int
    ranks: int

    @property
    def constants(self) -> dict[str, int]:
        """Constants for launches: the number of ranks, and the next power of 2."""
        return {"RANKS": self.ranks, "PEERS": triton.next_power_of_2(self.ranks), "num_warps": WARPS}


@triton.jit
def _region(addresses, rank, like):
    """The data of a rank's region, by a pointer of ``like``'s type."""
    return tl.multiple_of((tl.load(addresses + rank) + _DATA).to(like.dtype), 16)


@triton.jit
def _counter(addresses, rank):
    """The pointer to this program's count of meetings with others."""
    return (tl.load(addresses + rank) + _COUNTS).to(tl.pointer_type(tl.int32)) + tl.program_id(0)


@triton.jit
def _meet(addresses, rank, number, RANKS: tl.constexpr, PEERS: tl.constexpr):
    """Wait until the programs of this number are here on all ranks, for the ``number``-th time. Everything written
    before is then visible to all."""
    peers = tl.arange(0, PEERS)
    inside = peers < RANKS
    program = tl.program_id(0) * _MOST_RANKS
    theirs = tl.load(addresses + peers, mask=inside, other=0).to(tl.pointer_type(tl.int32)) + program + rank
    mine = tl.load(addresses + rank).to(tl.pointer_type(tl.int32)) + program + peers
    host = tl.load(addresses + RANKS).to(tl.pointer_type(tl.int32))
    none = tl.zeros((PEERS,), tl.int32)
    tl.debug_barrier()  # all threads have written
    tl.atomic_xchg(theirs, none + number, mask=inside, sem="release", scope="sys")
    # A difference, since numbers wrap around.
    late = inside & (tl.atomic_add(mine, none, mask=inside, sem="acquire", scope="sys") - number < 0)
    polls = 0
    stopped = 0
    while (tl.max(late.to(tl.int32)) != 0) & (stopped == 0):
        polls += 1
        if polls % _POLLS == 0:
            stopped = tl.load(host, volatile=True)
        late = inside & (tl.atomic_add(mine, none, mask=inside, sem="acquire", scope="sys") - number < 0)
    if stopped != 0:
        tl.store(host + 1 + peers, none + 1, mask=late)
    tl.debug_barrier()  # no thread reads before


@triton.jit
def _sum(addresses, like, at, inside, RANKS: tl.constexpr):
    total = tl.load(_region(addresses, 0, like) + at, mask=inside, other=0.0).to(tl.float32)
    for other in tl.static_range(1, RANKS):
        total += tl.load(_region(addresses, other, like) + at, mask=inside, other=0.0).to(tl.float32)
    return total.to(like.dtype.element_ty)


@triton.jit
def one_shot_kernel(x_ptr, addresses, numel, rank, RANKS: tl.constexpr, PEERS: tl.constexpr, TILE: tl.constexpr):
    """Replace ``x [numel]`` by the sum of every rank's."""
    wait_for_previous_kernel()
    program, step = tl.program_id(0), tl.num_programs(0) * TILE
    counter = _counter(addresses, rank)
    number = tl.load(counter)
    own = _region(addresses, rank, x_ptr)
    for first in range(program * TILE, numel, step):
        at = first + tl.arange(0, TILE)
        tl.store(own + at, tl.load(x_ptr + at, mask=at < numel), mask=at < numel)
    _meet(addresses, rank, number + 1, RANKS, PEERS)
    for first in range(program * TILE, numel, step):
        at = first + tl.arange(0, TILE)
        tl.store(x_ptr + at, _sum(addresses, x_ptr, at, at < numel, RANKS), mask=at < numel)
    _meet(addresses, rank, number + 2, RANKS, PEERS)
    tl.store(counter, number + 2)


@triton.jit
def two_shot_kernel(x_ptr, addresses, numel, rank, RANKS: tl.constexpr, PEERS: tl.constexpr, TILE: tl.constexpr):
    """Sum as `one_shot_kernel` does, but each rank adds up one of every RANKS tiles."""
    wait_for_previous_kernel()
    program, step = tl.program_id(0), tl.num_programs(0) * RANKS * TILE
    counter = _counter(addresses, rank)
    number = tl.load(counter)
    own = _region(addresses, rank, x_ptr)
    for first in range(program * RANKS * TILE, numel, step):
        for other in tl.static_range(RANKS):
            at = first + other * TILE + tl.arange(0, TILE)
            tl.store(own + at, tl.load(x_ptr + at, mask=at < numel), mask=at < numel)
    _meet(addresses, rank, number + 1, RANKS, PEERS)
    for first in range(program * RANKS * TILE, numel, step):
        at = first + rank * TILE + tl.arange(0, TILE)
        tl.store(own + at, _sum(addresses, x_ptr, at, at < numel, RANKS), mask=at < numel)
    _meet(addresses, rank, number + 2, RANKS, PEERS)
    for first in range(program * RANKS * TILE, numel, step):
        for other in tl.static_range(RANKS):
            at = first + other * TILE + tl.arange(0, TILE)
            total = tl.load(_region(addresses, other, x_ptr) + at, mask=at < numel)
            tl.store(x_ptr + at, total, mask=at < numel)
    _meet(addresses, rank, number + 3, RANKS, PEERS)
    tl.store(counter, number + 3)


@triton.jit(do_not_specialize=["rows"])
def gather_kernel(
    x_ptr,
    x_stride,
    out_ptr,
    addresses,
    rows,
    rank,
    WIDTH: tl.constexpr,
    TOTAL: tl.constexpr,
    RANKS: tl.constexpr,
    PEERS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Every rank's WIDTH columns side by side, of which TOTAL are wanted: ``out [rows, TOTAL]``."""
    wait_for_previous_kernel()
    TILES: tl.constexpr = (WIDTH + TILE - 1) // TILE
    counter = _counter(addresses, rank)
    number = tl.load(counter)
    own = _region(addresses, rank, x_ptr)
    for tile in range(tl.program_id(0), rows * TILES, tl.num_programs(0)):
        row, column = tile // TILES, tile % TILES * TILE + tl.arange(0, TILE)
        inside = (column < WIDTH) & (rank * WIDTH + column < TOTAL)
        x = tl.load(x_ptr + tl.cast(row, tl.int64) * x_stride + column, mask=inside)
        tl.store(own + row * WIDTH + column, x, mask=inside)
    _meet(addresses, rank, number + 1, RANKS, PEERS)
    for tile in range(tl.program_id(0), rows * TILES, tl.num_programs(0)):
        row, column = tile // TILES, tile % TILES * TILE + tl.arange(0, TILE)
        for other in tl.static_range(RANKS):
            inside = (column < WIDTH) & (other * WIDTH + column < TOTAL)
            x = tl.load(_region(addresses, other, x_ptr) + row * WIDTH + column, mask=inside)
            tl.store(out_ptr + tl.cast(row, tl.int64) * TOTAL + other * WIDTH + column, x, mask=inside)
    _meet(addresses, rank, number + 2, RANKS, PEERS)
    tl.store(counter, number + 2)


@triton.jit(do_not_specialize=["rows"])
def best_kernel(
    index_ptr,
    value_ptr,
    best_index_ptr,
    best_value_ptr,
    addresses,
    rows,
    rank,
    RANKS: tl.constexpr,
    PEERS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Find each row's largest value, and its index, among all ranks' (index, value) with an index >= 0: a NaN if there
    is one, else the first of equals. One program; TILE rows at most."""
    wait_for_previous_kernel()
    counter = _counter(addresses, rank)
    number = tl.load(counter)
    row = tl.arange(0, TILE)
    inside = row < rows
    tl.store(_region(addresses, rank, index_ptr) + row, tl.load(index_ptr + row, mask=inside), mask=inside)
    values = tl.load(value_ptr + row, mask=inside)
    tl.store(_region(addresses, rank, value_ptr) + TILE + row, values, mask=inside)
    _meet(addresses, rank, number + 1, RANKS, PEERS)
    best_index = tl.load(_region(addresses, 0, index_ptr) + row, mask=inside, other=-1)
    best_value = tl.load(_region(addresses, 0, value_ptr) + TILE + row, mask=inside, other=0.0)
    for other in tl.static_range(1, RANKS):
        index = tl.load(_region(addresses, other, index_ptr) + row, mask=inside, other=-1)
        value = tl.load(_region(addresses, other, value_ptr) + TILE + row, mask=inside, other=0.0)
        better = (index >= 0) & (best_value == best_value) & ((value > best_value) | (value != value))
        best_index = tl.where(better, index, best_index)
        best_value = tl.where(better, value, best_value)
    tl.store(best_index_ptr + row, best_index, mask=inside)
    tl.store(best_value_ptr + row, best_value, mask=inside)
    _meet(addresses, rank, number + 2, RANKS, PEERS)
    tl.store(counter, number + 2)


def all_reduce_(x: Tensor, exchange: Exchange) -> None:
    """Replace ``x``, contiguous, by the sum of every rank's: in the order of ranks and in float32, rounded once."""
    flat, tile = x.view(-1), TILE_BYTES // x.element_size()
    for part in flat.split(REGION_BYTES // x.element_size()):
        numel = part.numel()
        two = numel * x.element_size() > ONE_SHOT_BYTES
        kernel, group = (two_shot_kernel, exchange.ranks * tile) if two else (one_shot_kernel, tile)
        programs = min(PROGRAMS, triton.cdiv(numel, group))
        kernel[(programs,)](
            part, exchange.addresses, numel, exchange.rank, TILE=tile, **exchange.constants, **pdl_options(x.device)
        )


def all_gather(x: Tensor, total: int, exchange: Exchange) -> Tensor:
    """Every rank's ``x [T, >= own]`` side by side: ``[T, total]``. Ranks have ceil(total / ranks) columns each, the
    last ones fewer."""
    if x.stride(1) != 1:
        x = x.contiguous()
    width, tile = triton.cdiv(total, exchange.ranks), TILE_BYTES // x.element_size()
    out = torch.empty(len(x), total, dtype=x.dtype, device=x.device)
    most = REGION_BYTES // (width * x.element_size())  # rows at once
    for part, whole in zip(x.split(most), out.split(most), strict=True):
        rows = len(part)
        gather_kernel[(min(PROGRAMS, rows * triton.cdiv(width, tile)),)](
            part,
            x.stride(0),
            whole,
            exchange.addresses,
            rows,
            exchange.rank,
            WIDTH=width,
            TOTAL=total,
            TILE=tile,
            **exchange.constants,
            **pdl_options(x.device),
        )
    return out


def best_of_ranks(index: Tensor, value: Tensor, exchange: Exchange) -> tuple[Tensor, Tensor]:
    """Find the ``index`` int64 [R] of each row's largest ``value`` float64 [R] among all ranks', and that value; ranks
    with index -1 have none. NaN counts as larger than all; of equals the first rank's is taken."""
    found, best = torch.empty_like(index), torch.empty_like(value)
    most = 1024
    parts = (tensor.split(most) for tensor in (index, value, found, best))
    for own, values, indices, bests in zip(*parts, strict=True):
        best_kernel[(1,)](
            own,
            values,
            indices,
            bests,
            exchange.addresses,
            len(own),
            exchange.rank,
            TILE=most,
            **exchange.constants,
            **pdl_options(index.device),
        )
    return found, best
