"""Ctrl-C, between steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_held() -> Iterator[Callable[[], None]]:
    """Hold Ctrl-C back until the call that this gives: a step cut off in its middle leaves books that contradict
    themselves. A second one is not held back. Only where Python's own handler would raise KeyboardInterrupt."""
    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
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
