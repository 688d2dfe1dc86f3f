"""The processes in which grammars compile and make masks: started, kept and ended here, without waiting for any.

Belongs to the engine's thread. What a process says is taken in by `GrammarPool.poll`.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import socket
import subprocess
import sys
import time
from collections import deque
from concurrent.futures import Future
from typing import Any

import numpy as np

from octavo.interface.engine_config import ModelConfig
from octavo.worker.grammar_worker import COMPILE_SECONDS, IDLE_SECONDS, MASK_SECONDS, MEMORY_BYTES

MAX_PROCESSES = 64
MAX_BYTES = 1 << 30  # of all of them together; one that compiles counts as much as it may take
MAX_IDLE = 4  # grammars kept for requests to come,
MAX_IDLE_BYTES = 16 << 20  # of no more than that each
MAX_COMPILING = 2  # at once, not counting those that take long
MAX_COMPILING_SLOWLY = 4
START_SECONDS = 30.0  # that the program may need until it forks for the first time,
FORK_SECONDS = 4.0  # and later
COMPILE_WALL_SECONDS = 4.0  # on a machine that has little CPU time to give
SLOW_MASK_SECONDS = 0.01  # CPU time of a mask from which no step waits for a grammar's next ones,
PATIENCE = 16  # so many

_MEGABYTES = MEMORY_BYTES >> 20
TOO_LARGE = (
    f"takes more than {COMPILE_SECONDS:g} s or {_MEGABYTES} MB to compile; simplify it (a large multipleOf, products "
    "of alternatives and counted repetitions inside each other cost most)"
)
NOT_STARTED = "cannot be compiled: the program that does it has ended or does not answer, see the log; try again"
TOO_MUCH = f"took more memory than there is for all grammars together, {MAX_BYTES >> 20} MB; try again, or simplify it"
TOO_SLOW = (
    f"took more than {MASK_SECONDS:g} s or {_MEGABYTES} MB to find the tokens that may follow; simplify it (long "
    "literals, counted repetitions inside each other and many ways to read one text cost most)"
)


class GrammarPool:
    """A process for each grammar in use, and a program from which they are forked: it has the vocabulary ready."""

    def __init__(self, config: ModelConfig, max_num_seqs: int) -> None:
        self._config = config
        # A sequence's slot is free again once the last mask asked for has come: one that follows it needs another.
        num_slots, words = 2 * max_num_seqs, -(-config.vocab_size // 32)
        self._masks_fd = -1
        self._mask_shape = num_slots, words
        self.masks = np.empty((0, words), dtype=np.int32)  # [slots, words], shared with the processes
        self.free_slots = deque(range(num_slots))  # the one that was freed first is used first
        self._program: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None  # where it takes new grammars
        self._has_forked = False  # the program that runs now
        self._processes: dict[str, GrammarProcess] = {}  # by grammar
        self._by_descriptor: dict[int, GrammarProcess] = {}
        self._users: dict[Future[None], GrammarProcess] = {}
        self._queue: deque[GrammarProcess] = deque()  # waiting to be started
        self._poll = select.poll()

    def prepare(self, grammar: str) -> Future[None]:
        """Compile a grammar unless that has been done, and keep it until `release` is called with the future.

        `poll` completes the future; it carries a ValueError when the grammar cannot be used.
        """
        future: Future[None] = Future()
        process = self._processes.get(grammar)
        if process is not None and process.is_stale:
            self._end(process)
            process = None
        if process is None:
            process = self._processes[grammar] = GrammarProcess(grammar)
            self._queue.append(process)
        process.users += 1
        self._users[future] = process
        if process.compiled:
            if process.users == 1:
                self.send(process)  # it need not end itself any more
            future.set_result(None)
        else:
            process.waiting.append(future)
            self._start_more()
        return future

    def release(self, future: Future[None]) -> None:
        process = self._users.pop(future)
        process.users -= 1
        if process.users == 0 and self._processes.get(process.grammar) is process:
            if process.compiled and process.memory <= MAX_IDLE_BYTES:
                process.idle_since = time.monotonic()
                self.send(process)
                self._write(process, "idle")
                idle = sorted((p for p in self._processes.values() if p.is_idle), key=lambda p: p.idle_since)
                for surplus in idle[: max(0, len(idle) - MAX_IDLE)]:
                    self._end(surplus)
            else:
                self._end(process)
            self._start_more()

    def get(self, grammar: str) -> GrammarProcess | None:
        """The process of a grammar that has been prepared. None: it has failed since."""
        process = self._processes.get(grammar)
        return process if process is not None and process.compiled else None

    def send(self, process: GrammarProcess) -> None:
        """Tell a process what has happened to its sequences."""
        if process.socket is not None:
            self._write(process, process.take_work())

    def _write(self, process: GrammarProcess, message: Any) -> None:
        assert process.socket is not None
        process.unsent += json.dumps(message).encode() + b"\n"
        process.push()
        if process.unsent:  # the rest when it takes more
            self._poll.modify(process.socket, select.POLLIN | select.POLLOUT)

    def poll(self, seconds: float = 0.0) -> None:
        """Take in what the processes say; waits so long for the first word of any."""
        if not self._by_descriptor:
            return
        for descriptor, event in self._poll.poll(seconds * 1e3):
            process = self._by_descriptor.get(descriptor)
            if process is None or process.socket is None:
                continue  # it has been ended because of what another one said
            if event & select.POLLOUT:
                process.push()
                if not process.unsent:
                    self._poll.modify(descriptor, select.POLLIN)
            if event & ~select.POLLOUT:
                self._receive(process)
        now = time.monotonic()
        for process in [p for p in self._by_descriptor.values() if not p.compiled]:
            if process.heard and now - process.started > COMPILE_WALL_SECONDS:
                self.fail(process, TOO_LARGE)
            elif not process.heard and now - process.started > (FORK_SECONDS if self._has_forked else START_SECONDS):
                self._end_program()  # it hangs or has been stopped: the next grammar starts another one
                self.fail(process, NOT_STARTED)
        self._start_more()

    def _receive(self, process: GrammarProcess) -> None:
        messages, ended = process.receive()
        for message in messages:
            if "started" in message:
                process.heard, process.started = True, time.monotonic()
                self._has_forked = True
            elif "compiles_slowly" in message:
                process.compiles_slowly = True
                slow = [p for p in self._by_descriptor.values() if p.compiles_slowly and not p.compiled]
                if len(slow) > MAX_COMPILING_SLOWLY:  # the first of them has had the most time
                    self.fail(slow[0], TOO_LARGE)
            elif "compiled" in message:
                if message["compiled"] is not None:
                    return self.fail(process, f"is not valid: {message['compiled']}")
                process.compiled = True
                process.judge(message["seconds"])
                process.memory = message["memory"]
                for future in process.waiting:
                    future.set_result(None)
                process.waiting = []
            else:
                for sequence in process.take_masks(message):
                    self.forget(sequence)
                if sum(p.memory for p in self._by_descriptor.values()) > MAX_BYTES:
                    self.fail(max(self._by_descriptor.values(), key=lambda p: p.memory), TOO_MUCH)
                    if process.socket is None:
                        return None
        if ended:
            self.fail(process, TOO_SLOW if process.compiled else TOO_LARGE if process.heard else NOT_STARTED)
        return None

    def fail(self, process: GrammarProcess, problem: str) -> None:
        """End a process, and with it the hopes of those who use it."""
        self._end(process)
        for future in process.waiting:
            future.set_exception(ValueError(problem))
        for sequence in list(process.sequences.values()):
            sequence.problem = sequence.problem or problem
            sequence.num_pending = 0
            self.forget(sequence)

    def forget(self, sequence: GrammarSequence) -> None:
        """Free the slot of a sequence that has been removed, unless a mask for it is still to come."""
        process = sequence.process
        come = not sequence.num_pending or process.socket is None
        if sequence.removed and come and sequence.slot in process.sequences:
            del process.sequences[sequence.slot]
            self.free_slots.append(sequence.slot)

    def _end(self, process: GrammarProcess) -> None:
        """Closing its socket ends it, whatever it is at."""
        if self._processes.get(process.grammar) is process:
            del self._processes[process.grammar]
        if process.socket is not None:
            self._poll.unregister(process.socket)
            del self._by_descriptor[process.socket.fileno()]
            process.socket.close()
            process.socket = None
        elif process in self._queue:
            self._queue.remove(process)

    def _start_more(self) -> None:
        while self._queue:
            running = self._by_descriptor.values()
            if sum(not p.compiled and not p.compiles_slowly for p in running) >= MAX_COMPILING:
                return
            while len(running) >= MAX_PROCESSES or self._memory() + MEMORY_BYTES > MAX_BYTES:
                idle = [p for p in running if p.is_idle]
                if not idle:
                    return
                self._end(min(idle, key=lambda p: p.idle_since))
            process = self._queue.popleft()
            try:
                self._start(process)
            except OSError as error:
                self.fail(process, f"cannot be compiled: no process can be started ({error})")

    def _memory(self) -> int:
        """Bytes that all processes take, at most."""
        return sum(p.memory if p.compiled else MEMORY_BYTES for p in self._by_descriptor.values())

    def _start(self, process: GrammarProcess) -> None:
        process.socket, theirs = socket.socketpair()
        process.socket.setblocking(False)
        self._by_descriptor[process.socket.fileno()] = process
        self._poll.register(process.socket, select.POLLIN)
        process.started = time.monotonic()
        self._write(process, process.grammar)
        with theirs:
            if self._program is None or self._program.poll() is not None:
                self._start_program()
            assert self._control is not None
            socket.send_fds(self._control, [b"f"], [theirs.fileno()])

    def _start_program(self) -> None:
        if self._masks_fd < 0:
            slots, words = self._mask_shape
            self._masks_fd = os.memfd_create("masks")
            os.ftruncate(self._masks_fd, slots * words * 4)
            self.masks = np.frombuffer(mmap.mmap(self._masks_fd, 0), dtype=np.int32).reshape(self._mask_shape)
        self._control, theirs = socket.socketpair()
        with theirs:
            inherited = theirs.fileno(), self._masks_fd
            command = [
                sys.executable, "-m", "octavo.worker.grammar_worker", *map(str, inherited),
                str(self._config.files.tokenizer_path), str(self._config.vocab_size),
            ]  # fmt: skip
            # A group of its own: Ctrl-C in a terminal is not for it. One arena: processes that limit their memory.
            self._program = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=inherited, process_group=0,
                env={**os.environ, "MALLOC_ARENA_MAX": "1"},
            )  # fmt: skip
        self._has_forked = False

    def _end_program(self) -> None:
        if self._program is not None and self._control is not None:
            self._control.close()
            self._program.kill()
            self._program.wait()
            self._program = self._control = None

    def __del__(self) -> None:
        for process in list(self._processes.values()):
            self._end(process)
        if self._masks_fd >= 0:
            os.close(self._masks_fd)
        self._end_program()


class GrammarProcess:
    """What the engine knows of one grammar's process."""

    def __init__(self, grammar: str) -> None:
        self.grammar = grammar
        self.users = 0  # unfinished requests
        self.waiting: list[Future[None]] = []  # for the end of compiling
        self.socket: socket.socket | None = None  # while it runs
        self.started = self.idle_since = 0.0  # time.monotonic()
        self.memory = 0  # bytes beyond the vocabulary's
        self.heard = self.compiled = self.compiles_slowly = False
        self.sequences: dict[int, GrammarSequence] = {}  # by slot
        self.unsent = bytearray()
        self._received = b""
        self._patience = 0
        self._mask_seconds = 0.0  # CPU time of a mask, of late
        self._at_work: deque[list[GrammarSequence]] = deque()  # whose masks are to come
        # What it has not been told yet.
        self._start: list[tuple[int, list[int]]] = []
        self._advance: list[tuple[int, int]] = []
        self._end: list[int] = []

    @property
    def is_idle(self) -> bool:
        return self.compiled and not self.users

    @property
    def is_stale(self) -> bool:
        """Whether it may be ending itself just now."""
        return self.is_idle and time.monotonic() - self.idle_since > 0.8 * IDLE_SECONDS

    @property
    def is_slow(self) -> bool:
        """Whether its masks come too late for a step to wait for them."""
        return self.compiles_slowly or self._patience > 0

    @property
    def step_seconds(self) -> float:
        """CPU time that the next masks of all its sequences will probably take: they are made one after the other."""
        return self._mask_seconds * len(self.sequences)

    def judge(self, seconds: list[float]) -> None:
        """Take in how long masks took."""
        if seconds:
            self._patience = PATIENCE if max(seconds) > SLOW_MASK_SECONDS else max(0, self._patience - 1)
            self._mask_seconds = sum(seconds) / len(seconds)

    def start(self, sequence: GrammarSequence, tokens: list[int]) -> None:
        self.sequences[sequence.slot] = sequence
        self._start.append((sequence.slot, tokens))
        sequence.num_pending += 1

    def advance(self, sequence: GrammarSequence, token: int) -> None:
        self._advance.append((sequence.slot, token))
        sequence.num_pending += 1

    def end(self, sequence: GrammarSequence) -> None:
        self._end.append(sequence.slot)

    def take_work(self) -> dict[str, Any]:
        """What it has to be told; its answer will be `take_masks`'s."""
        work = {"start": self._start, "advance": self._advance, "end": self._end}
        self._at_work.append([self.sequences[slot] for slot, _ in (*self._start, *self._advance)])
        self._start, self._advance, self._end = [], [], []
        return work

    def push(self) -> None:
        assert self.socket is not None
        try:
            while self.unsent:
                del self.unsent[: self.socket.send(self.unsent)]
        except BlockingIOError:
            pass
        except ConnectionError:  # it has ended, as `receive` will say
            self.unsent.clear()

    def receive(self) -> tuple[list[Any], bool]:
        """What it has said, and whether it has ended."""
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
        """The sequences whose masks have come."""
        self.memory = message["memory"]
        for slot, problem in message["errors"]:
            self.sequences[slot].problem = f"cannot go on: {problem}"
        self.judge(message["seconds"])
        come = self._at_work.popleft()
        for sequence in come:
            sequence.num_pending -= 1
        return come


class GrammarSequence:
    """A running sequence and its place among the masks."""

    def __init__(self, process: GrammarProcess, slot: int) -> None:
        self.process = process
        self.slot = slot
        self.num_pending = 0  # masks to come
        self.problem: str | None = None
        self.removed = False

    @property
    def is_ready(self) -> bool:
        return not self.num_pending or self.problem is not None
