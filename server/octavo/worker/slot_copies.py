"""Copies of LoRA adapters into a device's slots, beside the steps under way.

They have a stream of their own: a copy waits there for the last step that reads the slot, and the first step that reads
it afterwards waits on its own stream for the copy. The host waits for neither.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from octavo_kernels import SlotMemory


class SlotCopies:
    """Fills the slots of ``memory``. A CPU does one thing after the other, and needs no order."""

    def __init__(self, memory: SlotMemory, device: torch.device) -> None:
        self._memory = memory
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())  # on which the slots have been emptied
        self._reading = set[int]()  # by the last step
        self._read = dict[int, torch.cuda.Event]()  # when a slot's last step before that is done
        self._filled = dict[int, torch.cuda.Event]()  # slots that no step has read since

    def fill(self, slot: int, image: Tensor) -> None:
        """Have an adapter's `SlotMemory.image` copied into a slot. Memory that is pinned is kept until it is read."""
        if self._stream is None:
            self._memory.fill(slot, image)
            return
        self._end_step()
        if slot in self._read:
            self._stream.wait_event(self._read.pop(slot))
        with torch.cuda.stream(self._stream):
            self._memory.fill(slot, image)
            self._filled[slot] = torch.cuda.Event()
            self._filled[slot].record()

    def begin_step(self, slots: Iterable[int]) -> None:
        """What is launched from now on reads these slots."""
        if self._stream is None:
            return
        self._end_step()
        for slot in slots:
            self._reading.add(slot)
            if slot in self._filled:
                torch.cuda.current_stream().wait_event(self._filled.pop(slot))

    def _end_step(self) -> None:
        """All that has been launched so far is of steps before."""
        if self._reading:
            done = torch.cuda.Event()
            done.record()
            self._read |= dict.fromkeys(self._reading, done)
            self._reading.clear()
