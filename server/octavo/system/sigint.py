"""Ctrl-C (SIGINT) delivered between steps only."""

from __future__ import annotations

import signal
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
