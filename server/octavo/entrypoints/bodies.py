"""Large bodies of requests, all of them together: how much of them is in memory, and how fast they are read."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_EACH_TURN = 4  # pieces, of about 256 KiB: a millisecond or two


@dataclass
class Bodies:
    """Belongs to one event loop. Bodies count while they are received, and the images in them until these have been
    read; ``limit`` is in bytes."""

    limit: int
    count: int = 0
    _left: int = _EACH_TURN  # pieces that may be read in this turn of the loop
    _waiting: deque[asyncio.Future[None]] = field(default_factory=deque)

    @contextmanager
    def share(self) -> Iterator[Share]:
        """Count what one request holds, as long as the block lasts."""
        share = Share(self)
        try:
            yield share
        finally:
            self.count -= share.count

    async def turn(self) -> None:
        """Wait until a piece may be read: with hundreds of bodies that arrive at once, a piece of each in one turn of
        the loop would hold up everybody else."""
        loop = asyncio.get_running_loop()
        if self._left == _EACH_TURN:
            loop.call_soon(self._next_turn)
        if self._left:
            self._left -= 1
            return
        ticket: asyncio.Future[None] = loop.create_future()
        self._waiting.append(ticket)
        await ticket

    def _next_turn(self) -> None:
        self._left = _EACH_TURN
        while self._waiting and self._left:
            ticket = self._waiting.popleft()
            if not ticket.done():  # else its reader has been cancelled
                ticket.set_result(None)
                self._left -= 1
        if self._left < _EACH_TURN:
            asyncio.get_running_loop().call_soon(self._next_turn)


@dataclass
class Share:
    """The bytes that one request holds."""

    of: Bodies
    count: int = 0

    def add(self, size: int) -> bool:
        """Hold ``size`` bytes more; whether all requests are within the limit then."""
        self.count += size
        self.of.count += size
        return self.of.count <= self.of.limit
