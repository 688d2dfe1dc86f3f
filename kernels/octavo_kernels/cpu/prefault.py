"""Page faults of a KV cache, taken before its memory is needed."""

from __future__ import annotations

import ctypes
import os
import weakref

from torch import Tensor

from octavo_kernels.cpu.library import Library, get_library

# As much again as is in use is kept ready, within these bounds: a server that little is asked of stays small, and the
# thread that touches more would still be busy when requests come.
LEAST_AHEAD_BYTES, MOST_AHEAD_BYTES = 32 << 20, 128 << 20


class Prefault:
    """Touches the pages of the next blocks of a KV cache while a core is idle.

    Blocks are expected to be handed out in order. csrc/prefault.c tells what the first use of a page costs otherwise.
    Does nothing without the C kernels, and on systems other than Linux.
    """

    def __init__(self, blocks: Tensor) -> None:
        """``blocks [num_blocks, ...]``, of all layers, contiguous, in host memory."""
        self._thread: int | None = None
        library = get_library()
        if library is None or not blocks.numel():
            return
        self._library, self._c, self._used = library, _declare(library), 0
        self._blocks, self._num_blocks, self._block_bytes = blocks.data_ptr(), len(blocks), blocks[0].nbytes
        self._bounds = LEAST_AHEAD_BYTES // self._block_bytes or 1, MOST_AHEAD_BYTES // self._block_bytes or 1
        self._thread = self._c.oct_prefault_start(self._blocks, self._num_blocks, self._block_bytes)
        if self._thread is not None:
            # The blocks are among the arguments because they must outlive the thread.
            weakref.finalize(self, _stop, self._c, self._thread, os.getpid(), blocks)
            self._c.oct_prefault_until(self._thread, self._bounds[0])

    def mark_used(self, highest: int) -> None:
        """Blocks up to ``highest`` are in use from now on. Touches those that are not ready before it returns."""
        end = highest + 1
        if self._thread is None or end <= self._used:
            return
        first = max(self._used, self._c.oct_prefault_done(self._thread))
        if first < end:
            self._library.run(self._library.pack("touch_blocks", self._blocks, self._block_bytes, first, end))
        self._used = end
        least, most = self._bounds
        self._c.oct_prefault_until(self._thread, min(self._num_blocks, end + min(max(least, end), most)))


def _declare(library: Library) -> ctypes.CDLL:
    c = library.c
    c.oct_prefault_start.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    c.oct_prefault_start.restype = ctypes.c_void_p
    c.oct_prefault_until.argtypes, c.oct_prefault_until.restype = (ctypes.c_void_p, ctypes.c_int64), None
    c.oct_prefault_done.argtypes, c.oct_prefault_done.restype = (ctypes.c_void_p,), ctypes.c_int64
    c.oct_prefault_stop.argtypes, c.oct_prefault_stop.restype = (ctypes.c_void_p,), None
    return c


def _stop(c: ctypes.CDLL, thread: int, pid: int, blocks: Tensor) -> None:
    if os.getpid() == pid:  # a forked process does not have the thread and would wait for it forever
        c.oct_prefault_stop(thread)
