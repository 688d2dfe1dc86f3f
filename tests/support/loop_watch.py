"""How long a server's event loop is ever busy with one thing: ``python -m support.loop_watch serve ...`` is ``octavo
serve`` with a watch in its loop, which writes to the file OCTAVO_LOOP_WATCH.

A timer of a millisecond is late by as much as the longest turn; what other threads hold up (a C function keeps the
interpreter) counts as well. In the first figure other programs' use of the processors counts, too. The second leaves
out what the loop's thread waited for a processor; the third is the CPU time of the loop's thread alone.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import struct
import sys
import time
from pathlib import Path
from typing import Any

from support.run_queue import waited

VARIABLE = "OCTAVO_LOOP_WATCH"
_FIGURES = struct.Struct("=ddd")
_TICK = 0.001
_THREAD = "/proc/thread-self"


class LoopWatch:
    """What a watched server has written; `reset` begins anew."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_FIGURES.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _FIGURES.size)

    def reset(self) -> None:
        """Forget what was."""
        _FIGURES.pack_into(self._map, 0, 0.0, 0.0, 0.0)

    @property
    def longest(self) -> tuple[float, float, float]:
        """Seconds of the longest turn since; of the longest without its waits for a processor; and the loop thread's
        CPU seconds of the one that took most."""
        return _FIGURES.unpack_from(self._map)  # type: ignore[return-value]


async def _watch(path: str) -> None:
    with open(path, "r+b") as file:
        figures = mmap.mmap(file.fileno(), _FIGURES.size)
    last, last_cpu, last_wait = time.monotonic(), time.thread_time(), waited(_THREAD)
    while True:
        await asyncio.sleep(_TICK)
        now, cpu, wait = time.monotonic(), time.thread_time(), waited(_THREAD)
        longest, longest_own, most = _FIGURES.unpack_from(figures)
        turn = now - last - _TICK
        own = turn - (wait - last_wait)
        _FIGURES.pack_into(figures, 0, max(longest, turn), max(longest_own, own), max(most, cpu - last_cpu))
        last, last_cpu, last_wait = now, cpu, wait


def main() -> int:
    """`octavo` with a watch."""
    import octavo.entrypoints.server as server

    serve = server.serve

    async def watched(*args: Any) -> int:
        watch = asyncio.ensure_future(_watch(os.environ[VARIABLE]))
        try:
            return await serve(*args)
        finally:
            watch.cancel()

    server.serve = watched
    from octavo.cli.main import main as octavo

    return octavo()


if __name__ == "__main__":
    sys.exit(main())
