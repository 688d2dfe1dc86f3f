"""Run handlers as responses: errors become JSON, and work stops when the client disconnects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive

from octavo.entrypoints.errors import APIError, bad_request
from octavo.errors import EngineDeadError

logger = logging.getLogger(__name__)

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]

_encode = msgspec.json.Encoder().encode


def encode_json(value: Any) -> bytes:
    """``value`` as JSON. What Unicode takes for line ends is escaped: clients that split a stream as `str.splitlines`
    does (httpx's `iter_lines`, and so Ollama's client) would cut a string in two there."""
    text = _encode(value)
    if text.isascii():
        return text
    return (
        text.replace(b"\xc2\x85", b"\\u0085").replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    )


class JSON(Response):
    """Anything that msgspec can encode."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body."""
        return encode_json(content)


def to_api_error(error: Exception) -> APIError:
    """The error that a client is sent for any exception of a handler."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, EngineDeadError):
        return APIError(503, f"The engine has stopped: {error}", code="engine_dead")
    if isinstance(error, ValueError):
        return bad_request(error)
    logger.exception("request failed", exc_info=error)
    return APIError(500, "Internal server error; see the server's log")


def route(handler: Handler) -> Handler:
    """Turn any exception of ``handler`` into an error response."""

    @wraps(handler)
    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            return to_api_error(error).response()

    return handle


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``. If the client disconnects first, cancel it and raise ClientDisconnect."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))


async def disconnected(receive: Receive) -> None:
    """Wait until the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
