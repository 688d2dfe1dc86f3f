"""Tracks when each watch last received anything. The API server sends a bookmark about every minute, so a watch that is
silent for longer has a dead connection, whatever the socket says.

kopf reads the watches; their activity is recorded below it, in the responses of the HTTP session that it is given.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import aiohttp


class WatchHealth:
    """Times at which each watch, identified by the path of its URL, last received something. `clock` counts seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._active_at: dict[str, float] = {}
        self._expected: dict[str, float] = {}  # and since when
        self._listed: set[str] = set()  # by kopf, before it starts a watch from there
        self.on_restart: Callable[[str], object] = lambda path: None  # started from a new list: changes may be missing

    def expect(self, paths: Iterable[str]) -> None:
        """Sets which watches there should be."""
        now = self._clock()
        self._expected = {path: self._expected.get(path, now) for path in paths}

    def reset(self) -> None:
        """All watches have ended."""
        self._active_at.clear()
        self._listed.clear()
        self._expected = dict.fromkeys(self._expected, self._clock())

    def record(self, path: str) -> None:
        """The watch received something."""
        self._active_at[path] = self._clock()

    def not_started(self) -> list[str]:
        """Expected watches that have not started yet."""
        return [path for path in self._expected if path not in self._active_at]

    def silent_for(self, seconds: float) -> str | None:
        """The most silent watch, if it has been silent for more than `seconds`."""
        ages = self._ages()
        path = max(ages, key=lambda one: ages[one], default=None)
        return path if path is not None and ages[path] > seconds else None

    def max_silence(self) -> float:
        """Seconds for which the most silent watch has been silent."""
        return max(self._ages().values(), default=0.0)

    def _ages(self) -> dict[str, float]:
        now = self._clock()
        return {path: now - max(since, self._active_at.get(path, 0.0)) for path, since in self._expected.items()}

    def on_start(self, path: str) -> None:
        """The response to a watch request has started."""
        self.record(path)
        if path in self._listed:  # otherwise it resumes where it was interrupted
            self._listed.discard(path)
            self.on_restart(path)

    def response_class(self) -> type[aiohttp.ClientResponse]:
        """A response that records activity, for the session that kopf is given."""
        health = self

        class ObservedResponse(aiohttp.ClientResponse):
            async def start(self, connection: Any) -> aiohttp.ClientResponse:
                await super().start(connection)
                if self.status == 200:
                    path = self.url.path
                    if self.url.query.get("watch") == "true":
                        health.on_start(path)
                        self.content = _ObservedStream(self.content, lambda: health.record(path))  # type: ignore[assignment]
                    else:
                        health._listed.add(path)
                return self

        return ObservedResponse


class _ObservedStream:
    """A response's content that calls `on_chunk` for each chunk."""

    def __init__(self, content: aiohttp.StreamReader, on_chunk: Callable[[], None]) -> None:
        self._content, self._on_chunk = content, on_chunk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        async for chunk in self._content.iter_chunked(size):
            self._on_chunk()
            yield chunk
