"""Delays of retries, which double up to a limit."""

from __future__ import annotations

from dataclasses import dataclass

_MAX_DOUBLINGS = 30  # larger powers would overflow


@dataclass(frozen=True)
class Backoff:
    """Delays in seconds: `first`, then twice as much each time, `longest` at most."""

    first: float
    longest: float

    def delay(self, attempt: int) -> float:
        """Return the delay after an attempt; the first one has number 1."""
        return min(self.first * 2.0 ** min(max(attempt - 1, 0), _MAX_DOUBLINGS), self.longest)
