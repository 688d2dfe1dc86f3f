"""Are the watches alive? An API server that has nothing to tell says so about every minute, by a bookmark. Silence
means that the connection is dead, however healthy it looks.

kopf reads the watches; what it is told is noted here, below it, in the responses of its HTTP session.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import aiohttp


class Freshness:
    """When each watch, known by the path of its URL, was heard of last. `clock` counts seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heard: dict[str, float] = {}
        self._expected: dict[str, float] = {}  # and since when
        self._listed: set[str] = set()  # by kopf, before a watch of the same begins
        self.on_begin: Callable[[str], object] = lambda path: None  # a watch began anew: some changes may be missing

    def expect(self, paths: Iterable[str]) -> None:
        """These watches there should be, and no others."""
        now = self._clock()
        self._expected = {path: self._expected.get(path, now) for path in paths}

    def forget(self) -> None:
        """All watches have ended."""
        self._heard.clear()
        self._listed.clear()
        self._expected = dict.fromkeys(self._expected, self._clock())

    def heard(self, path: str) -> None:
        self._heard[path] = self._clock()

    def missing(self) -> list[str]:
        """Watches that have never begun."""
        return [path for path in self._expected if path not in self._heard]

    def silent(self, seconds: float) -> str | None:
        """The watch that has been silent the longest, when that is longer than `seconds`."""
        ages = self._ages()
        path = max(ages, key=lambda one: ages[one], default=None)
        return path if path is not None and ages[path] > seconds else None

    def silence(self) -> float:
        """For how many seconds the most silent watch has been silent."""
        return max(self._ages().values(), default=0.0)

    def _ages(self) -> dict[str, float]:
        now = self._clock()
        return {path: now - max(since, self._heard.get(path, 0.0)) for path, since in self._expected.items()}

    def began(self, path: str) -> None:
        """A response to a watch has begun."""
        self.heard(path)
        if path in self._listed:  # else it goes on where it was interrupted
            self._listed.discard(path)
            self.on_begin(path)

    def response_class(self) -> type[aiohttp.ClientResponse]:
        """For the session that kopf is given."""
        freshness = self

        class Noted(aiohttp.ClientResponse):
            async def start(self, connection: Any) -> aiohttp.ClientResponse:
                await super().start(connection)
                if self.status == 200:
                    path = self.url.path
                    if self.url.query.get("watch") == "true":
                        freshness.began(path)
                        self.content = _Listener(self.content, lambda: freshness.heard(path))  # type: ignore[assignment]
                    else:
                        freshness._listed.add(path)
                return self

        return Noted


class _Listener:
    """A response's content that tells when something arrives."""

    def __init__(self, content: aiohttp.StreamReader, heard: Callable[[], None]) -> None:
        self._content, self._heard = content, heard

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        async for chunk in self._content.iter_chunked(size):
            self._heard()
            yield chunk
