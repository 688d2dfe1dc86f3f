"""The process of a grammar: compiles it and computes masks, isolated so that it can be limited and killed.

    octavo.worker.grammars.child CONTROL MASKS TOKENIZER VOCABULARY DRAFTS   (confined, by octavo.worker.grammars.pool)

This program loads the model's vocabulary for llguidance once and forks a process for every grammar that arrives: a
byte on the inherited socket CONTROL, with the socket on which the new process talks. There, lines of JSON: first the
grammar, answered by its error or null and where it is asked; then what happened to its sequences, answered when the
masks of those are in the shared memory MASKS: of each slot one, and up to DRAFTS of what may follow guessed tokens. The
kernel ends a process that takes too much memory or CPU time; all end with their sockets.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import re
import resource
import select
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.worker.grammars.free_text import LONGEST_MARK, FreeText, Spelling

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

COMPILE_SECONDS = 1.5  # CPU time, with the first mask
MASK_SECONDS = 0.3  # CPU time of one mask
MEMORY_BYTES = 256 << 20  # besides the vocabulary
DRAFT_SECONDS = 0.01  # CPU time after which no further guessed token is looked at
QUICK_SECONDS = 0.1  # CPU time of compiling after which a grammar continues at a lower priority
NICE = 7
IDLE_SECONDS = 10.0  # that an unused grammar is kept


class Grammar:
    """One grammar, in its own process."""

    def __init__(
        self, sock: socket.socket, masks: mmap.mmap, mask_bytes: int, num_drafts: int, spelling: Spelling
    ) -> None:
        self._socket = sock
        self._spelling = spelling
        self._free_text: FreeText | None = None
        self._woken: dict[int, list[int] | None] = {}  # by slot, the tokens since it is asked; None: a mark is there
        self._masks = memoryview(masks)
        self._mask_bytes = mask_bytes
        self._masks_per_slot = 1 + num_drafts
        self._first_mask = bytearray(mask_bytes)
        self._matchers: dict[int, LLMatcher] = {}  # by slot
        self._compiling = True
        self._idle_since: float | None = None
        self._memory = _Memory()
        self._memory_before = self._memory.in_use()

    def serve(self, tokenizer: LLTokenizer) -> None:
        """Serve until the other end is closed."""
        self._send({"started": True})
        threading.stack_size(256 << 10)
        threading.Thread(target=self._watch, daemon=True).start()
        lines = self._socket.makefile("rb")
        root = self._compile(tokenizer, *json.loads(lines.readline()))
        if root is None:
            return
        for line in lines:
            self._idle_since = None
            work = json.loads(line)
            if work == "idle":
                self._idle_since = time.monotonic()
            else:
                self._send(self._work(root, **work))

    def _compile(self, tokenizer: LLTokenizer, grammar: str, lets_be: bool) -> LLMatcher | None:
        from llguidance import LLMatcher

        signal.setitimer(signal.ITIMER_PROF, COMPILE_SECONDS)  # kills this process
        root = LLMatcher(tokenizer, grammar, log_level=0)
        if lets_be and grammar.startswith("{") and (free := json.loads(grammar).get("free")):
            self._free_text = FreeText(**free, spelling=self._spelling)
        began = time.process_time()
        if not root.is_error():
            self._fill(root, self._first_mask)  # also builds what its beginning needs
        seconds = time.process_time() - began
        signal.setitimer(signal.ITIMER_PROF, 0)
        self._compiling = False
        if root.is_error():
            self._send({"compiled": _error_of(root), "seconds": [seconds]})
            return None
        if self._free_text is not None and not self._free_text.allow(self._first_mask):
            self._free_text = None
        wakers = None if self._free_text is None else sorted(self._free_text.wakers)
        self._send({"compiled": None, "seconds": [seconds], "memory": self._memory_taken(), "wakers": wakers})
        return root

    def _memory_taken(self) -> int:
        return self._memory.in_use() - self._memory_before

    def _work(
        self, root: LLMatcher, start: list[Any], advance: list[Any], draft: list[Any], end: list[int]
    ) -> dict[str, Any]:
        """``start``: (slot, tokens so far) of new sequences; ``advance``: (slot, new tokens); ``draft``: (slot, guessed
        tokens). Fills the masks of all."""
        for slot in (*end, *(slot for slot, _ in start)):
            self._matchers.pop(slot, None)
            self._woken.pop(slot, None)
        seconds, errors, free = [], [], []  # CPU time of each mask that is not the first
        for slot, tokens in (*start, *advance):
            began = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, MASK_SECONDS + 0.005 * len(tokens))
            if slot not in self._matchers:
                if self._free_text is not None and tokens and not (tokens := self._free_text.since_woken(tokens)):
                    free.append(slot)
                    self._mask(slot)[:] = self._first_mask  # which is waited for
                    continue
                self._matchers[slot] = root.deep_copy()
            matcher = self._matchers[slot]
            for token in tokens:
                if not matcher.is_stopped():  # tokens after its end change nothing
                    matcher.consume_token(token)
            mask = self._mask(slot)
            if not tokens:
                mask[:] = self._first_mask
            elif not matcher.is_error():
                self._fill(matcher, mask)
            if matcher.is_error():
                errors.append((slot, _error_of(matcher)))
            elif self._is_free(slot, tokens):
                del self._matchers[slot]
                free.append(slot)
            if tokens:
                seconds.append(round(time.process_time() - began, 6))
        allowed = [(slot, self._follow(root, slot, tokens, seconds)) for slot, tokens in draft]
        signal.setitimer(signal.ITIMER_PROF, 0)
        memory = self._memory_taken()
        return {"errors": errors, "seconds": seconds, "free": free, "allowed": allowed, "memory": memory}

    def _is_free(self, slot: int, tokens: list[int]) -> bool:
        """True if the grammar, which has seen these tokens more, holds nothing of what follows for now."""
        if self._free_text is None or not tokens:
            return False
        woken = self._woken.setdefault(slot, [])
        if woken is None:
            return False
        woken += tokens
        if self._free_text.is_free(woken):
            del self._woken[slot]
            return True
        if len(woken) > LONGEST_MARK:
            self._woken[slot] = None
        return False

    def _follow(self, root: LLMatcher, slot: int, tokens: list[int], seconds: list[float]) -> int:
        """Fill the masks after each guessed token, as far as these are allowed and quick, and go back. Returns how many
        tokens were followed."""
        matcher = self._matchers.get(slot) or root.deep_copy()  # none: the text was found free meanwhile
        if matcher.is_error():
            return 0
        began, num_followed = time.process_time(), 0
        for token in tokens[: self._masks_per_slot - 1]:
            if matcher.is_stopped() or not self._mask(slot, num_followed)[token >> 3] >> (token & 7) & 1:
                break
            signal.setitimer(signal.ITIMER_PROF, MASK_SECONDS)
            if not matcher.consume_token(token):
                break
            if not matcher.is_stopped():
                self._fill(matcher, self._mask(slot, num_followed + 1))
            if matcher.is_error() or matcher.is_stopped():
                matcher.rollback(1)
                break
            num_followed += 1
            if time.process_time() - began > DRAFT_SECONDS:
                break
        if num_followed:
            matcher.rollback(num_followed)
            seconds.append(round((time.process_time() - began) / num_followed, 6))
        return num_followed

    def _mask(self, slot: int, depth: int = 0) -> memoryview:
        start = (slot * self._masks_per_slot + depth) * self._mask_bytes
        return self._masks[start : start + self._mask_bytes]

    def _fill(self, matcher: LLMatcher, mask: bytearray | memoryview) -> None:
        matcher.unsafe_compute_mask_ptr(ctypes.addressof(ctypes.c_char.from_buffer(mask)), self._mask_bytes)

    def _send(self, message: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _watch(self) -> None:
        """A thread: ends the process with the socket, whatever it is doing, and reports slow compiling."""
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        quick = True
        while not poll.poll(20 if self._compiling else 1000):
            if quick and self._compiling and time.process_time() > QUICK_SECONDS:
                quick = False
                os.setpriority(os.PRIO_PROCESS, os.getpid(), NICE)
                self._send({"compiles_slowly": True})
            idle_since = self._idle_since
            if idle_since is not None and time.monotonic() - idle_since > IDLE_SECONDS:
                break
        os._exit(0)


def _error_of(matcher: LLMatcher) -> str:
    """llguidance's message, without its parser state, which contains the sequence's text, and in our words."""
    said = " ".join(matcher.get_error().partition("<state>")[0].split())
    for theirs, ours in _IN_OUR_WORDS:
        said = theirs.sub(ours, said)
    return said[:500]


_IN_OUR_WORDS = [
    (re.compile(theirs), ours)
    for theirs, ours in (
        (
            r"oneOf constraints are not supported.*",
            "oneOf cannot be enforced by a grammar where two of its schemas may "
            "hold at once; use anyOf, or drop strict",
        ),
        (r"^Unsatisfiable schema: Regex is empty.*", "no text matches its pattern, format and lengths at once"),
        (r"^Unsatisfiable schema: anyOf is empty", "no value is allowed: an enum, type or anyOf is empty"),
        (r"^Unsatisfiable schema: ", "no value is allowed: "),
        (r" while processing json-schema://\S*", ""),
        (
            r"^patternProperty regexes (.*) are not disjoint",
            r"patternProperties \1 may match one name, which a grammar "
            "cannot enforce",
        ),
        (r"^Parser Error: ", ""),
        (r"^NoExtension(Bias)?$", "no value is allowed: it refers to itself without an end"),
        (
            r"(lookarounds not supported yet; \w+|look-around, including .*, is not supported)( in regex)?",
            "an assertion (look-around, word boundary or anchor inside) cannot be enforced by a grammar",
        ),
    )
]


class _Memory:
    """Tells a process its memory: often, and opening a file would take more time than a mask."""

    def __init__(self) -> None:
        self._statm = os.open("/proc/self/statm", os.O_RDONLY)
        self._page = resource.getpagesize()

    def in_use(self) -> int:
        """Bytes of anonymous memory in use."""
        _, resident, shared, *_ = map(int, os.pread(self._statm, 128, 0).split())
        return (resident - shared) * self._page


def _limit_memory() -> None:
    """Limit this process's memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main(control_fd: int, masks_fd: int, folder: str, vocab_size: int, num_drafts: int) -> None:
    """Load the vocabulary and fork a process for each grammar that arrives on ``control_fd``."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies: the processes are not waited for
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    control = socket.socket(fileno=control_fd)
    masks = mmap.mmap(masks_fd, 0)
    mask_bytes = -(-vocab_size // 32) * 4
    problem, spelling = None, Spelling([])
    try:
        from octavo.worker.grammars.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(Path(folder), vocab_size)
        spelling = Spelling(tokenizer.decode_bytes([number]) for number in range(vocab_size))
    except Exception as error:
        problem = str(error)
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        sock = socket.socket(fileno=descriptors[0])
        if problem is not None:
            with sock:
                sock.sendall(json.dumps({"compiled": problem}).encode() + b"\n")
        elif os.fork() == 0:
            try:
                control.close()
                os.dup2(0, 2)  # /dev/null: a library's dying message may contain user text
                _limit_memory()
                Grammar(sock, masks, mask_bytes, num_drafts, spelling).serve(tokenizer)
            finally:
                os._exit(0)
        else:
            sock.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
