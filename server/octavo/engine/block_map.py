"""The map of the KV cache's blocks (`octavo.interface.block_map`) in memory that core and front end share."""

from __future__ import annotations

import mmap
import os

from octavo.engine.heartbeat import SIZE


def create_block_map(fd: int, num_blocks: int) -> memoryview:
    """Bytes for ``num_blocks``, all 0, behind the heartbeat in the file ``fd``; for the core to write."""
    os.ftruncate(fd, SIZE + num_blocks)
    return memoryview(mmap.mmap(fd, num_blocks, offset=SIZE))


def read_block_map(fd: int) -> bytes:
    """What the core has written there last; empty before it knows how many blocks it has."""
    return os.pread(fd, os.fstat(fd).st_size - SIZE, SIZE)
