"""The engine's side of one grammar's process: its socket, its sequences, and how long its masks take."""

from __future__ import annotations

import json
import socket
import time
from collections import deque
from concurrent.futures import Future
from typing import Any

from octavo.worker.grammars.child import IDLE_SECONDS

SLOW_MASK_SECONDS = 0.01  # CPU time of a mask after which no step waits for this grammar's next
PATIENCE = 16  # masks


class GrammarProcess:
    """One grammar's process, as the engine sees it."""

    def __init__(self, grammar: str) -> None:
        self.grammar = grammar
        self.users = 0  # unfinished requests
        self.waiting: list[Future[None]] = []  # for the end of compiling
        self.socket: socket.socket | None = None  # while it runs
        self.started = self.idle_since = 0.0  # time.monotonic()
        self.memory = 0  # bytes beyond the vocabulary's
        self.forked = self.compiled = self.compiles_slowly = False
        self.wakers: frozenset[int] | None = None  # see `octavo.worker.grammars.free_text`
        self.sequences: dict[int, GrammarSequence] = {}  # by slot
        self.unsent = bytearray()
        self._received = b""
        self._patience = 0
        self._mask_seconds = 0.0  # mean CPU time of the last masks
        self._requested: deque[list[GrammarSequence]] = deque()  # sequences of each work message not answered yet
        # Not sent yet.
        self._start: list[tuple[int, list[int]]] = []
        self._advance: list[tuple[int, list[int]]] = []
        self._draft: list[tuple[int, list[int]]] = []
        self._end: list[int] = []

    @property
    def is_idle(self) -> bool:
        """True if it is compiled and no request uses it."""
        return self.compiled and not self.users

    @property
    def is_stale(self) -> bool:
        """True if it may be ending itself now, idle for too long."""
        return self.is_idle and time.monotonic() - self.idle_since > 0.8 * IDLE_SECONDS

    @property
    def is_slow(self) -> bool:
        """True if its masks take too long for a step to wait for them."""
        return self.compiles_slowly or self._patience > 0

    @property
    def step_seconds(self) -> float:
        """Expected CPU time of the next masks of all its sequences, which are computed one after the other."""
        return self._mask_seconds * len(self.sequences)

    def record_times(self, seconds: list[float]) -> None:
        """Note the CPU seconds of masks."""
        if seconds:
            self._patience = PATIENCE if max(seconds) > SLOW_MASK_SECONDS else max(0, self._patience - 1)
            self._mask_seconds = sum(seconds) / len(seconds)

    def take_compiled(self, message: dict[str, Any]) -> None:
        """Handle the news that it is compiled."""
        self.compiled = True
        self.record_times(message["seconds"])
        self.memory = message["memory"]
        if message["wakers"] is not None:
            self.wakers = frozenset(message["wakers"])

    def join(self, sequence: GrammarSequence, tokens: list[int]) -> None:
        """A sequence begins, with ``tokens`` of an earlier run."""
        self.sequences[sequence.slot] = sequence
        sequence.free = self.wakers is not None and self.wakers.isdisjoint(tokens)
        if not sequence.free:
            self.start(sequence, tokens)

    def start(self, sequence: GrammarSequence, tokens: list[int]) -> None:
        """The grammar is asked about a sequence from ``tokens`` on."""
        sequence.free = False
        sequence.num_followed = 0
        self._start.append((sequence.slot, tokens))
        sequence.num_pending += 1

    def advance(self, sequence: GrammarSequence, tokens: list[int]) -> None:
        """A sequence has new tokens."""
        self._advance.append((sequence.slot, tokens))
        sequence.num_pending += 1
        sequence.num_followed = 0

    def draft(self, sequence: GrammarSequence, tokens: list[int]) -> None:
        """Tokens are guessed for a sequence: the masks after each of them are wanted, too."""
        self._draft.append((sequence.slot, tokens))
        sequence.num_pending += 1

    def end(self, sequence: GrammarSequence) -> None:
        """A sequence has ended."""
        self._end.append(sequence.slot)

    def take_work(self) -> dict[str, Any]:
        """The message of what is not sent yet; its answer goes to `take_masks`."""
        work = {"start": self._start, "advance": self._advance, "draft": self._draft, "end": self._end}
        self._requested.append([self.sequences[slot] for slot, _ in (*self._start, *self._advance, *self._draft)])
        self._start, self._advance, self._draft, self._end = [], [], [], []
        return work

    def push(self) -> None:
        """Send what the socket takes."""
        assert self.socket is not None
        try:
            while self.unsent:
                del self.unsent[: self.socket.send(self.unsent)]
        except BlockingIOError:
            pass
        except ConnectionError:  # it has ended, which `receive` reports
            self.unsent.clear()

    def receive(self) -> tuple[list[Any], bool]:
        """The messages received, and whether it has ended."""
        assert self.socket is not None
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            return [], False
        except ConnectionError:
            data = b""
        *lines, self._received = (self._received + data).split(b"\n")
        return [json.loads(line) for line in lines], not data

    def take_masks(self, message: dict[str, Any]) -> list[GrammarSequence]:
        """Handle the answer to the oldest work message; returns the sequences whose masks have arrived."""
        self.memory = message["memory"]
        for slot, problem in message["errors"]:
            self.sequences[slot].problem = f"cannot go on: {problem}"
        for slot in message["free"]:
            self.sequences[slot].free = True
        for slot, num_followed in message["allowed"]:
            self.sequences[slot].num_followed = num_followed
        self.record_times(message["seconds"])
        arrived = self._requested.popleft()
        for sequence in arrived:
            sequence.num_pending -= 1
        return arrived


class GrammarSequence:
    """A running sequence and its slot among the masks."""

    def __init__(self, process: GrammarProcess, slot: int) -> None:
        self.process = process
        self.slot = slot
        self.num_pending = 0  # masks to come
        self.num_followed = 0  # of the guessed tokens: those whose masks have arrived
        self.problem: str | None = None
        self.removed = False
        self.free = False  # the grammar has said that it holds nothing of the text for now

    @property
    def is_free(self) -> bool:
        """True if no mask is asked for: the grammar holds nothing, and no answer of it is to come."""
        return self.free and not self.num_pending and self.problem is None

    def first_waker(self, tokens: list[int]) -> int:
        """The place among ``tokens`` of free text from which on the grammar is to be asked, or their number."""
        wakers = self.process.wakers or ()
        return next((at for at, token in enumerate(tokens) if token in wakers), len(tokens))

    @property
    def is_ready(self) -> bool:
        """True if its mask has arrived, or will not."""
        return not self.num_pending or self.problem is not None
