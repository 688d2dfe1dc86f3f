"""Work queue with client-go's semantics: a key is queued once, processed by one worker at a time, and retried with
exponential backoff."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from octavo_operator.kube.backoff import Backoff

K = TypeVar("K", bound=Hashable)


class WorkQueue(Generic[K]):
    """A queue for one event loop. `get` and `done` come in pairs."""

    def __init__(self, base_delay: float = 0.5, max_delay: float = 300.0) -> None:
        self._backoff = Backoff(base_delay, max_delay)
        self._ready: OrderedDict[K, None] = OrderedDict()
        self._processing: set[K] = set()
        self._dirty: set[K] = set()  # added while being processed
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._failures: dict[K, int] = {}
        self._not_empty = asyncio.Event()

    def add(self, key: K) -> None:
        """Queues `key` now."""
        if timer := self._timers.pop(key, None):
            timer.cancel()
        if key in self._processing:
            self._dirty.add(key)
        else:
            self._ready[key] = None
            self._not_empty.set()

    def add_after(self, key: K, seconds: float) -> None:
        """Queues `key` in so many seconds, unless it is due earlier already."""
        loop = asyncio.get_running_loop()
        due = loop.time() + max(seconds, 0)
        if (known := self._timers.get(key)) is not None:
            if known.when() <= due:
                return
            known.cancel()
        self._timers[key] = loop.call_at(due, self._due, key)

    def retry(self, key: K) -> float:
        """Queues `key` with backoff. Returns the delay in seconds."""
        count = self._failures[key] = self._failures.get(key, 0) + 1
        delay = self._backoff.delay(count)
        self.add_after(key, delay)
        return delay

    def succeeded(self, key: K) -> None:
        """Resets the backoff of `key`."""
        self._failures.pop(key, None)

    def forget(self, key: K) -> None:
        """Resets the backoff of `key`, and drops what `add_after` has scheduled."""
        self._failures.pop(key, None)
        if timer := self._timers.pop(key, None):
            timer.cancel()

    async def get(self) -> K:
        """Waits for the next key."""
        while not self._ready:
            self._not_empty.clear()
            await self._not_empty.wait()
        key, _ = self._ready.popitem(last=False)
        self._processing.add(key)
        return key

    def done(self, key: K) -> None:
        """The key from `get` has been processed."""
        self._processing.discard(key)
        if key in self._dirty:
            self._dirty.discard(key)
            self.add(key)

    def _due(self, key: K) -> None:
        del self._timers[key]
        self.add(key)

    @property
    def num_failing(self) -> int:
        """Keys whose last processing failed."""
        return len(self._failures)

    def __len__(self) -> int:
        return len(self._ready) + len(self._processing)
