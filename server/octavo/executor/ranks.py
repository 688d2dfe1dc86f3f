"""Rank 0's view of the other ranks, wherever they run: it sends them steps, and watches that they live."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter as Counts
from collections import defaultdict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from octavo.errors import OctavoError
from octavo.system.channel import Channel, Kind, frame
from octavo.system.heartbeat import Heartbeat

if TYPE_CHECKING:
    from octavo.executor.places import Place
    from octavo.interface.engine_config import EngineConfig

logger = logging.getLogger(__name__)

WATCH_SECONDS = 0.2
_BEAT_IS_OLD = 3.0  # seconds; a rank beats twice a second
_SILENT_SECONDS = 10.0
_PIECE = 16 << 20  # bytes


class Watched(NamedTuple):
    """A rank and its heartbeat."""

    number: int
    name: str  # as errors call it
    heartbeat: Heartbeat


class Rank(Protocol):
    """One of them, or all of another node, of which the first speaks for the others."""

    number: int
    channel: Channel

    @property
    def name(self) -> str:
        """The name in errors."""

    @property
    def watched(self) -> list[Watched]:
        """It, or each of its node's."""

    def ended(self) -> tuple[int, str] | None:
        """None while it lives; else why not, and the less the number the likelier it is the reason of others' ends."""

    def end(self) -> None:
        """End it, even if it is stopped; without waiting for that."""

    def close(self) -> None:
        """`end`, and give back what is kept of it."""


def send_results(channel: Channel, payload: bytes) -> None:
    """Send rank 0 a step's results, in pieces that a connection takes: log-probabilities of a whole vocabulary may be
    hundreds of megabytes. Each ends with a byte that says whether one follows."""
    for start in range(0, len(payload), _PIECE):
        end = start + _PIECE
        channel.send(Kind.RESULTS, payload[start:end] + bytes([end < len(payload)]))


class Ranks:
    """Ranks 1 to ``size`` - 1. A thread looks whether they live, and whether a step is done in time: see `lost`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lost: str | None = None  # why the ranks can compute no further step
        self.on_close: Callable[[], None] | None = None
        self.on_lost: Callable[[str], None] | None = None  # called then, once, by the thread that watches
        self.place: Place | None = None  # of rank 0
        self.timeout = float("inf")  # seconds for a step, or without a heartbeat
        self._silent: Counts[int] = Counts()  # how often in a row the heartbeat of a rank was found old
        self._steps: deque[tuple[int, float]] = deque()  # that are under way, and since when
        self._received: defaultdict[tuple[int, Kind], deque[bytearray]] = defaultdict(deque)  # by rank, and not read
        self._ranks: list[Rank] = []
        self.is_watching = True  # else somebody else does
        self._closed, self._started = threading.Event(), threading.Event()
        self._error: Exception | None = None
        self._losing = threading.Lock()
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
            problem = self._problem() if self.is_watching else None
            if problem is not None:
                self.lose(problem)
                return

    def _start(self) -> None:
        raise NotImplementedError

    def open_place(self, config: EngineConfig) -> Place:
        """Tell all ranks what they are to do, and return rank 0's place among them."""
        raise NotImplementedError

    def wait_ready(self) -> None:
        """Wait until all have loaded their part. Raises RuntimeError when one is lost."""
        for rank in self._ranks:
            self._next_of(rank, Kind.READY)

    def _next_of(self, rank: Rank, kind: Kind) -> bytearray:
        """Wait for a message."""
        queue = self._received[rank.number, kind]
        while not queue:
            self._read(rank)
            if queue:
                break
            self.check()
            rank.channel.wait(WATCH_SECONDS)
        return queue.popleft()

    def _read(self, rank: Rank) -> None:
        for kind, payload in self.read(rank):
            self._received[rank.number, kind].append(payload)

    def read(self, rank: Rank) -> list[tuple[Kind, bytearray]]:
        """Return the messages of one rank. Raises RuntimeError when it has ended."""
        try:
            return list(rank.channel.receive())
        except EOFError:
            self.wait_for_news()
            raise RuntimeError(self.lost or f"{rank.name} has ended") from None

    def check(self) -> None:
        """Raise RuntimeError when a rank is lost."""
        if self.lost is not None:
            raise RuntimeError(self.lost)

    def send(self, kind: Kind, payload: bytes, first: int = 0) -> None:
        """Send all ranks from ``first`` on a message. Raises RuntimeError when a rank is lost."""
        data, ranks = frame(kind, payload), [rank for rank in self._ranks if rank.number >= first]
        for rank in ranks:
            rank.channel.send_frame(data)
        for rank in ranks:
            while not rank.channel.flush(WATCH_SECONDS):
                self.check()

    def sums(self) -> list[tuple[int, bytearray]]:
        """Take the SUM messages that have arrived, as (rank, message)."""
        found = []
        for rank in self._ranks:
            self._read(rank)
            queue = self._received[rank.number, Kind.SUM]
            found += [(rank.number, queue.popleft()) for _ in range(len(queue))]
        return found

    def next_results(self, number: int) -> bytearray:
        """Wait for what rank ``number`` has made of the oldest step that it has not told of, see `send_results`. Raises
        RuntimeError when a rank is lost."""
        rank = next(rank for rank in self._ranks if rank.number == number)
        whole, more = bytearray(), True
        while more:
            part = self._next_of(rank, Kind.RESULTS)
            more = bool(part.pop())
            whole += part
        return whole

    def begin_step(self, step_id: int) -> None:
        """Watch that a step ends in time, from before it is sent: a rank that reads nothing would hold that up."""
        self._steps.append((step_id, time.monotonic()))

    def end_step(self) -> None:
        """The oldest step has ended."""
        self._steps.popleft()

    # -- watching ----------------------------------------------------------------------------------------------------

    def _problem(self) -> str | None:
        ended = [how for rank in self._ranks if (how := rank.ended()) is not None]
        if ended and not self._some_ended and min(ended)[0] > 0:
            self._some_ended = True  # look again: it may have missed another one, whose end is the reason
        elif ended:
            return min(ended)[1]
        step = next(iter(self._steps.copy()), None)
        if step is None:
            return self._silence()
        if time.monotonic() - step[1] < self.timeout:
            return None
        return f"step {step[0]} was not done in {self.timeout:g} s: {'; '.join(map(_state, self._late()))}"

    def _silence(self) -> str | None:
        """Name a rank that is silent while no step runs: at start, or while adapters are read. Counts looks, not
        seconds, because a machine that was suspended wakes up with old heartbeats; waits `_SILENT_SECONDS` at least, as
        imports may delay a beat."""
        most = max(self.timeout, _SILENT_SECONDS)
        for rank in (watched for one in self._ranks for watched in one.watched):
            is_old = rank.heartbeat.seconds_since_beat() > _BEAT_IS_OLD
            self._silent[rank.number] = self._silent[rank.number] + 1 if is_old else 0
            if self._silent[rank.number] * WATCH_SECONDS >= most - _BEAT_IS_OLD:
                return f"{rank.name} has given no sign of life for {most:g} s"
        return None

    def _late(self) -> list[Watched]:
        """Ranks that hold up the step: those without a heartbeat, else those that others wait for, else those with the
        fewest steps."""
        old = min(_BEAT_IS_OLD, max(1.0, self.timeout))
        waited_for = self.place.late if self.place is not None else []
        everyone = [watched for rank in self._ranks for watched in rank.watched]
        least = min(rank.heartbeat.num_steps for rank in everyone)
        for is_late in (
            lambda rank: rank.heartbeat.seconds_since_beat() > old,
            lambda rank: rank.number in waited_for,
            lambda rank: rank.heartbeat.num_steps == least,
        ):
            late = [rank for rank in everyone if is_late(rank)]
            if late:
                return late
        return []

    def lose(self, problem: str) -> None:
        """End the ranks, whatever they are doing, unless they are lost already."""
        with self._losing:
            if self.lost is not None:
                return
            self.lost = problem
        logger.error("%s: the other ranks end", problem)
        for rank in self._ranks:
            rank.end()
        if self.place is not None:
            self.place.stop()
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
        if self.on_close is not None:
            self.on_close()


def _state(rank: Watched) -> str:
    beat, steps = rank.heartbeat.seconds_since_beat(), rank.heartbeat.num_steps
    return f"{rank.name} is late, with {steps} steps done and its last heartbeat {beat:.1f} s ago"
