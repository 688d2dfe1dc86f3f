"""Signals: Ctrl-C between steps only, and an orderly end where a process is told to go."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_held() -> Iterator[Callable[[], None]]:
    """Defer Ctrl-C until the yielded function is called: an interrupted step would leave inconsistent state.

    A second Ctrl-C is raised at once. Does nothing where Python's own handler is not installed.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: None
        return
    held = False

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal held
        if held:
            raise KeyboardInterrupt
        held = True

    def release() -> None:
        nonlocal held
        if held:
            held = False
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, hold)
    try:
        yield release
        release()
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """SIGTERM and a closed terminal (SIGHUP) end this process as Ctrl-C does: what it has started is stopped."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
