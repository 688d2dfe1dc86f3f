"""Weights on their way from a file to a CUDA device.

Fresh memory for each tensor would cost a page fault every 4 KB, and a copy from memory that is not pinned is made
twice, while the thread that reads waits for it: for 16 GB that is seconds. So each thread that loads has two pieces of
pinned memory, and reads into one of them while the other is copied.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

# The device takes 8 MB in a fraction of a millisecond, a read of as much lasts longer than all that goes with it.
PIECE = 8 << 20

_own = threading.local()


class Staging:
    """Of one thread. ``event`` makes what tells when copies are done (as `torch.cuda.Event` does)."""

    def __init__(
        self,
        size: int = PIECE,
        pinned: bool = True,
        event: Callable[[], Any] = lambda: torch.cuda.Event(blocking=True),
    ) -> None:
        self._pieces = [(torch.empty(size, dtype=torch.uint8, pin_memory=pinned), event()) for _ in range(2)]

    def fill(self, target: torch.Tensor, dtype: torch.dtype, read: Callable[[memoryview, int], None]) -> None:
        """Fill ``target``, flat, with numbers that are stored as ``dtype``: ``read`` is called with a buffer and the
        first byte that it is to hold. Returns when all is there: neither thread nor file is needed any more."""
        try:
            count = self._pieces[0][0].numel() // dtype.itemsize
            for first in range(0, target.numel(), count):
                part = target[first : first + count]
                piece, copied = self._pieces[0]
                copied.synchronize()
                piece = piece[: part.numel() * dtype.itemsize]
                read(piece.numpy().data, first * dtype.itemsize)
                numbers = piece.view(dtype)
                if dtype != part.dtype:
                    numbers = numbers.to(part.device, non_blocking=True)  # converted there
                part.copy_(numbers, non_blocking=True)
                copied.record()
                self._pieces.reverse()
        finally:  # also when a read fails: both sides' memory may be freed next
            for _, copied in self._pieces:
                copied.synchronize()


def staging() -> Staging:
    """This thread's own. It goes with the thread; torch keeps the memory for what is pinned next."""
    if not hasattr(_own, "staging"):
        _own.staging = Staging()
    return _own.staging
