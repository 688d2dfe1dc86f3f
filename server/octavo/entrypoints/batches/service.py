"""Batches of a running server: one after the other, beside the requests of its clients."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.entrypoints.batches.answers import BatchAnswer, BatchError, BatchErrors, FileAnswer, RequestCounts
from octavo.entrypoints.batches.lines import Limits, Line, read_lines, split_lines
from octavo.entrypoints.batches.runner import StoppedError, answer_lines, client_of, limits_of
from octavo.entrypoints.batches.store import MAX_FILE_BYTES, FileStore
from octavo.entrypoints.bodies import Bodies
from octavo.entrypoints.errors import APIError, bad_request
from octavo.entrypoints.replica import elsewhere, new_id

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from octavo.entrypoints.state import ServerState

logger = logging.getLogger(__name__)

MAX_LINES = 50_000  # as OpenAI's
MAX_BATCHES = 1_000
MAX_UPLOAD_BYTES = MAX_FILE_BYTES + (1 << 20)  # with the form around the file
_PIECE = 1 << 16  # bytes of a line that are looked at to count it
WINDOW = 24 * 3600  # seconds that a batch may take
OVER = ("completed", "failed", "expired", "cancelled")


class BatchService:
    """Files and batches of one server. ``clock`` gives seconds since the epoch."""

    def __init__(self, app: ASGIApp, state: ServerState, clock: Callable[[], float] = time.time) -> None:
        self._app, self._state, self._clock = app, state, clock
        self.files = FileStore(clock, state.replica_tag)
        # Apart from other bodies: files that arrive slowly leave those their room.
        self.uploads = Bodies(max(MAX_UPLOAD_BYTES, state.bodies.limit // 2))
        self._batches: dict[str, BatchAnswer] = {}
        self._waiting: list[BatchAnswer] = []
        self._worker: asyncio.Task[None] | None = None
        # Half of what runs at once: clients that wait for an answer find room.
        self._width = max(1, state.engine.config.scheduler.max_num_seqs // 2)

    def create(self, input_file_id: str, endpoint: str, metadata: dict[str, Any] | None) -> BatchAnswer:
        """A new batch, which begins when those before it are over. Raises APIError."""
        source = self.files.get(input_file_id, "input_file_id")
        if source.purpose != "batch":
            raise bad_request(f"input_file_id must be a file of purpose batch, got {source.purpose}", "input_file_id")
        if len(self._batches) >= MAX_BATCHES:
            done = next((batch.id for batch in self._batches.values() if batch.status in OVER), None)
            if done is None:
                raise APIError(429, f"{MAX_BATCHES} batches wait already; retry later", headers={"retry-after": "60"})
            self._forget(done)
        now = int(self._clock())
        batch = BatchAnswer(
            id=new_id("batch_", self._state.replica_tag),
            endpoint=endpoint,
            input_file_id=source.id,
            completion_window="24h",
            created_at=now,
            expires_at=now + WINDOW,
            request_counts=RequestCounts(),
            metadata=metadata,
            model=self._state.model_name,
        )
        self._batches[batch.id] = batch
        self._waiting.append(batch)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return batch

    def _forget(self, batch_id: str) -> None:
        """Delete a batch with its answers: nobody would count them any more."""
        batch = self._batches.pop(batch_id)
        for file_id in (batch.output_file_id, batch.error_file_id):
            if file_id is not None:
                self.files.delete(file_id)

    def get(self, batch_id: str) -> BatchAnswer:
        """Raises a 404."""
        if batch_id not in self._batches:
            why = elsewhere(batch_id, self._state.replica_tag) or "it was not made here, or made room for others"
            raise APIError(404, f"there is no batch {batch_id[:100]!r}: {why}", param="batch_id")
        return self._batches[batch_id]

    def listed(self) -> list[BatchAnswer]:
        """All, newest first."""
        return list(self._batches.values())[::-1]

    def cancel(self, batch_id: str) -> BatchAnswer:
        """Stop a batch: requests under way are answered, the others are not sent. Raises APIError."""
        batch = self.get(batch_id)
        if batch.status in OVER:
            raise APIError(409, f"batch {batch.id} is {batch.status} already", param="batch_id")
        if batch in self._waiting:
            self._waiting.remove(batch)
            batch.cancelling_at = batch.cancelled_at = int(self._clock())
            batch.status = "cancelled"
        elif batch.status != "cancelling":
            batch.status, batch.cancelling_at = "cancelling", int(self._clock())
        return batch

    def check_unused(self, file_id: str) -> None:
        """Raises a 409 for a file of a batch that is not over."""
        for batch in self._batches.values():
            if batch.status not in OVER and file_id in (
                batch.input_file_id,
                batch.output_file_id,
                batch.error_file_id,
            ):
                raise APIError(409, f"the file belongs to {batch.id}, which is {batch.status}; cancel that first")

    async def close(self) -> None:
        """Stop, and delete all files."""
        if self._worker is not None:
            self._worker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._worker
        self.files.close()

    async def _work(self) -> None:
        while self._waiting:
            batch = self._waiting.pop(0)
            try:
                await self._run(batch)
            except* StoppedError as stopped:
                self._fail(batch, "server_stopped", str(stopped.exceptions[0]))
            except* APIError as errors:
                self._fail(batch, "storage", str(errors.exceptions[0]))
            except* Exception:
                logger.exception("batch %s failed", batch.id)
                self._fail(batch, "server_error", "Internal server error; see the server's log")

    def _fail(self, batch: BatchAnswer, code: str, message: str) -> None:
        batch.status, batch.failed_at = "failed", int(self._clock())
        batch.errors = BatchErrors([BatchError(code, message)])

    async def _run(self, batch: BatchAnswer) -> None:
        path = self.files.path(self.files.get(batch.input_file_id))
        batch.request_counts.total = total = await asyncio.to_thread(_count, path)
        if not 0 < total <= MAX_LINES:
            has = "more" if total else "none"
            self._fail(batch, "invalid_file", f"a batch takes 1 to {MAX_LINES} lines, and the file has {has}")
            return
        lines = _lines(path, limits_of(self._state), batch.endpoint)
        batch.in_progress_at = int(self._clock())
        if batch.status == "validating":
            batch.status = "in_progress"
        outputs = _Outputs(self.files, batch)
        async with client_of(self._app, self._state) as client:
            await answer_lines(client, self._wanted(batch, lines), self._width, outputs.write)
        batch.finalizing_at = now = int(self._clock())
        if batch.status == "cancelling":
            batch.status, batch.cancelled_at = "cancelled", now
        elif self._clock() >= batch.expires_at:
            batch.status, batch.expired_at = "expired", now
        else:
            batch.status, batch.completed_at = "completed", now

    def _wanted(self, batch: BatchAnswer, lines: Iterator[Line]) -> Iterator[Line]:
        """The lines, until the batch is cancelled; from when it expires on that is their problem."""
        for line in lines:
            if batch.status == "cancelling":
                return
            if self._clock() >= batch.expires_at:
                message = "the batch's completion_window ended before this request was sent"
                line = replace(line, problem=message, code="batch_expired")
            yield line


class _Outputs:
    """The files that answers and errors of a batch go to, made when there is something in them."""

    def __init__(self, files: FileStore, batch: BatchAnswer) -> None:
        self._files, self._batch = files, batch
        self._made: dict[bool, FileAnswer] = {}

    def write(self, line: Line, output: bytes, succeeded: bool) -> None:
        """Append a line. Raises APIError where there is no room."""
        batch = self._batch
        if succeeded not in self._made:
            kind = "output" if succeeded else "error"
            made = self._made[succeeded] = self._files.open_output(f"{batch.id}_{kind}.jsonl", "batch_output")
            setattr(batch, f"{kind}_file_id", made.id)
        self._files.append(self._made[succeeded], output)
        batch.request_counts.completed += succeeded
        batch.request_counts.failed += not succeeded


def _count(path: Path) -> int:
    """Lines that are not empty; something above MAX_LINES where there are too many, of empty ones twice as many."""
    total = 0
    with open(path, "rb") as file:
        for number, raw in enumerate(split_lines(file, _PIECE), 1):
            total += bool(raw.strip())
            if total > MAX_LINES or number > 2 * MAX_LINES:
                return number
    return total


def _lines(path: Path, limits: Limits, endpoint: str) -> Iterator[Line]:
    with open(path, "rb") as file:
        yield from read_lines(file, limits, endpoint)
