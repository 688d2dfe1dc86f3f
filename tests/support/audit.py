"""Which files, programs and connections code opens: for promises of speed that a clock could only guess at."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

EVENTS = ("open", "socket.connect", "socket.getaddrinfo", "subprocess.Popen")
_listeners: list[list[tuple[str, str]]] = []


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    if _listeners and event in EVENTS:
        for events in _listeners:
            events.append((event, str(arguments[0])))


sys.addaudithook(_hook)  # one cannot be removed


@contextmanager
def audited() -> Iterator[list[tuple[str, str]]]:
    """A list that fills with Python's audit events (name, first argument), of EVENTS alone."""
    events: list[tuple[str, str]] = []
    _listeners.append(events)
    try:
        yield events
    finally:
        _listeners.remove(events)


def check_reads_notes_alone(events: list[tuple[str, str]]) -> None:
    """A few small files were opened: no weights, no program, nobody dialled. That takes a millisecond."""
    assert {name for name, _ in events} <= {"open"}, events
    assert len(events) <= 3 and not any(path.endswith((".safetensors", ".gguf", ".whl")) for _, path in events), events
