"""Bytes that differ in a few strings only, as the events of a stream do."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from octavo.entrypoints.transport.responses import encode_json


class Template:
    """Writes what ``make`` makes of ``holes`` strings, in the order of their places: all else is encoded once, not for
    every token."""

    def __init__(self, make: Callable[..., bytes], holes: int = 1) -> None:
        marks = [secrets.token_hex(16) for _ in range(holes)]
        written = make(*marks).replace(b"%", b"%%")
        for mark in marks:
            written = written.replace(encode_json(mark), b"%b")
        self._format = written

    def fill(self, text: str, *more: str) -> bytes:
        """The bytes with these strings in their places."""
        if not more:
            return self._format % encode_json(text)
        return self._format % (encode_json(text), *map(encode_json, more))
