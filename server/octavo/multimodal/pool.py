"""Processes that turn images into features, so that no event loop waits for a decoder.

One thread for each process hands images over and waits. A process that ends, or that takes too long, is replaced; the
image that it had fails.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from queue import Empty, SimpleQueue
from typing import Any, Literal

from octavo.multimodal import handover
from octavo.multimodal.items import ImageFeatures
from octavo.system import limits

logger = logging.getLogger(__name__)

Form = Literal["file", "url", "base64"]  # bytes of a file, a data: url, base64 alone

_SECONDS = 60.0  # for one image
_MOST_WAITING = 64  # images for each process
_MOST_PROCESSES = 8


class PoolFullError(Exception):
    """More images wait than are taken."""


@dataclass(frozen=True)
class Checkpoint:
    """What a process needs to know of the model. ``hf_config`` is config.json."""

    model_path: str
    tokenizer_path: str
    hf_config: Mapping[str, Any]
    mm_processor_kwargs: Mapping[str, Any] | None = None


class _Process:
    """One of them, for one thread at a time."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "octavo.multimodal.pool_worker", str(theirs.fileno())]
            self._process = subprocess.Popen(command, process_group=0, pass_fds=(theirs.fileno(),))
        self._socket = ours
        ours.settimeout(_SECONDS)
        self.ask(asdict(checkpoint))

    def ask(self, message: dict[str, Any], content: bytes = b"") -> tuple[dict[str, Any], memoryview]:
        """Its answer. Raises ValueError with what the process says against it, EOFError and OSError when it ends or
        takes too long."""
        handover.send(self._socket, message, [content])
        answer, pixels = handover.receive(self._socket)
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer, pixels

    def end(self) -> None:
        """Kill it."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


class ImagePool:
    """Starts its processes with the first images. `close` ends them."""

    def __init__(self, checkpoint: Checkpoint, processes: int | None = None) -> None:
        """``processes``: by default half of the processors that this process may use, at least 1."""
        self.size = processes or max(1, min(_MOST_PROCESSES, limits.cpu_count() // 2))
        self.most_waiting = self.size * _MOST_WAITING
        self._checkpoint = checkpoint
        self._threads = ThreadPoolExecutor(self.size, thread_name_prefix="images")
        self._idle: SimpleQueue[_Process] = SimpleQueue()
        self._all: set[_Process] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        self.num_waiting = 0  # and under way

    async def process(self, content: bytes | str, form: Form) -> ImageFeatures:
        """The features of an image. Raises ValueError for one that cannot be used, PoolFullError at once where too many
        wait."""
        if self.num_waiting >= self.most_waiting:
            raise PoolFullError(f"queue of images full: {self.num_waiting} waiting, limit {self.most_waiting}")
        self.num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, content, form)
        finally:
            self.num_waiting -= 1

    def _run(self, content: bytes | str, form: Form) -> ImageFeatures:
        data = content if isinstance(content, bytes) else content.encode("ascii", "replace")
        try:
            process = self._idle.get_nowait()
        except Empty:
            process = self._start()
        try:
            features = handover.unpacked(*process.ask({"form": form}, data))
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
        return features

    def _start(self) -> _Process:
        try:
            process = _Process(self._checkpoint)
        except (EOFError, OSError) as error:
            raise RuntimeError(f"no process for images can be started: {error}") from None
        with self._lock:
            self._all.add(process)
            closed = self._is_closed
        if closed:
            self._drop(process)
            raise RuntimeError("the pool of images is closed")
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
