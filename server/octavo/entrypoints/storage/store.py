"""The store of a server: its tables, used by one thread, so that no request waits for a disk that another one needs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from octavo.entrypoints.errors import APIError
from octavo.entrypoints.storage.runs import RunTables
from octavo.entrypoints.storage.tables import FullError

logger = logging.getLogger(__name__)

T = TypeVar("T")
_SWEEP_SECONDS = 60.0  # between looks at what has expired
_PAUSE_SECONDS = 1.0  # after a failure, in which nobody waits for the same again


class StoreError(APIError):
    """A 503: the store cannot be read or written at the moment."""

    def __init__(self, why: str) -> None:
        super().__init__(
            503,
            f"the store of responses (--responses-store) does not work: {why}; retry later, or send the whole "
            "conversation as input",
            code="store_unavailable",
            headers={"retry-after": "1"},
        )
        self.why = why


class StoreFullError(StoreError):
    """A 413: nothing can make room for this, so there is no use in trying again. ``limit``: the flag."""

    def __init__(self, limit: str) -> None:
        why = f"the store of responses has no room for this ({limit})"
        APIError.__init__(self, 413, f"{why}: send less, or have the server started with more", code="store_full")
        self.why = why


class Store:
    """All that one server keeps. ``is_lasting``: it survives the server; ``is_shared``: all replicas have it."""

    def __init__(self, tables: RunTables, is_lasting: bool, is_shared: bool = False) -> None:
        self._tables, self.is_lasting, self.is_shared = tables, is_lasting, is_shared
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="octavo-store")
        self._failed: tuple[float, str] | None = None  # when and why
        self._swept = time.monotonic()

    async def run(self, work: Callable[[RunTables], T]) -> T:
        """Return what ``work`` returns, in the store's thread. Raises StoreError."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, work)

    def _run(self, work: Callable[[RunTables], T]) -> T:
        now = time.monotonic()
        if self._failed is not None and now < self._failed[0] + _PAUSE_SECONDS:
            raise StoreError(self._failed[1])  # those behind a file that is locked would wait one after the other
        try:
            done = work(self._tables)
            if now > self._swept + _SWEEP_SECONDS:
                self._swept = now
                self._tables.expire()
        except FullError as error:
            raise StoreFullError(str(error)) from None
        except self._tables.errors as error:
            self._failed = time.monotonic(), str(error)
            raise StoreError(str(error)) from None
        self._failed = None
        return done

    def close(self) -> None:
        """Finish what has begun, and close the file."""
        self._thread.submit(self._tables.close)
        self._thread.shutdown()
