"""A heartbeat in shared memory: no messages, so nothing queues up or wakes a process, and the age of the last beat is
right even when the reader or the writer was stopped."""

from __future__ import annotations

import mmap
import time

from octavo.system.temporary import allocate

SIZE = mmap.PAGESIZE
MAX_PAGES = 64  # of one file: one for each rank
_BEAT, _PROGRESS, _STEPS, _MEMORY_USED, _MEMORY_TOTAL = range(5)  # slots of 8 bytes each; each is written by one store
_FAILURE = 1024  # where its text begins, behind its length in two bytes


class Heartbeat:
    """A page of counters: `beat` by a thread of the core that does nothing else, `progress` by its main loop.

    Times are of the monotonic clock, which processes of one machine share.
    """

    def __init__(self, fd: int, create: bool, rank: int = 0) -> None:
        """``fd``: of a file that both processes have open; it may be closed afterwards. ``create`` makes room in it for
        the pages of `MAX_PAGES` ranks. Raises OctavoError where there is none."""
        if create:
            allocate(fd, MAX_PAGES * SIZE)
        self._page = mmap.mmap(fd, SIZE, offset=rank * SIZE)
        self._slots = memoryview(self._page).cast("q")

    # -- written by the core -----------------------------------------------------------------------------------------

    def beat(self) -> None:
        """Record that the process is alive."""
        self._slots[_BEAT] = time.monotonic_ns()

    def progress(self, num_steps: int) -> None:
        """Record that a step is done, or that work has just arrived."""
        self._slots[_STEPS] = num_steps
        self._slots[_PROGRESS] = time.monotonic_ns()

    def device_memory(self, used: int, total: int) -> None:
        """Record the bytes in use on the core's device and in total."""
        self._slots[_MEMORY_USED], self._slots[_MEMORY_TOTAL] = used, total

    def fail(self, reason: str) -> None:
        """Record why this process ends."""
        text = reason.encode()[: SIZE - _FAILURE - 2]
        self._page[_FAILURE : _FAILURE + 2 + len(text)] = len(text).to_bytes(2, "little") + text

    # -- read by any process -----------------------------------------------------------------------------------------

    def read_device_memory(self) -> tuple[int, int]:
        """Bytes in use on the core's device and in total."""
        return self._slots[_MEMORY_USED], self._slots[_MEMORY_TOTAL]

    @property
    def num_steps(self) -> int:
        """Steps that the core has finished."""
        return self._slots[_STEPS]

    @property
    def failure(self) -> str:
        """Return the text that `fail` was given; "" before that."""
        size = int.from_bytes(self._page[_FAILURE : _FAILURE + 2], "little")
        return self._page[_FAILURE + 2 : _FAILURE + 2 + size].decode(errors="ignore")

    def seconds_since_beat(self) -> float:
        """Infinite before the first beat."""
        return _seconds_since(self._slots[_BEAT])

    def seconds_since_progress(self) -> float:
        """Infinite before the first progress."""
        return _seconds_since(self._slots[_PROGRESS])


def _seconds_since(stamp_ns: int) -> float:
    return (time.monotonic_ns() - stamp_ns) / 1e9 if stamp_ns else float("inf")
