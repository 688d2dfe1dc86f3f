"""Starts the other ranks of an engine as child processes, watches and ends them. Imports little: their own imports take
longest, so they are started first."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.system.channel import Channel, Kind, frame
from octavo.system.heartbeat import MAX_PAGES, Heartbeat
from octavo.system.parent import describe_exit

if TYPE_CHECKING:
    from octavo.layers.parallel import SharedMemoryGroup

logger = logging.getLogger(__name__)

_WATCH_SECONDS = 0.2
_BEAT_IS_OLD = 3.0  # seconds; a rank beats twice a second


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    socket: socket.socket
    channel: Channel
    heartbeat: Heartbeat

    @property
    def name(self) -> str:
        return f"rank {self.number} (process {self.process.pid})"

    def end(self) -> None:
        """Kill it, which works on a stopped process too."""
        self.process.kill()
        self.process.wait()


class RankProcesses:
    """Ranks 1 to ``size`` - 1: ``python -m octavo.executor.worker_proc RANK SOCKET HEARTBEATS`` each.

    They read one line of JSON from their stdin and end when stdin does, or this process, or, on Linux, the thread here
    that has started them. It looks whether they live, and whether a step is done in time: see `lost`.
    """

    def __init__(self, size: int, heartbeats: int | None = None) -> None:
        """``heartbeats``: the file of heartbeats, of which rank 0 has the first (None: a new one)."""
        if not 1 < size <= MAX_PAGES:
            raise ValueError(f"size: 2 to {MAX_PAGES} ranks, not {size}")
        self.size = size
        self.lost: str | None = None  # why the ranks can compute no further step
        self.on_lost: Callable[[str], None] | None = None  # called then, once, by the thread that watches
        self.group: SharedMemoryGroup | None = None  # by which they exchange tensors
        self.timeout = float("inf")  # seconds for a step
        self._step: tuple[int, float] | None = None  # that rank 0 is in, and since when
        self._ranks: list[_Rank] = []
        self._closed, started = threading.Event(), threading.Event()
        self._error: OSError | None = None
        self._some_ended = False
        args = (heartbeats, started)
        self._thread = threading.Thread(target=self._run, args=args, name="rank-watch", daemon=True)
        self._thread.start()
        started.wait()
        if self._error is not None:
            raise self._error

    def _run(self, heartbeats: int | None, started: threading.Event) -> None:
        try:
            if heartbeats is not None:
                self._start(heartbeats)
            else:
                with tempfile.TemporaryFile() as file:
                    Heartbeat(file.fileno(), create=True)
                    self._start(file.fileno())
        except OSError as error:
            self._error = error
            return
        finally:
            started.set()
        while not self._closed.wait(_WATCH_SECONDS):
            problem = self._problem()
            if problem is not None:
                self._lose(problem)
                return

    def _start(self, heartbeats: int) -> None:
        for number in range(1, self.size):
            ours, theirs = socket.socketpair()
            with theirs:
                inherited = theirs.fileno(), heartbeats
                command = [sys.executable, "-m", "octavo.executor.worker_proc", str(number), *map(str, inherited)]
                # A group of its own: Ctrl-C in a terminal reaches the front end alone, which then drains.
                process = subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0, pass_fds=inherited)
            page = Heartbeat(heartbeats, create=False, rank=number)
            self._ranks.append(_Rank(number, process, ours, Channel(ours), page))

    def configure(self, message: dict[str, Any], descriptor: int) -> None:
        """Send every rank what it is to do, as JSON, and a descriptor that it inherits."""
        line = json.dumps(message).encode() + b"\n"
        for rank in self._ranks:
            assert rank.process.stdin is not None
            try:
                socket.send_fds(rank.socket, [b"f"], [descriptor])
                rank.process.stdin.write(line)
                rank.process.stdin.flush()
            except OSError:  # it has ended already, as will be noticed
                pass

    def wait_ready(self) -> None:
        """Wait until all have loaded their part. Raises RuntimeError when one is lost."""
        for rank in self._ranks:
            while not self._read(rank):
                self.check()
                rank.channel.wait(_WATCH_SECONDS)

    def _read(self, rank: _Rank) -> list[tuple[Kind, bytearray]]:
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
            while not rank.channel.flush(_WATCH_SECONDS):
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
        ended = [(rank, code) for rank in self._ranks if (code := rank.process.poll()) is not None]
        if ended and not self._some_ended and all(code > 0 for _, code in ended):
            self._some_ended = True  # look again: it may have missed another one, whose end is the reason
        elif ended:
            rank, code = min(ended, key=lambda one: one[1])  # one that was killed
            return rank.heartbeat.failure or f"{rank.name} {describe_exit(code)}"
        step = self._step
        if step is None or time.monotonic() - step[1] < self.timeout:
            return None
        return f"step {step[0]} was not done in {self.timeout:g} s: {'; '.join(map(_state, self._late()))}"

    def _late(self) -> list[_Rank]:
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
            time.sleep(_WATCH_SECONDS / 4)

    def close(self) -> None:
        """End all ranks."""
        self._closed.set()
        for rank in self._ranks:
            rank.end()
            rank.socket.close()
            if rank.process.stdin is not None:
                try:
                    rank.process.stdin.close()
                except OSError:
                    pass


def _state(rank: _Rank) -> str:
    beat, steps = rank.heartbeat.seconds_since_beat(), rank.heartbeat.num_steps
    return f"{rank.name} is late, with {steps} steps done and its last heartbeat {beat:.1f} s ago"
