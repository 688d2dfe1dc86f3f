"""One byte for each block of the KV cache, which says who holds it and what it offers.

The core writes, others read: nobody has to ask the core, and a step costs no more for being watched.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

REFERENCES = 0x3F  # sequences that hold the block, this many or more; 0: none does
CACHED = 0x40  # the prefix cache offers what it holds to requests to come
PARTIAL = 0x80  # which is not a whole block


@dataclass(frozen=True)
class BlockCounts:
    """Counts of the ``num_blocks`` blocks by state: each is free, used or cached."""

    num_blocks: int
    free: int  # hold nothing
    used: int  # by sequences
    shared: int  # of these: by several
    cached: int  # hold what no sequence uses, and requests to come may
    partial: int  # used or cached ones that offer less than a whole block


def count_cells(cells: bytes) -> Counter[int]:
    """Count the blocks by byte. Blocks at the end that were never used cost nothing: they are used in order."""
    begun = cells.rstrip(b"\0")
    return Counter(begun) + Counter({0: len(cells) - len(begun)})


def count_blocks(cells: bytes) -> BlockCounts:
    """``cells``: the byte of each block."""
    free = used = shared = cached = partial = 0
    for cell, count in count_cells(cells).items():
        references = cell & REFERENCES
        used += count * (references > 0)
        shared += count * (references > 1)
        cached += count * (not references and bool(cell & CACHED))
        free += count * (not references and not cell & CACHED)
        partial += count * bool(cell & PARTIAL)
    return BlockCounts(free + used + cached, free, used, shared, cached, partial)
