"""Server-sent events as bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo.entrypoints.transport.responses import encode_json
from octavo.entrypoints.transport.template import Template

COMMENT = b": keepalive\n\n"  # no event: clients do not see it, proxies do


def event(message: Any) -> bytes:
    """One event with ``message`` as JSON."""
    return b"data: %b\n\n" % encode_json(message)


def named_event(name: str, message: Any) -> bytes:
    """One event with a name."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode_json(message))


class EventTemplate(Template):
    """Events that differ in one string only."""

    def __init__(self, make: Callable[[str], Any], name: str | None = None) -> None:
        super().__init__(lambda text: event(make(text)) if name is None else named_event(name, make(text)))
