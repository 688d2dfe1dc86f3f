"""Streamed responses: the outputs of a generation, written as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.entrypoints.errors import APIError
from octavo.entrypoints.generation.run import Generation
from octavo.entrypoints.transport.responses import disconnected, to_api_error
from octavo.entrypoints.transport.stream_body import StreamBody, stream_body
from octavo.interface.outputs import RequestOutput

EVENT_STREAM = "text/event-stream; charset=utf-8"


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

    Each step's outputs are written at once, in the step's own turn of the event loop. A client that does not keep up
    gets them in larger pieces. If it disconnects, the generation is aborted.
    """

    def __init__(self, generation: Generation, events: Events, media_type: str = EVENT_STREAM) -> None:
        self.generation, self.events = generation, events
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
            await asyncio.wait((first, disconnect), return_when=asyncio.FIRST_COMPLETED)
            if not first.done():
                return
            begun = first.result()
            if isinstance(begun, Exception):
                await to_api_error(begun).response()(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if begun:
                body.write(begun)
            self._listen(partial(self._advance, body, last), body)
            await asyncio.wait((last, disconnect), return_when=asyncio.FIRST_COMPLETED)
            if last.done():
                await body.drain()
                await send({"type": "http.response.body", "body": await self._ended(last.result()), "more_body": False})
        finally:
            body.close()
            self.generation.close()
            disconnect.cancel()
            scope["state"]["streamed_bytes"] = body.num_bytes

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
            if written:
                body.write(written)
            if self.generation.finished:
                last.set_result(self.events.end())
        except Exception as error:
            last.set_result(written + self.events.error(to_api_error(error)))
