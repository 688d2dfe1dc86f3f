"""A test marked `alone` has the machine to itself, also where several workers (pytest-xdist) run tests side by side."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def turn(folder: Path, alone: bool) -> Iterator[None]:
    """Wait for one's turn among all that use the ``folder``, and hold it: beside others, or ``alone``."""
    folder.mkdir(exist_ok=True)
    with (folder / "gate").open("w") as gate, (folder / "machine").open("w") as machine:
        fcntl.flock(gate, fcntl.LOCK_EX)  # who waits for the machine holds the gate, so that nobody overtakes
        fcntl.flock(machine, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield
