"""Starts, keeps and ends the processes that compile grammars and compute their masks, without blocking on any.

Used from the engine's thread alone. `GrammarPool.poll` receives what the processes send.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import socket
import subprocess
import time
from collections import deque
from concurrent.futures import Future
from typing import Any

import numpy as np

from octavo.interface.engine_config import ModelConfig
from octavo.system.confined import confined_command
from octavo.system.environment import process_environment
from octavo.worker.grammars.child import COMPILE_SECONDS, MASK_SECONDS, MEMORY_BYTES
from octavo.worker.grammars.process import GrammarProcess, GrammarSequence

MAX_PROCESSES = 64
MAX_BYTES = 1 << 30  # of all processes; one that compiles counts with its limit
MAX_IDLE = 4  # compiled grammars kept without a request,
MAX_IDLE_BYTES = 16 << 20  # each up to this size
MAX_COMPILING = 2  # at once, besides slow ones
MAX_COMPILING_SLOWLY = 4
START_SECONDS = 30.0  # limit for the program's first fork,
FORK_SECONDS = 4.0  # and for later ones
COMPILE_WALL_SECONDS = 4.0  # wall-clock limit, for machines with little CPU time

_MEGABYTES = MEMORY_BYTES >> 20
TOO_LARGE = (
    f"takes more than {COMPILE_SECONDS:g} s or {_MEGABYTES} MB to compile; simplify it (a large multipleOf, products "
    "of alternatives and counted repetitions inside each other cost most)"
)
NOT_STARTED = "cannot be compiled: the grammar process has ended or does not answer, see the log; try again"
TOO_MUCH = f"exceeds the memory of all grammars together, {MAX_BYTES >> 20} MB; try again, or simplify it"
TOO_SLOW = (
    f"took more than {MASK_SECONDS:g} s or {_MEGABYTES} MB to find the tokens that may follow; simplify it (long "
    "literals, counted repetitions inside each other and many ways to read one text cost most)"
)


class GrammarPool:
    """One process per grammar in use, forked from a program that has the vocabulary loaded."""

    def __init__(self, config: ModelConfig, max_num_seqs: int, num_drafts: int = 0) -> None:
        """``num_drafts``: most tokens that are guessed for a sequence in one step."""
        self._config = config
        # A sequence's slot is free again only when its last requested mask has arrived: so twice as many.
        num_slots, words = 2 * max_num_seqs, -(-config.vocab_size // 32)
        self._masks_fd = -1
        self._mask_shape = num_slots, 1 + num_drafts, words
        # [slots, 1 + drafts, words], shared with the processes; what is not used takes no memory
        self.masks = np.empty((0, 1 + num_drafts, words), dtype=np.int32)
        self.lets_be = True  # where a grammar holds nothing, it is not asked
        self.free_slots = deque(range(num_slots))  # first freed, first used
        self._program: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None  # receives new grammars
        self._has_forked = False  # the program that runs now
        self._processes: dict[str, GrammarProcess] = {}  # by grammar
        self._by_descriptor: dict[int, GrammarProcess] = {}
        self._users: dict[Future[None], GrammarProcess] = {}
        self._queue: deque[GrammarProcess] = deque()  # waiting to be started
        self._poll = select.poll()

    def prepare(self, grammar: str) -> Future[None]:
        """Compile a grammar unless it is compiled, and keep it until `release` is called with the future.

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
                self.send(process)  # cancels the end of an idle process
            future.set_result(None)
        else:
            process.waiting.append(future)
            self._start_more()
        return future

    def release(self, future: Future[None]) -> None:
        """Undo a `prepare`: an unused grammar is kept for a while, if it is small."""
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
        """The process of a prepared grammar; None when it has failed since."""
        process = self._processes.get(grammar)
        return process if process is not None and process.compiled else None

    def send(self, process: GrammarProcess) -> None:
        """Send a process the news of its sequences."""
        if process.socket is not None:
            self._write(process, process.take_work())

    def _write(self, process: GrammarProcess, message: Any) -> None:
        assert process.socket is not None
        process.unsent += json.dumps(message).encode() + b"\n"
        process.push()
        if process.unsent:  # the rest when the socket is writable
            self._poll.modify(process.socket, select.POLLIN | select.POLLOUT)

    def poll(self, seconds: float = 0.0) -> None:
        """Receive the processes' messages; waits up to ``seconds`` for the first."""
        if not self._by_descriptor:
            return
        for descriptor, event in self._poll.poll(seconds * 1e3):
            process = self._by_descriptor.get(descriptor)
            if process is None or process.socket is None:
                continue  # ended while handling another process's message
            if event & select.POLLOUT:
                process.push()
                if not process.unsent:
                    self._poll.modify(descriptor, select.POLLIN)
            if event & ~select.POLLOUT:
                self._receive(process)
        now = time.monotonic()
        for process in [p for p in self._by_descriptor.values() if not p.compiled]:
            if process.forked and now - process.started > COMPILE_WALL_SECONDS:
                self.fail(process, TOO_LARGE)
            elif not process.forked and now - process.started > (FORK_SECONDS if self._has_forked else START_SECONDS):
                self._end_program()  # it hangs or was stopped: the next grammar starts a new one
                self.fail(process, NOT_STARTED)
        self._start_more()

    def _receive(self, process: GrammarProcess) -> None:
        messages, ended = process.receive()
        for message in messages:
            if "started" in message:
                process.forked, process.started = True, time.monotonic()
                self._has_forked = True
            elif "compiles_slowly" in message:
                process.compiles_slowly = True
                slow = [p for p in self._by_descriptor.values() if p.compiles_slowly and not p.compiled]
                if len(slow) > MAX_COMPILING_SLOWLY:  # the oldest has had the most time
                    self.fail(slow[0], TOO_LARGE)
            elif "compiled" in message:
                if message["compiled"] is not None:
                    return self.fail(process, f"is not valid: {message['compiled']}")
                process.take_compiled(message)
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
            self.fail(process, TOO_SLOW if process.compiled else TOO_LARGE if process.forked else NOT_STARTED)
        return None

    def fail(self, process: GrammarProcess, problem: str) -> None:
        """End a process; its requests and sequences fail with ``problem``."""
        self._end(process)
        for future in process.waiting:
            future.set_exception(ValueError(problem))
        for sequence in list(process.sequences.values()):
            sequence.problem = sequence.problem or problem
            sequence.num_pending = 0
            self.forget(sequence)

    def forget(self, sequence: GrammarSequence) -> None:
        """Free a removed sequence's slot, unless a mask for it is still to come."""
        process = sequence.process
        idle = not sequence.num_pending or process.socket is None
        if sequence.removed and idle and sequence.slot in process.sequences:
            del process.sequences[sequence.slot]
            self.free_slots.append(sequence.slot)

    def _end(self, process: GrammarProcess) -> None:
        """Close its socket, which ends the process, whatever it is doing."""
        if self._processes.get(process.grammar) is process:
            del self._processes[process.grammar]
        if process.socket is not None:
            self._poll.unregister(process.socket)
            del self._by_descriptor[process.socket.fileno()]
            process.socket.close()
            process.socket = None
            for sequence in list(process.sequences.values()):
                self.forget(sequence)  # no mask is to come any more
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
        """Upper bound of the bytes that all processes use."""
        return sum(p.memory if p.compiled else MEMORY_BYTES for p in self._by_descriptor.values())

    def _start(self, process: GrammarProcess) -> None:
        process.socket, theirs = socket.socketpair()
        process.socket.setblocking(False)
        self._by_descriptor[process.socket.fileno()] = process
        self._poll.register(process.socket, select.POLLIN)
        process.started = time.monotonic()
        self._write(process, [process.grammar, self.lets_be])
        with theirs:
            if self._program is None or self._program.poll() is not None:
                self._start_program()
            assert self._control is not None
            socket.send_fds(self._control, [b"f"], [theirs.fileno()])

    def _start_program(self) -> None:
        if self._masks_fd < 0:
            slots, depths, words = self._mask_shape
            self._masks_fd = os.memfd_create("masks")
            os.ftruncate(self._masks_fd, slots * depths * words * 4)
            self.masks = np.frombuffer(mmap.mmap(self._masks_fd, 0), dtype=np.int32).reshape(self._mask_shape)
        self._control, theirs = socket.socketpair()
        with theirs:
            inherited = theirs.fileno(), self._masks_fd
            command = confined_command(
                "octavo.worker.grammars.child",
                *map(str, inherited),
                str(self._config.files.tokenizer_path),
                str(self._config.vocab_size),
                str(self._mask_shape[1] - 1),
            )
            # Own process group: Ctrl-C in a terminal must not reach it. One arena: the processes limit their memory.
            self._program = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=inherited,
                process_group=0,
                env={**process_environment(), "MALLOC_ARENA_MAX": "1"},
            )
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
