"""Launch shapes of the attention kernels, with their reasons.

Chosen for Hopper (132 SMs; 227 KB of shared memory and 64 K registers each) by what the kernels compile to, see
benchmarks/kernels_ahead.py: none uses stack. The loads are indirect (page number, then page), and Triton's pipeliner
shares out the stages between the two. Tiles of fewer than 64 rows (mma) get 2 buffers of 5 stages and 3 of 7; with 3 or
4 stages a single one, whose load starts only when the last tile is done: nothing would be in flight. Tiles of 64 rows
and more (wgmma, which reads its operands from shared memory while it runs) get a buffer more: 2 of 3 or 4, 3 of 5.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from octavo_kernels.triton import devices
from octavo_kernels.triton.devices import HOPPER, Facts

FLOAT8 = torch.float8_e4m3fn
LATENT = 576  # stands for the head size of latents: 512 elements of keys that are values, too, and 64 more

# A sequence with at most this many new tokens is decoded (split over its keys); with more it is a prompt's chunk.
# Drafts have this size. A tile of 64 rows holds 8 tokens of 8 heads.
MAX_DECODE_QUERIES = 8


@dataclass(frozen=True)
class Config:
    """Rows (block_m) and keys (block_n) of a tile, warps a program, stages of the software pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # a thread

    def launch(self) -> dict[str, int | None]:
        """The launch options for Triton."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": self.max_registers}


@dataclass(frozen=True)
class Splits:
    """The division of a decode step's keys into chunks.

    A chunk has as many keys as make ``programs`` chunks of the whole step, and at least ``min_chunk``.
    """

    programs: int
    min_chunk: int


# In float32 a row's result must not depend on the other rows. Both kernels therefore use one tile shape and one fixed
# chunk size, and add chunks in order. They do not use tensor cores.
EXACT_CHUNK = 512
EXACT_SCRATCH = 256 << 20  # bytes for the sums of chunks; steps that need more are not split
EXACT = Config(16, 16, 4, 3)

# Tensor cores want 64 rows a warp group (wgmma). 128 rows on two warp groups halve the keys read again for each tile
# of queries: 64 rows would ask the L2 cache for 6 TB/s at 400 TFLOP/s. Head size 64 fits twice into an SM with 128
# registers a thread, so that one program's exponentials run beside the other's products. Head size 256 fills the
# registers with its output (128 of 255 a thread), so its tile of keys is narrow, and head size 512 with half
# the rows. By head size, padded to a power of 2.
PREFILL = {
    64: Config(128, 64, 8, 5, max_registers=128),
    128: Config(128, 64, 8, 5),
    256: Config(128, 32, 8, 5),
    512: Config(64, 16, 8, 5),
    LATENT: Config(64, 16, 8, 5),
}
# Bytes of fp8 become 16-bit numbers in registers on their way to the tensor cores. Beside the output of 64 rows of head
# size 512 there is no room for them: 32 rows, on the tensor cores of single warps, are slow and spill nothing.
PREFILL_FLOAT8 = {
    64: Config(128, 64, 8, 5),
    128: Config(128, 64, 8, 5),
    256: Config(128, 16, 8, 5),
    512: Config(32, 32, 8, 4),
}
# GPUs without warp groups (A100, A10, L4, RTX) keep a tile's products in the registers of single warps, and all but the
# A100 have 99 KB of shared memory: narrower tiles, of fewer rows from head size 256 on. None uses stack.
PREFILL_WARPS = {
    64: Config(128, 64, 8, 5),
    128: Config(128, 32, 8, 5),
    256: Config(64, 16, 8, 5),
    512: Config(32, 16, 8, 5),
    LATENT: Config(32, 16, 8, 5),
}
PREFILL_WARPS_FLOAT8 = PREFILL_WARPS | {512: Config(32, 16, 8, 4)}

# Decoding reads every key once: what counts is bytes in flight. HBM's latency asks for 29 KB an SM (4.8 TB/s * 0.8 us
# / 132 SMs); 64 keys of head size 128 in 16 bits, and their values, are 32 KB, and three programs fit an SM.
# By head size and rows: few rows leave registers for more keys; 128 rows are groups of more than 64 heads, for whose
# output at head size 512 an SM has no registers.
DECODE = {
    64: {16: (64, 4, 5), 32: (64, 4, 5), 64: (64, 4, 5), 128: (64, 8, 5)},
    128: {16: (64, 4, 5), 32: (32, 4, 5), 64: (32, 4, 5), 128: (64, 8, 5)},
    256: {16: (32, 4, 5), 32: (32, 8, 5), 64: (32, 8, 5), 128: (32, 8, 5)},
    512: {16: (16, 4, 5), 32: (16, 8, 5), 64: (16, 8, 5)},
    LATENT: {16: (32, 4, 5), 32: (32, 8, 5), 64: (32, 8, 3)},
}
# Half the bytes a key, so more keys or more stages.
DECODE_FLOAT8 = {
    64: {16: (128, 4, 5), 32: (64, 4, 5), 64: (64, 4, 5), 128: (64, 8, 5)},
    128: {16: (64, 4, 7), 32: (32, 4, 7), 64: (64, 4, 5), 128: (64, 8, 5)},
    256: {16: (32, 4, 7), 32: (32, 8, 5), 64: (32, 8, 5), 128: (32, 8, 5)},
    512: {16: (16, 4, 5), 32: (16, 8, 5), 64: (16, 8, 5)},
}
# In 99 KB of shared memory rows leave fewer keys: those entries that differ.
DECODE_SMALL = {
    256: {64: (32, 8, 3), 128: (16, 8, 3)},
    512: {64: (16, 8, 3)},
    LATENT: {32: (16, 8, 5), 64: (16, 8, 3)},
}

# Programs that an SM holds at once (two to four, by shared memory and registers), times two: a second wave evens out
# chunks of unequal length, more would only add sums to write and read again (8 KB a chunk, against 128 KB of keys and
# values in the smallest).
PROGRAMS_PER_SM = 6
MIN_CHUNK = 256

REDUCED = 1 << 14  # numbers of a program that sums chunks: twice as many do not fit in registers


def prefill_config(
    head_size: int, dtype: torch.dtype, kv_dtype: torch.dtype, group: int, device: Facts = HOPPER
) -> Config:
    """The tile of a prompt's chunk; ``head_size`` is padded to a power of two of at least 64."""
    if dtype == torch.float32:
        return _exact(group)
    if device.has_large_memory and device.capability >= (9, 0):
        return (PREFILL_FLOAT8 if kv_dtype == FLOAT8 else PREFILL)[head_size]
    return (PREFILL_WARPS_FLOAT8 if kv_dtype == FLOAT8 else PREFILL_WARPS)[head_size]


def decode_config(
    head_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    group: int,
    device: Facts = HOPPER,
    tokens: int | None = None,
) -> Config:
    """The tile of a decode step: ``tokens`` queries a sequence of ``group`` heads each, None when that is mixed.

    A mixed step has mostly single rows: two m16 fragments serve a few drafts without waste on the others.
    """
    if dtype == torch.float32:
        return _exact(group)
    rows = min(32, MAX_DECODE_QUERIES * group) if tokens is None else min(64, tokens * group)
    block_m = max(16, next_power_of_2(rows), next_power_of_2(group))
    if kv_dtype == FLOAT8:
        return Config(block_m, *DECODE_FLOAT8[head_size][block_m])
    tile = DECODE[head_size][block_m]
    if not device.has_large_memory:
        tile = DECODE_SMALL.get(head_size, {}).get(block_m, tile)
    return Config(block_m, *tile)


def _exact(group: int) -> Config:
    return replace(EXACT, block_m=max(EXACT.block_m, next_power_of_2(group)))


def splits(device: torch.device) -> Splits:
    """The splits of a decode step on ``device``; the interpreter counts as a GPU with one SM."""
    sms = devices.facts(device).multiprocessors if device.type != "cpu" else 1
    return Splits(sms * PROGRAMS_PER_SM, MIN_CHUNK)


@cache
def has_float8() -> bool:
    """True if Triton supports e4m3 on this machine's GPU; its interpreter does."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 9)


def reduction(width: int, programs: int, splits: Splits) -> tuple[int, int]:
    """The number of chunks of ``width`` numbers that ``programs`` sum at once, and their warps.

    One at a time would wait for memory once a chunk, and a long sequence has a hundred. As many as 64 registers of each
    thread hold, and as many again are under way in shared memory. Two programs an SM at most: twice as many.
    """
    at_once, warps = max(1, min(32, 8192 // width)), max(4, min(16, width // 2048))
    few = 2 if 3 * programs <= splits.programs and width <= 8192 else 1
    return at_once * few, min(16, warps * few)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length()
