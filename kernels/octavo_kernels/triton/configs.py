"""Launch shapes of the attention kernels, with their reasons.

Chosen for Hopper (132 SMs, 227 KB of shared memory, 64 K registers each). A tile of keys takes block_n * head_size
elements of shared memory a stage, so does one of values; the loads are indirect (page number, then page), so two of
the stages are latency of the page numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

FLOAT8 = torch.float8_e4m3fn

# A sequence with at most this many new tokens is decoded (split over its keys); with more it is a prompt's chunk.
# Drafts to verify come in this size. A tile of 64 rows holds 8 tokens of 8 heads.
MAX_DECODE_QUERIES = 8


@dataclass(frozen=True)
class Config:
    """Rows (block_m) and keys (block_n) of a tile, warps a program, stages of the software pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Splits:
    """How the keys of a decode step are shared out.

    A chunk has as many keys as make ``programs`` chunks of the whole step, and at least ``min_chunk``.
    """

    programs: int
    min_chunk: int


# float32 promises that a row's bits do not depend on its company. So there both kernels use one tile shape and one
# fixed chunk, and chunks are summed in order. No tensor cores: exactness, not speed.
EXACT_CHUNK = 512
EXACT = {64: Config(16, 32, 4, 2), 128: Config(16, 32, 4, 2), 256: Config(16, 32, 4, 2)}

# Tensor cores want 64 rows a warp group (wgmma). 128 rows on two warp groups halve the keys read again for each tile
# of queries; head size 256 fills its registers with the output (64 KB of float32 a warp group), so its key tile is
# narrower.
PREFILL = {
    64: Config(128, 128, 8, 3),
    128: Config(128, 64, 8, 3),
    256: Config(128, 32, 8, 3),
}
# Bytes of fp8 must become 16-bit numbers in registers on their way to the tensor cores: narrower tiles.
PREFILL_FLOAT8 = {
    64: Config(128, 64, 8, 3),
    128: Config(128, 64, 8, 3),
    256: Config(128, 32, 8, 3),
}

# Decoding reads every key once: all that counts is bytes in flight. 64 keys of 128 x 2 bytes are 16 KB, so one stage
# of keys and values is 32 KB; two to three programs an SM keep 64 to 96 KB under way, twice what the latency of HBM
# needs (4.8 TB/s * 0.8 us / 132 SMs = 29 KB).
DECODE = {
    64: Config(16, 128, 4, 3),
    128: Config(16, 64, 4, 3),
    256: Config(16, 32, 4, 3),
}
DECODE_FLOAT8 = {
    64: Config(16, 128, 4, 3),
    128: Config(16, 128, 4, 3),
    256: Config(16, 64, 4, 3),
}

# Programs that an SM holds at once (shared memory and registers allow two to four), times two: a second wave evens
# out chunks of unequal length, more would only add sums to write and read again (8 KB a chunk, against 128 KB of
# keys and values in the smallest).
PROGRAMS_PER_SM = 6
MIN_CHUNK = 256


def prefill_config(head_size: int, dtype: torch.dtype, kv_dtype: torch.dtype, group: int) -> Config:
    """The tile of a prompt's chunk; ``head_size`` is padded to a power of two of at least 64."""
    if dtype == torch.float32:
        return _exact(head_size, group)
    return (PREFILL_FLOAT8 if kv_dtype == FLOAT8 else PREFILL)[head_size]


def decode_config(
    head_size: int, dtype: torch.dtype, kv_dtype: torch.dtype, group: int, tokens: int | None = None
) -> Config:
    """The tile of a decode step: ``tokens`` queries a sequence of ``group`` heads each, None when that is mixed.

    A mixed step has mostly single rows: two m16 fragments serve a few drafts without waste on the others.
    """
    if dtype == torch.float32:
        return _exact(head_size, group)
    base = (DECODE_FLOAT8 if kv_dtype == FLOAT8 else DECODE)[head_size]
    rows = min(32, MAX_DECODE_QUERIES * group) if tokens is None else min(64, tokens * group)
    return Config(max(16, next_power_of_2(rows), next_power_of_2(group)), base.block_n, base.num_warps, base.num_stages)


def _exact(head_size: int, group: int) -> Config:
    base = EXACT[head_size]
    return Config(max(base.block_m, next_power_of_2(group)), base.block_n, base.num_warps, base.num_stages)


@cache
def splits(device: torch.device) -> Splits:
    """How far a decode step may be split on ``device``; in the interpreter as on a GPU of one SM."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return Splits(sms * PROGRAMS_PER_SM, MIN_CHUNK)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
