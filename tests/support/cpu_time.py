"""Limits of CPU time, which coverage.py more than doubles."""

from __future__ import annotations

import sys


def limit(seconds: float) -> float:
    """What ``seconds`` of CPU time are while this thread is traced, line by line, or is not."""
    return seconds * (4 if sys.gettrace() is not None else 1)
