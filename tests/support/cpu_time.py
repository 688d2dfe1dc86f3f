"""Limits of CPU time: of the code under test alone, whatever the process did before."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def at_most(seconds: float, clock: Callable[[], float] = time.process_time) -> Iterator[None]:
    """Fail where the block takes more than ``seconds`` of CPU time, or four times that while coverage.py traces it.

    A collection goes through all objects of the process, and a worker that has run a thousand tests has millions: what
    is there already is left out of those that fall into the block. ``time.thread_time`` leaves out other threads too.
    """
    limit = seconds * (4 if sys.gettrace() is not None else 1)
    gc.freeze()
    try:
        started = clock()
        yield
        spent = clock() - started
    finally:
        gc.unfreeze()
    assert spent < limit, f"{spent:.2f} s of CPU time, more than {limit:.2f}"
