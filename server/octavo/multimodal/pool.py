"""Processes that turn images into features, so that no event loop waits for a decoder.

One thread for each process hands images over and waits. A process that ends, or that takes too long, is replaced; the
image that it had fails. Both what waits and what has been made of it and is still held are bounded.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import threading
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from queue import Empty, SimpleQueue
from typing import Any, Literal

from octavo.interface.memory_file import MemoryFile
from octavo.multimodal import handover
from octavo.multimodal.items import ImageFeatures
from octavo.multimodal.pieces import Pieces
from octavo.system import limits
from octavo.system.confined import confined_command
from octavo.system.environment import process_environment

logger = logging.getLogger(__name__)

Form = Literal["file", "url", "base64"]  # bytes of a file, a data: url, base64 alone

_SECONDS = 60.0  # for one image
_START_SECONDS = 60.0
_MOST_WAITING = 64  # images for each process
_MOST_PROCESSES = 8
_MEMORY = 3 << 30  # bytes that an image takes at most; one of the most pixels needs about two thirds of it
_SLICE = 1 << 20  # characters that are copied at once: copying stops all threads


class PoolFullError(Exception):
    """More images wait, or are held, than are taken."""


class PoolError(Exception):
    """Images cannot be processed, for a reason that lies not in the image."""


@dataclass(frozen=True)
class Checkpoint:
    """Information about the model for a process of the pool. ``hf_config`` is config.json."""

    model_path: str
    tokenizer_path: str
    hf_config: Mapping[str, Any]
    mm_processor_kwargs: Mapping[str, Any] | None = None


class _Process:
    """One of them, for one thread at a time."""

    def __init__(self, checkpoint: Checkpoint, memory: int) -> None:
        """``memory``: bytes that an image may take. Raises OSError, EOFError, and ValueError with what it says."""
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = confined_command("octavo.multimodal.pool_worker", str(theirs.fileno()))
            try:
                self._process = subprocess.Popen(
                    command, process_group=0, pass_fds=(theirs.fileno(),), env=process_environment()
                )
            except BaseException:
                self._socket.close()
                raise
        self._socket.settimeout(_START_SECONDS)
        try:
            self.ask(asdict(checkpoint) | {"memory": memory})
            self._socket.settimeout(_SECONDS)
        except BaseException:
            self.end()
            raise

    @property
    def has_ended(self) -> bool:
        """Return whether the process has ended."""
        return self._process.poll() is not None

    def ask(self, message: dict[str, Any], file: MemoryFile | None = None) -> tuple[dict[str, Any], MemoryFile | None]:
        """Its answer. Raises ValueError with what the process says against it, EOFError and OSError when it ends or
        takes too long."""
        handover.send(self._socket, message, file)
        answer, file = handover.receive(self._socket)
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer, file

    def end(self) -> None:
        """Kill it."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


class ImagePool:
    """Starts its processes with the first images, or one before. `close` ends them."""

    def __init__(self, checkpoint: Checkpoint, processes: int | None = None) -> None:
        """``processes``: by default half of the processors that this process may use, at least 1."""
        self.size = processes or max(1, min(_MOST_PROCESSES, limits.cpu_count() // 2))
        self.most_waiting = self.size * _MOST_WAITING
        memory = limits.memory_limit()
        self.most_bytes = memory // 4  # of features that are held
        self._memory = max(1 << 30, min(_MEMORY, memory // 2 // self.size))
        self._checkpoint = checkpoint
        self._threads = ThreadPoolExecutor(self.size, thread_name_prefix="images")
        self._idle: SimpleQueue[_Process] = SimpleQueue()
        self._all: set[_Process] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        self.num_waiting = 0  # and under way
        self.num_bytes = 0  # of features that are held

    def start(self) -> None:
        """Start a process for the first image. Raises PoolError."""
        self._idle.put(self._take())

    async def process(self, content: bytes | str | Pieces, form: Form) -> ImageFeatures:
        """The features of an image. Raises ValueError for one that cannot be used, PoolFullError at once where too many
        wait, PoolError where there is no process for it."""
        if self.num_waiting >= self.most_waiting:
            raise PoolFullError(f"queue of images full: {self.num_waiting} waiting, limit {self.most_waiting}")
        if self.num_bytes >= self.most_bytes:
            raise PoolFullError(
                f"images of requests under way take {self.num_bytes >> 20} MiB, limit {self.most_bytes >> 20}"
            )
        self.num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, content, form)
        finally:
            self.num_waiting -= 1

    def _run(self, content: bytes | str | Pieces, form: Form) -> ImageFeatures:
        try:
            file = MemoryFile.of(_pieces(content))
        except OSError as error:
            raise PoolError(f"images cannot be read now: there is no file in memory ({error.strerror})") from None
        try:
            return self._ask(self._take(), form, file)
        finally:
            file.close()  # an error would hold it until the next collection

    def _ask(self, process: _Process, form: Form, file: MemoryFile) -> ImageFeatures:
        try:
            answer, made = process.ask({"form": form}, file)
        except ValueError:
            self._idle.put(process)
            raise
        except (EOFError, OSError) as error:
            self._drop(process)
            logger.warning("a process for images was replaced: %s", error)
            raise ValueError(
                "image could not be processed: it took too long or too much memory; scale it down"
            ) from None
        self._idle.put(process)
        if made is None:  # the descriptor found no place
            raise PoolError("images cannot be read now: too many files are open")
        self._hold(made)
        return handover.unpacked(answer, made)

    def _hold(self, file: MemoryFile) -> None:
        """Count a file's bytes for as long as there is a reference to it."""
        self._count(file.size)
        weakref.finalize(file, self._count, -file.size).atexit = False

    def _count(self, size: int) -> None:
        with self._lock:
            self.num_bytes += size

    def _take(self) -> _Process:
        """One that is idle, or a new one."""
        while True:
            try:
                process = self._idle.get_nowait()
            except Empty:
                return self._start()
            if not process.has_ended:
                return process
            self._drop(process)

    def _start(self) -> _Process:
        try:
            process = _Process(self._checkpoint, self._memory)
        except (EOFError, OSError, ValueError) as error:
            raise PoolError(f"images cannot be read now: no process for them starts ({error})") from None
        with self._lock:
            self._all.add(process)
            closed = self._is_closed
        if closed:
            self._drop(process)
            raise PoolError("images cannot be read now: the server ends")
        return process

    def _drop(self, process: _Process) -> None:
        with self._lock:
            self._all.discard(process)
        process.end()

    def close(self) -> None:
        """End all processes; images under way fail."""
        with self._lock:
            self._is_closed, every = True, list(self._all)
        for process in every:
            self._drop(process)
        self._threads.shutdown(wait=False, cancel_futures=True)


def _pieces(content: bytes | str | Pieces) -> Iterator[bytes]:
    """The bytes of a file, or of a text."""
    if not isinstance(content, str):
        yield from content.pieces if isinstance(content, Pieces) else (content,)
        return
    for at in range(0, len(content), _SLICE):
        yield content[at : at + _SLICE].encode("ascii", "replace")
