"""Files of a web server or a bucket, asked for in one way: what they are, a range of one, or the rest of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from octavo.fetch import download
from octavo.fetch.download import Headers, RemoteFile

_TIMEOUT = 30.0


class RemoteFiles(Protocol):
    """All methods raise ResponseError and UnreachableError."""

    def probe(self, url: str) -> RemoteFile:
        """Return what the server says of a file."""

    def read_range(self, url: str, first: int, last: int) -> bytes:
        """Return the bytes from ``first`` to ``last``, or to the file's end."""

    def resume(self, url: str, into: Path, file: RemoteFile, advance: Callable[[int], None]) -> None:
        """Append to ``into`` what it lacks of ``file``, and start anew if that has changed. ``advance`` hears of every
        new byte. Raises OSError besides, when the disk does."""


@dataclass(frozen=True)
class WebFiles:
    """`RemoteFiles` over HTTP, with ``headers`` that authenticate."""

    headers: Headers

    def probe(self, url: str) -> RemoteFile:
        """See `RemoteFiles`."""
        return download.probe(url, headers=self.headers, timeout=_TIMEOUT)

    def read_range(self, url: str, first: int, last: int) -> bytes:
        """See `RemoteFiles`."""
        return download.read_range(url, first, last, headers=self.headers, timeout=_TIMEOUT)

    def resume(self, url: str, into: Path, file: RemoteFile, advance: Callable[[int], None]) -> None:
        """See `RemoteFiles`."""
        download.resume(
            url, into, file.size, headers=self.headers, timeout=_TIMEOUT, advance=advance, version=file.etag
        )
