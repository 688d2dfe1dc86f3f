"""One response that is made in the background: its outputs become events in the store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from msgspec import json

from octavo.entrypoints.errors import APIError
from octavo.entrypoints.generation.run import Generation
from octavo.entrypoints.responses.events import ResponseEvents
from octavo.entrypoints.responses.prepare import PreparedResponse
from octavo.entrypoints.responses.store import entry_of
from octavo.entrypoints.state import ServerState
from octavo.entrypoints.storage.runs import RunTables, Told
from octavo.entrypoints.storage.store import StoreError
from octavo.entrypoints.storage.tables import Entry
from octavo.entrypoints.transport.responses import to_api_error
from octavo.entrypoints.transport.sse import named_event

logger = logging.getLogger(__name__)

_FLUSH_SECONDS = 0.05  # between writes of events
_LONGEST_WAIT = 2.0  # seconds between attempts while the queue is full, or the store does not work
_HOPELESS = "too_many_sequences"  # code of a 429 that stays one
_LEFT = ("engine_dead", "not_alive", "loading", "draining", "aborted")  # codes of errors of a server that ends


class LostError(Exception):
    """The response was cancelled or deleted, or another server makes it."""


class Run:
    """Makes the response that ``events`` tell of, for the server ``owner``. ``on_events`` is called when new ones are
    stored."""

    def __init__(
        self,
        owner: str,
        prepared: PreparedResponse,
        events: ResponseEvents,
        on_events: Callable[[], None],
    ) -> None:
        self._state, self._owner, self._prepared, self._events = prepared.state, owner, prepared, events
        self._on_events = on_events
        self._first, self._pending = events.number, b""  # events that are not stored yet

    async def make(self) -> None:
        """Make the response, unless the server ends before. Raises LostError."""
        try:
            with await self._admitted() as generation:
                await generation.start()
                await self._follow(generation)
        except LostError:
            raise
        except Exception as problem:
            error = to_api_error(problem)
            if error.detail.code in _LEFT:
                logger.warning("response %s is left to the next server: %s", self._prepared.id, error)
                return
            self._pending += self._events.error(error)
            await self._store_end(self._set())

    async def _admitted(self) -> Generation:
        """The generation, once there is room in the queue. Raises APIError."""
        wait = 0.05
        while True:
            try:
                return self._prepared.generation()
            except APIError as error:
                if error.status != 429 or error.detail.code == _HOPELESS:
                    raise
            await asyncio.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT)

    async def _follow(self, generation: Generation) -> None:
        events = self._events
        events.response.status = "in_progress"
        self._pending += events.told("response.in_progress")
        await self._store(self._set())
        while not generation.finished:
            self._pending += events.write(await generation.next_output())
            if not generation.finished:
                await self._store()
                await asyncio.sleep(_FLUSH_SECONDS)  # the next output is all that comes meanwhile
        answer = events.complete()
        self._pending += events.last()
        turn, tag = answer.turn(), self._state.store_tag

        def write(tables: RunTables) -> None:
            turn.write(tables, tag)
            tables.end(self._prepared.id)

        await self._store_end(write)

    def _set(self) -> Callable[[RunTables], None]:
        """Return what stores the response as it is, without items of its output."""
        entry = entry_of(self._events.response, (), self._prepared.tenant)
        return lambda tables: tables.set(entry)

    async def _store_end(self, change: Callable[[RunTables], None]) -> None:
        """Store the end of the response as soon as the store works."""
        while True:
            try:
                return await self._write(change)
            except StoreError as error:
                logger.error("response %s is made but not stored yet: %s", self._prepared.id, error.why)
            await asyncio.sleep(_LONGEST_WAIT)

    async def _store(self, change: Callable[[RunTables], None] | None = None) -> None:
        """Store the events that are not stored yet; later if the store does not work now."""
        try:
            await self._write(change)
        except StoreError as error:
            logger.warning("events of response %s are not stored yet: %s", self._prepared.id, error.why)

    async def _write(self, change: Callable[[RunTables], None] | None) -> None:
        """Raises LostError, StoreError."""
        told = Told(self._first, self._events.number - self._first, self._pending)
        name, owner = self._prepared.id, self._owner
        if not await self._state.store.run(lambda tables: tables.advance(name, owner, told, change)):
            raise LostError
        self._first, self._pending = self._events.number, b""
        self._on_events()


def ended(entry: Entry, status: str, error: APIError | None = None) -> Entry:
    """The entry of a response that is not made: cancelled, or failed with an error."""
    body: dict[str, Any] = json.decode(entry.body)
    body["status"] = status
    if error is not None:
        body["error"] = {"message": error.detail.message, "code": "server_error"}
    return replace(entry, status=status, body=json.encode(body))


async def fail(state: ServerState, owner: str, entry: Entry, number: int, error: APIError) -> None:
    """Note that a response cannot be begun; ``number``: of its next event. Raises StoreError."""
    failed = ended(entry, "failed", error)
    kind = "response.failed"
    event = named_event(kind, {"type": kind, "response": json.decode(failed.body), "sequence_number": number})
    told = Told(number, 1, event)
    await state.store.run(lambda tables: tables.advance(entry.id, owner, told, lambda tables: tables.set(failed)))
    logger.warning("response %s failed: %s", entry.id, error)
