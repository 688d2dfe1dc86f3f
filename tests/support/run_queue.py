"""How long threads waited for a processor that others had: what a shared machine adds to a time, and no program can
help."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path


def waited(path: Path | str) -> float:
    """Seconds that a thread (/proc/PID/task/TID) has waited, ready to run, since it began; 0 once it has ended, and
    where the kernel does not count it."""
    try:
        return int(Path(path, "schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


class OwnTime:
    """Time less what the threads of this process and of some others waited for processors. Where one waits for the
    other, as a client for a server, or a thread for what has Python's lock, that is what it takes on a machine of their
    own; threads that wait side by side count twice, so give no processes whose work is not waited for."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._tasks = [Path(f"/proc/{pid}/task") for pid in (os.getpid(), *pids)]
        self._started, self._before = time.monotonic(), self._waits()

    def _waits(self) -> dict[str, float]:
        paths = []
        for tasks in self._tasks:
            with contextlib.suppress(OSError):  # it has ended
                paths += [f"{tasks}/{thread}" for thread in os.listdir(tasks)]
        return {path: waited(path) for path in paths}

    @property
    def waited(self) -> float:
        """What is left out since this was made."""
        return sum(max(0.0, seconds - self._before.get(path, 0.0)) for path, seconds in self._waits().items())

    @property
    def seconds(self) -> float:
        """Since this was made."""
        now = time.monotonic()
        return now - self._started - self.waited
