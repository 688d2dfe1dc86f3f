"""What rank 0 knows of the other ranks, wherever they are: it sends them steps, and watches that they live."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from octavo.errors import OctavoError
from octavo.system.channel import Channel, Kind, frame
from octavo.system.heartbeat import Heartbeat

if TYPE_CHECKING:
    from octavo.interface.engine_config import EngineConfig
    from octavo.layers.parallel import Group

logger = logging.getLogger(__name__)

WATCH_SECONDS = 0.2
_BEAT_IS_OLD = 3.0  # seconds; a rank beats twice a second


class Rank(Protocol):
    """One of them."""

    number: int
    channel: Channel
    heartbeat: Heartbeat

    @property
    def name(self) -> str:
        """As errors call it."""

    def ended(self) -> tuple[int, str] | None:
        """None while it lives; else why not, and the less the number the likelier it is the reason of others' ends."""

    def end(self) -> None:
        """End it, even if it is stopped."""

    def close(self) -> None:
        """`end`, and give back what is kept of it."""


class Ranks:
    """Ranks 1 to ``size`` - 1. A thread looks whether they live, and whether a step is done in time: see `lost`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lost: str | None = None  # why the ranks can compute no further step
        self.on_lost: Callable[[str], None] | None = None  # called then, once, by the thread that watches
        self.group: Group | None = None  # by which they exchange tensors
        self.timeout = float("inf")  # seconds for a step
        self._step: tuple[int, float] | None = None  # that rank 0 is in, and since when
        self._ranks: list[Rank] = []
        self._closed, self._started = threading.Event(), threading.Event()
        self._error: Exception | None = None
        self._some_ended = False
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)

    def _start_thread(self) -> None:
        """Start the ranks, in the thread that watches them. Raises what `_start` does."""
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._start()
        except (OSError, OctavoError) as error:
            self._error = error
            return
        finally:
            self._started.set()
        while not self._closed.wait(WATCH_SECONDS):
            problem = self._problem()
            if problem is not None:
                self._lose(problem)
                return

    def _start(self) -> None:
        raise NotImplementedError

    def open_group(self, config: EngineConfig) -> Group:
        """Tell all ranks what they are to do, and return by what they exchange tensors."""
        raise NotImplementedError

    def wait_ready(self) -> None:
        """Wait until all have loaded their part. Raises RuntimeError when one is lost."""
        for rank in self._ranks:
            while not self._read(rank):
                self.check()
                rank.channel.wait(WATCH_SECONDS)

    def _read(self, rank: Rank) -> list[tuple[Kind, bytearray]]:
        try:
            return list(rank.channel.receive())
        except EOFError:
            self.wait_for_news()
            raise RuntimeError(self.lost or f"{rank.name} has ended") from None

    def check(self) -> None:
        """Raise RuntimeError when a rank is lost."""
        if self.lost is not None:
            raise RuntimeError(self.lost)

    def send(self, kind: Kind, payload: bytes) -> None:
        """Send all ranks a message. Raises RuntimeError when a rank is lost."""
        data = frame(kind, payload)
        for rank in self._ranks:
            rank.channel.send_frame(data)
        for rank in self._ranks:
            while not rank.channel.flush(WATCH_SECONDS):
                self.check()

    def sums(self) -> list[tuple[int, bytearray]]:
        """What ranks have sent since: their numbers, and messages of kind SUM."""
        return [
            (rank.number, payload) for rank in self._ranks for kind, payload in self._read(rank) if kind is Kind.SUM
        ]

    def begin_step(self, step_id: int) -> None:
        """Watch that a step ends in time."""
        self._step = step_id, time.monotonic()

    def end_step(self) -> None:
        """The step has ended."""
        self._step = None

    # -- watching ----------------------------------------------------------------------------------------------------

    def _problem(self) -> str | None:
        ended = [how for rank in self._ranks if (how := rank.ended()) is not None]
        if ended and not self._some_ended and min(ended)[0] > 0:
            self._some_ended = True  # look again: it may have missed another one, whose end is the reason
        elif ended:
            return min(ended)[1]
        step = self._step
        if step is None or time.monotonic() - step[1] < self.timeout:
            return None
        return f"step {step[0]} was not done in {self.timeout:g} s: {'; '.join(map(_state, self._late()))}"

    def _late(self) -> list[Rank]:
        """Those that do not even beat, else those that others wait for, else those that have done the fewest steps."""
        old = min(_BEAT_IS_OLD, max(1.0, self.timeout))
        waited_for = self.group.late if self.group is not None else []
        least = min(rank.heartbeat.num_steps for rank in self._ranks)
        for is_late in (
            lambda rank: rank.heartbeat.seconds_since_beat() > old,
            lambda rank: rank.number in waited_for,
            lambda rank: rank.heartbeat.num_steps == least,
        ):
            late = [rank for rank in self._ranks if is_late(rank)]
            if late:
                return late
        return []

    def _lose(self, problem: str) -> None:
        self.lost = problem
        logger.error("%s: the other ranks end", problem)
        for rank in self._ranks:
            rank.end()
        if self.group is not None:
            self.group.stop()
        if self.on_lost is not None:
            self.on_lost(problem)

    def wait_for_news(self, seconds: float = 2.0) -> None:
        """Wait for `lost` where a rank has just closed its end, or did not take part in a step."""
        until = time.monotonic() + seconds
        while self.lost is None and time.monotonic() < until:
            time.sleep(WATCH_SECONDS / 4)

    def close(self) -> None:
        """End all ranks."""
        self._closed.set()
        for rank in self._ranks:
            rank.close()


def _state(rank: Rank) -> str:
    beat, steps = rank.heartbeat.seconds_since_beat(), rank.heartbeat.num_steps
    return f"{rank.name} is late, with {steps} steps done and its last heartbeat {beat:.1f} s ago"
