"""Memory of a KV cache is there before it is needed, and nothing that lies in it changes."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from octavo_kernels.cpu import Prefault, prefault, unavailable_reason

pytestmark = [
    pytest.mark.skipif(unavailable_reason() is not None, reason="needs the C kernels"),
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is touched ahead"),
]
BLOCKS, BLOCK_BYTES = 4000, 16384


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """4,000 blocks that nobody has touched, of which 100 to 400 are kept ready."""
    monkeypatch.setattr(prefault, "LEAST_AHEAD_BYTES", 100 * BLOCK_BYTES)
    monkeypatch.setattr(prefault, "MOST_AHEAD_BYTES", 400 * BLOCK_BYTES)
    fresh = mmap.mmap(-1, BLOCKS * BLOCK_BYTES)  # an allocator may hand out pages that an earlier test has touched
    fresh.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(fresh, dtype=torch.bfloat16).view(BLOCKS, BLOCK_BYTES // 2)


def resident(blocks: Tensor, first: int, last: int) -> float:
    """The share of the pages of blocks [first, last) that the system has given."""
    part = blocks[first:last]
    begin = -(-part.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = (part.data_ptr() + part.nbytes - begin) // mmap.PAGESIZE
    found = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(begin), ctypes.c_size_t(pages * mmap.PAGESIZE), found) == 0
    return sum(byte & 1 for byte in found) / pages


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_next_blocks_are_there_and_no_more_than_those(blocks: Tensor) -> None:
    ahead = Prefault(blocks)
    wait_for(lambda: resident(blocks, 0, 100) == 1)
    assert resident(blocks, 110, BLOCKS) == 0
    for used, ready in ((50, 151), (200, 402), (1000, 1401)):  # the least, as much again, the most
        ahead.mark_used(used)
        wait_for(lambda end=ready: resident(blocks, 0, end) == 1)
        assert resident(blocks, ready + 10, BLOCKS) == 0
    ahead.mark_used(BLOCKS - 1)
    wait_for(lambda: resident(blocks, 0, BLOCKS) == 1)


def test_used_blocks_are_there_at_once_whatever_the_thread_has_come_to(blocks: Tensor) -> None:
    ahead = Prefault(blocks)
    ahead.mark_used(BLOCKS - 2)
    assert resident(blocks, 0, BLOCKS - 1) == 1


def test_concurrent_writes_stay(blocks: Tensor) -> None:
    ahead = Prefault(blocks)
    ahead.mark_used(BLOCKS - 1)
    for block in range(0, BLOCKS, 7):  # the thread is at work on the same pages
        blocks[block] = block % 100
    wait_for(lambda: resident(blocks, 0, BLOCKS) == 1)
    expected = torch.zeros(BLOCKS, dtype=torch.bfloat16)
    expected[::7] = torch.arange(0, BLOCKS, 7) % 100
    assert torch.equal(blocks, expected[:, None].expand_as(blocks))


def test_the_thread_ends_with_its_owner_and_a_fork_does_not_wait_for_it(blocks: Tensor) -> None:
    before = set(os.listdir("/proc/self/task"))
    ahead = Prefault(blocks)
    (thread,) = set(os.listdir("/proc/self/task")) - before
    ahead.mark_used(BLOCKS - 1)
    child = os.fork()
    if child == 0:
        del ahead  # the child has the blocks, but not the thread
        os._exit(7)
    wait_for(lambda: os.waitpid(child, os.WNOHANG) == (child, 7 << 8))
    started = time.monotonic()
    del ahead
    assert time.monotonic() - started < 10
    wait_for(lambda: thread not in os.listdir("/proc/self/task"))
