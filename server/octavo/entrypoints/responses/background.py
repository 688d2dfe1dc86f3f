"""Responses that are made in the background: they go on without their client, and after a restart of the server.

The store holds their state and their events, so that every server with the same store can tell of them. A response that
its server left, however it ended, is begun anew by the next one: with events that begin again, under higher numbers.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from octavo.entrypoints.admission import check_model
from octavo.entrypoints.dialect import CheckedRequest
from octavo.entrypoints.errors import APIError, bad_request
from octavo.entrypoints.generation.stream import EVENT_STREAM, SILENT_SECONDS
from octavo.entrypoints.responses.events import ResponseEvents
from octavo.entrypoints.responses.prepare import PreparedResponse, prepare
from octavo.entrypoints.responses.protocol import ResponsesRequest
from octavo.entrypoints.responses.run import LostError, Run, ended, fail
from octavo.entrypoints.responses.store import entry_of
from octavo.entrypoints.state import ServerState
from octavo.entrypoints.storage.runs import RUNNING, ClaimedRun, NewRun, RunTables, Told
from octavo.entrypoints.storage.store import StoreError
from octavo.entrypoints.storage.tables import Entry, tenant_of
from octavo.entrypoints.tenants import act_for
from octavo.entrypoints.transport.responses import JSON, to_api_error
from octavo.entrypoints.transport.sse import COMMENT, named_event

logger = logging.getLogger(__name__)

MAX_RUNS = 1_000  # of one server, queued ones too
MAX_ATTEMPTS = 3  # a response with which servers end is not tried for ever
_TEND_SECONDS = 5.0  # between renewals of leases; three fit into one
_LOOK_SECONDS = 0.25  # between looks at a response that another server makes


class Background:
    """The responses that one server makes in the background."""

    def __init__(self, state: ServerState) -> None:
        self._state, self._owner = state, uuid.uuid4().hex
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._news: dict[str, asyncio.Event] = {}  # by response: set, and replaced, when there are new events
        # Half of what runs at once: clients that wait for an answer find room.
        self._room = asyncio.Semaphore(max(1, state.engine.config.scheduler.max_num_seqs // 2))
        self._tending: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Go on with what servers before this one have left, now and whenever one ends."""
        self._tending = asyncio.create_task(self._tend())

    async def close(self) -> None:
        """Stop. What is under way is left to whoever comes next."""
        if self._tending is None:
            return
        tasks = [self._tending, *self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        with suppress(StoreError):
            await self._state.store.run(lambda tables: tables.release(self._owner))

    async def accept(self, prepared: PreparedResponse) -> Response:
        """Store a response that is to be made, and begin. Returns it, or the stream of its events. Raises APIError."""
        if self._tending is None:
            raise bad_request("background needs a server that goes on running; drop it here", "background")
        if len(self._tasks) >= MAX_RUNS:
            message = f"{MAX_RUNS} responses wait in the background already; retry later"
            raise APIError(429, message, headers={"retry-after": "60"})
        events, told = _queued(prepared, 0)
        request = prepared.body.model_dump_json(exclude_unset=True, by_alias=True).encode()
        entry = entry_of(events.response, prepared.items, prepared.tenant)
        run = NewRun(entry, self._owner, prepared.answering_name, request)
        await self._state.store.run(lambda tables: tables.begin(run, told))
        self._start(prepared.id, self._make(prepared, events))
        return self.stream(prepared.id, -1) if prepared.body.stream else JSON(events.response)

    async def cancel(self, response_id: str) -> Entry | None:
        """End a response that runs, here or elsewhere; one that does not stays as it is. Returns what is stored then.
        Raises StoreError."""
        stop = partial(ended, status="cancelled")
        left = await self._state.store.run(lambda tables: tables.stop(response_id, stop))
        if (task := self._tasks.get(response_id)) is not None:
            task.cancel()
        return left

    def stream(self, response_id: str, after: int) -> Response:
        """The events of a response behind that of number ``after``, as they come."""
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        return StreamingResponse(self._events(response_id, after), headers=headers, media_type=EVENT_STREAM)

    async def _events(self, response_id: str, after: int) -> AsyncIterator[bytes]:
        spoke = time.monotonic()
        while True:
            news = self._news.get(response_id)
            try:
                rows, status = await self._state.store.run(partial(_next_events, response_id, after))
            except StoreError as error:
                detail = error.detail
                yield named_event("error", {"type": "error", "code": detail.code, "message": detail.message})
                return
            for first, body in rows:
                events = body.split(b"\n\n")[:-1]
                spoke = time.monotonic()
                yield b"".join(event + b"\n\n" for event in events[max(0, after + 1 - first) :])
                after = first + len(events) - 1
            if not rows and status not in RUNNING:
                return
            if not rows:
                with suppress(TimeoutError):
                    await asyncio.wait_for(news.wait() if news else asyncio.sleep(60), _LOOK_SECONDS)
            if time.monotonic() > spoke + SILENT_SECONDS:
                spoke = time.monotonic()
                yield COMMENT

    def _start(self, response_id: str, work: Coroutine[Any, Any, None]) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            del self._tasks[response_id]
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.error("response %s is left", response_id, exc_info=error)

        self._tasks[response_id] = task = asyncio.create_task(work)
        task.add_done_callback(ended)

    async def _make(self, prepared: PreparedResponse, events: ResponseEvents) -> None:
        response_id = prepared.id
        self._news[response_id] = asyncio.Event()
        try:
            async with self._room:
                await Run(self._owner, prepared, events, partial(self._tell, response_id)).make()
        except LostError:
            logger.info("response %s was cancelled or deleted, or another server makes it", response_id)
        finally:
            self._tell(response_id)
            del self._news[response_id]

    def _tell(self, response_id: str) -> None:
        self._news[response_id].set()
        self._news[response_id] = asyncio.Event()

    async def _tend(self) -> None:
        """Renew the leases of this server, and take over those that have run out."""
        while True:
            try:
                for run in await self._state.store.run(partial(self._claim, list(self._tasks))):
                    self._start(run.entry.id, self._resume(run))
            except StoreError as error:
                logger.warning("responses in the background: %s", error.why)
            await asyncio.sleep(_TEND_SECONDS)

    def _claim(self, own: list[str], tables: RunTables) -> list[ClaimedRun]:
        state = self._state
        tables.renew(self._owner, own)
        models = {state.model_name, *(served.adapter.name for served in state.adapters.all())}
        return tables.claim(self._owner, models, MAX_RUNS - len(own))

    async def _resume(self, run: ClaimedRun) -> None:
        """Make a response anew that a server has left."""
        entry, state = run.entry, self._state
        try:
            prepared = await _prepared_again(state, run)
            events, told = _queued(prepared, run.next_number)
            await state.store.run(lambda tables: tables.advance(entry.id, self._owner, told, None))
        except StoreError:  # its lease is not renewed
            raise
        except Exception as error:
            await fail(state, self._owner, entry, run.next_number, to_api_error(error))
            return
        logger.info("response %s is made anew: the server that made it has ended", entry.id)
        await self._make(prepared, events)


def _next_events(response_id: str, after: int, tables: RunTables) -> tuple[list[tuple[int, bytes]], str | None]:
    return tables.events_after(response_id, after)


def _queued(prepared: PreparedResponse, number: int) -> tuple[ResponseEvents, Told]:
    """The events of a response that begins, and the first of them, from ``number`` on."""
    events = ResponseEvents(prepared, (), number)
    events.response.status = "queued"
    body = events.told("response.created", "response.queued")
    return events, Told(number, events.number - number, body)


async def _prepared_again(state: ServerState, run: ClaimedRun) -> PreparedResponse:
    """The request of a response that a server has left, prepared as if it came now. Raises ValueError, APIError."""
    if run.attempt > MAX_ATTEMPTS:
        raise APIError(500, f"the server ended {MAX_ATTEMPTS} times before this response was made")
    act_for(tenant_of(run.entry.tenant), run.entry.id)
    body = ResponsesRequest.model_validate_json(run.request)
    check_model(state, body.model)
    names = {"request_id": uuid.uuid4().hex, "client_chose_id": False}
    scope: dict[str, Any] = {"type": "http", "headers": [], "state": names}
    prepared = await prepare(CheckedRequest(Request(scope), state, body, time.time()))
    prepared.id, prepared.created = run.entry.id, run.entry.created
    return prepared
