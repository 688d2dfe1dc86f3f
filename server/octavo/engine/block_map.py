"""The map of the KV cache's blocks (`octavo.interface.block_map`) in memory that core and front end share."""

from __future__ import annotations

import mmap
import os

from octavo.system.heartbeat import MAX_PAGES, SIZE
from octavo.system.temporary import allocate

_START = MAX_PAGES * SIZE


def create_block_map(fd: int, num_blocks: int) -> memoryview:
    """Bytes for ``num_blocks``, all 0, behind the heartbeats in the file ``fd``; for the core to write. Raises
    OctavoError."""
    allocate(fd, _START + num_blocks)
    return memoryview(mmap.mmap(fd, num_blocks, offset=_START))


def read_block_map(fd: int) -> bytes:
    """Return the block map that the core wrote last; empty before it knows how many blocks it has."""
    return os.pread(fd, os.fstat(fd).st_size - _START, _START)
