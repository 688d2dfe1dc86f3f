"""Weights on their way from a file, piece by piece: to a CUDA device, or to numbers of another dtype.

Fresh memory for each tensor would cost a page fault every 4 KB, and malloc keeps much of it in a heap full of holes. A
copy to a device from memory that is not pinned is made twice, while the thread that reads waits for it: for 16 GB that
is seconds. So each thread that loads has two pieces of memory, and reads into one while the other is copied.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

# The device takes 8 MB in a fraction of a millisecond, a read of as much lasts longer than all that goes with it.
PIECE = 8 << 20

_thread_local = threading.local()


class Staging:
    """One thread's two buffers of ``size`` bytes. ``event`` makes events as `torch.cuda.Event` does, one a buffer."""

    def __init__(self, event: Callable[[], Any], size: int = PIECE, pinned: bool = False) -> None:
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


class _NoEvent:
    """Copies to a CPU are done when they return."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


def staging(device: torch.device) -> Staging:
    """This thread's buffers for ``device``, freed with the thread (torch keeps pinned memory for later use)."""
    found: dict[str, Staging] = _thread_local.__dict__.setdefault("staging", {})
    if device.type not in found:
        on_cpu = device.type == "cpu"
        found[device.type] = (
            Staging(_NoEvent) if on_cpu else Staging(partial(torch.cuda.Event, blocking=True), pinned=True)
        )
    return found[device.type]
