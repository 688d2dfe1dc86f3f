"""Server-sent events as bytes."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from octavo.entrypoints.transport.responses import encode_json


def event(message: Any) -> bytes:
    """One event with ``message`` as JSON."""
    return b"data: %b\n\n" % encode_json(message)


class EventTemplate:
    """Events that differ in one string only: everything else is encoded once, not for every token."""

    def __init__(self, make: Callable[[str], Any]) -> None:
        mark = secrets.token_hex(16)
        self._head, self._tail = event(make(mark)).split(encode_json(mark))

    def fill(self, text: str) -> bytes:
        """The event with ``text`` in its place."""
        return b"%b%b%b" % (self._head, encode_json(text), self._tail)
