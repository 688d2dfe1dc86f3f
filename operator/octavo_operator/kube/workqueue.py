"""Keys that are to be looked at: each once, however often it is named; never by two workers at a time; later and later
while it keeps failing."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class WorkQueue(Generic[K]):
    """For one event loop. `get` and `done` come in pairs."""

    def __init__(self, first_delay: float = 0.5, longest_delay: float = 300.0) -> None:
        self._first, self._longest = first_delay, longest_delay
        self._ready: OrderedDict[K, None] = OrderedDict()
        self._busy: set[K] = set()
        self._again: set[K] = set()  # named while busy
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._failures: dict[K, int] = {}
        self._wakeup = asyncio.Event()

    def add(self, key: K) -> None:
        """Look at `key` as soon as possible."""
        if timer := self._timers.pop(key, None):
            timer.cancel()
        if key in self._busy:
            self._again.add(key)
        else:
            self._ready[key] = None
            self._wakeup.set()

    def add_after(self, key: K, seconds: float) -> None:
        """Look at `key` after so many seconds at the latest."""
        loop = asyncio.get_running_loop()
        due = loop.time() + max(seconds, 0)
        if (known := self._timers.get(key)) is not None:
            if known.when() <= due:
                return
            known.cancel()
        self._timers[key] = loop.call_at(due, self._due, key)

    def retry(self, key: K) -> float:
        """It failed: look again after a while, twice as long each time. Returns the seconds."""
        count = self._failures[key] = self._failures.get(key, 0) + 1
        delay = min(self._first * 2 ** min(count - 1, 30), self._longest)
        self.add_after(key, delay)
        return delay

    def succeeded(self, key: K) -> None:
        self._failures.pop(key, None)

    def forget(self, key: K) -> None:
        """It is gone."""
        self._failures.pop(key, None)
        if timer := self._timers.pop(key, None):
            timer.cancel()

    async def get(self) -> K:
        while not self._ready:
            self._wakeup.clear()
            await self._wakeup.wait()
        key, _ = self._ready.popitem(last=False)
        self._busy.add(key)
        return key

    def done(self, key: K) -> None:
        self._busy.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def _due(self, key: K) -> None:
        del self._timers[key]
        self.add(key)

    @property
    def num_failing(self) -> int:
        """Keys whose last look failed."""
        return len(self._failures)

    def __len__(self) -> int:
        return len(self._ready) + len(self._busy)
