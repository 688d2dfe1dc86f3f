"""Streamed responses: the outputs of a generation, written as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.entrypoints.errors import APIError
from octavo.entrypoints.generation.run import Generation
from octavo.entrypoints.transport.responses import disconnected, to_api_error
from octavo.entrypoints.transport.sse import COMMENT
from octavo.entrypoints.transport.stream_body import StreamBody, stream_body
from octavo.interface.outputs import RequestOutput

EVENT_STREAM = "text/event-stream; charset=utf-8"
SILENT_SECONDS = 15.0  # without an event, after which a stream says that it lives
_LOOK_SECONDS = 1.0  # until a client that is behind is looked at again


class Events(Protocol):
    """Writes a stream in the form of a dialect."""

    def write(self, item: tuple[int, RequestOutput]) -> bytes:
        """The events of one output; empty if there is nothing to send yet."""

    def end(self) -> bytes | Awaitable[bytes]:
        """The last events of a complete stream; of one whose answer has to be stored first, once it is."""

    def error(self, error: APIError) -> bytes:
        """The last events of a stream that failed after its first event."""


class EventStream(Response):
    """Server-sent events, or what else ``media_type`` says: what ``events`` makes of the outputs of ``generation``.

    The head is sent together with the first event. Until then nothing has been promised: an error is a response with a
    status of its own, and a proxy may send the request to another replica. Later on an error is the last event.
    ``head_after``: seconds that the first event may take; then the head goes ahead of it, and an error becomes the last
    event. ``ping``: an event that says no more than that the connection lives; a comment where no event has come yet.

    Each step's outputs are written at once, in the step's own turn of the event loop. A client that does not keep up
    gets them in larger pieces. If it disconnects, the generation is aborted.
    """

    def __init__(
        self,
        generation: Generation,
        events: Events,
        media_type: str = EVENT_STREAM,
        head_after: float | None = None,
        ping: bytes = COMMENT,
    ) -> None:
        self.generation, self.events = generation, events
        self._head_after, self._ping, self._spoke = head_after, ping, float("-inf")
        self.status_code = 200
        self.background = None
        self.raw_headers = [
            (b"content-type", media_type.encode()),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # asks nginx to pass chunks on as they come
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        body = stream_body(scope, send)
        first: asyncio.Future[bytes | Exception] = asyncio.get_running_loop().create_future()
        last: asyncio.Future[bytes | Awaitable[bytes]] = asyncio.get_running_loop().create_future()
        disconnect = asyncio.ensure_future(disconnected(receive))
        try:
            self._listen(partial(self._begin, body, first), body)
            await asyncio.wait((first, disconnect), timeout=self._head_after, return_when=asyncio.FIRST_COMPLETED)
            head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            if goes_ahead := not (first.done() or disconnect.done()):
                await send(head)
                await self._until(first, disconnect, body, COMMENT if self._ping else b"")
            if not first.done():
                return
            begun = first.result()
            if isinstance(begun, Exception) and not goes_ahead:
                await to_api_error(begun).response()(scope, receive, send)
                return
            if not goes_ahead:
                await send(head)
            if isinstance(begun, Exception):
                last.set_result(self.events.error(to_api_error(begun)))
            else:
                self._write(body, begun)
                self._listen(partial(self._advance, body, last), body)
                await self._until(last, disconnect, body, self._ping)
            if last.done():
                await body.drain()
                await send({"type": "http.response.body", "body": await self._ended(last.result()), "more_body": False})
        finally:
            body.close()
            self.generation.close()
            disconnect.cancel()
            scope["state"]["streamed_bytes"] = body.num_bytes

    async def _until(
        self, news: asyncio.Future[Any], disconnect: asyncio.Future[None], body: StreamBody, ping: bytes
    ) -> None:
        """Wait for one of the two. What is silent for long writes ``ping``, if there is one."""
        loop = asyncio.get_running_loop()
        while not (news.done() or disconnect.done()):
            left = self._spoke + SILENT_SECONDS - loop.time()
            if ping and left <= 0 and body.is_writable:
                self._write(body, ping)
                left = SILENT_SECONDS
            timeout = max(left, _LOOK_SECONDS) if ping else None
            await asyncio.wait((news, disconnect), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)

    def _write(self, body: StreamBody, data: bytes) -> None:
        if data:
            self._spoke = asyncio.get_running_loop().time()
            body.write(data)

    def _listen(self, on_output: Callable[[], None], body: StreamBody) -> None:
        """Have ``on_output`` called when there is something to write, and when the client has caught up."""
        self.generation.stream.on_output = on_output
        body.when_writable(on_output)
        on_output()  # what came before anybody listened

    def _begin(self, body: StreamBody, first: asyncio.Future[bytes | Exception]) -> None:
        """``first`` becomes the first events, or the error before any. Later outputs wait in the generation."""
        if first.done() or not body.is_writable:
            return
        try:
            item = self.generation.take()
            while item is not None:
                if written := self.events.write(item):
                    first.set_result(written)
                    return
                item = self.generation.take() if self.generation.stream.changed else None
            if self.generation.finished:
                first.set_result(b"")
        except Exception as error:
            first.set_result(error)

    async def _ended(self, last: bytes | Awaitable[bytes]) -> bytes:
        try:
            return last if isinstance(last, bytes) else await last
        except Exception as error:
            return self.events.error(to_api_error(error))

    def _advance(self, body: StreamBody, last: asyncio.Future[bytes | Awaitable[bytes]]) -> None:
        """Write what there is, unless the client is behind. At the end ``last`` becomes the last events."""
        if last.done() or not body.is_writable:
            return
        written = b""
        try:
            item = self.generation.take()
            while item is not None:
                written += self.events.write(item)
                item = self.generation.take() if self.generation.stream.changed else None
            self._write(body, written)
            if self.generation.finished:
                last.set_result(self.events.end())
        except Exception as error:
            last.set_result(written + self.events.error(to_api_error(error)))
