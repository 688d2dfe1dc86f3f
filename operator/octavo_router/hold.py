"""Requests that wait for the first replica of their pool. Pure: no clock, no I/O.

They are bounded in number and in time, and go in the order in which they came.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class Ticket:
    """A place in the queue. `deadline`: when the wait ends in vain."""

    number: int
    pool: str
    deadline: float


class Hold:
    """The queue of all pools of one router. `max_requests` 0: nothing waits."""

    def __init__(self, max_requests: int, max_seconds: float) -> None:
        self.max_requests, self.max_seconds = max_requests, max_seconds
        self._arrivals: Counter[str] = Counter()  # by pool
        self._number = 0
        self._waiting: dict[int, Ticket] = {}  # in the order of their numbers
        self._held: Counter[str] = Counter()  # of them, by pool

    @property
    def held(self) -> dict[str, int]:
        """The numbers of waiting requests by pool."""
        return {pool: many for pool, many in self._held.items() if many}

    def waiting(self, pool: str) -> int:
        """Return the number of requests that wait in one pool."""
        return self._held[pool]

    @property
    def is_full(self) -> bool:
        """True if nobody else may wait."""
        return len(self._waiting) >= self.max_requests

    def arrivals(self, pool: str | None) -> int:
        """Return how many requests have ever waited, of one pool or of all: the operator asks for those it has not seen
        yet."""
        return self._arrivals.total() if pool is None else self._arrivals[pool]

    def add(self, pool: str, now: float) -> Ticket | None:
        """A place for a request that comes now. None: all are taken."""
        if self.is_full:
            return None
        self._arrivals[pool] += 1
        self._held[pool] += 1
        self._number += 1
        ticket = Ticket(self._number, pool, now + self.max_seconds)
        self._waiting[ticket.number] = ticket
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Stop waiting: the client has gone, or its time is over. No effect on a request that waits no more."""
        if self._waiting.pop(ticket.number, None):
            self._held[ticket.pool] -= 1

    def release(self, pool: str, most: int | None = None) -> list[Ticket]:
        """Let so many requests of a pool (None: all) go on, the oldest first."""
        if not self._held[pool]:
            return []
        released = list(itertools.islice((one for one in self._waiting.values() if one.pool == pool), most))
        for one in released:
            self.leave(one)
        return released
