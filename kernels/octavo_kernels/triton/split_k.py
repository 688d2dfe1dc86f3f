"""Sums over K by several programs: each leaves its part, and the last one of a tile adds them in order.

So the result does not depend on which program is last. Also the tiles of linear layers that are split so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_TILES = 1 << 14
MAX_SPLITS = 8


@dataclass(frozen=True)
class TileConfig:
    """Activations and channels of a tile, warps and stages of a program, and programs of a multiprocessor at a time."""

    rows: int
    channels: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


def tile_config(configs: Mapping[int, TileConfig], rows: int, channels: int) -> TileConfig:
    """The launch for so many rows, of ``configs`` by the most rows that they are for, in rising order."""
    # The addresses of results that cannot be stored 16 bytes at a time take too many registers beside 128 rows.
    return next(config for most, config in configs.items() if rows <= most or (most == 64 and channels % 16))


def splits_of(tiles: int, blocks: int, programs: int) -> int:
    """The parts of K, ``blocks`` long, for so many tiles where so many programs run at a time.

    The fewest whose time is within 5 % of the least: programs run in waves, a start costs as much as 2 blocks, the sum
    of a part 1.
    """
    if tiles > MAX_TILES:
        return 1
    # Numbers of parts none of which is empty.
    choices = {triton.cdiv(blocks, triton.cdiv(blocks, s)) for s in range(1, max(1, min(MAX_SPLITS, blocks // 2)) + 1)}

    def time(splits: int) -> int:
        waves: int = triton.cdiv(tiles * splits, programs)
        each: int = triton.cdiv(blocks, splits)
        return waves * (each + 2 + (splits > 1))

    least = min(map(time, choices))
    best: int = min(s for s in choices if 20 * time(s) <= 21 * least)
    return best


@triton.jit
def is_last_part(sums, parts_ptr, place, wanted, size, part, arrived, SPLITS: tl.constexpr):
    """Store part number ``part`` of a tile, ``size`` elements after the part before, and count it at ``arrived``.

    True for one program of the tile, after all of its parts are stored; the count is 0 again then.
    """
    tl.store(parts_ptr + part * size + place, sums, mask=wanted)
    tl.debug_barrier()  # all threads must have stored their part before one of them counts it
    last = tl.atomic_add(arrived, 1, sem="acq_rel") == SPLITS - 1
    if last:
        tl.store(arrived, 0)  # as the next call expects it
    return last


@triton.jit
def sum_of_parts(sums, parts_ptr, place, wanted, size, SPLITS: tl.constexpr):
    """The sum of all parts of a tile; of ``sums`` only the shape counts."""
    total = tl.zeros_like(sums)
    for part in range(SPLITS):
        total += tl.load(parts_ptr + part * size + place, mask=wanted, other=0.0, cache_modifier=".cg")
    return total


def empty_parts(splits: int, size: int, device: torch.device) -> Tensor:
    """Room for the parts of ``size`` elements, float32."""
    return torch.empty(splits * size, dtype=torch.float32, device=device)


@cache
def counters(device: torch.device) -> Tensor:
    """Counters of finished parts, one a tile; every call leaves them 0. The first call allocates them, so it must not
    be captured in a graph. Calls that may run at the same time must not share a device."""
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)
