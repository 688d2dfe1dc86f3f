"""Reading bodies and writing answers: limits, disconnects, server-sent events."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.entrypoints.errors import APIError, ErrorResponse, bad_request, from_validation
from octavo.entrypoints.transport.protocol import DIRECT_BODY, DirectBody
from octavo.errors import EngineDeadError
from octavo.interface.outputs import RequestOutput

if TYPE_CHECKING:
    from octavo.entrypoints.generation.run import Running

logger = logging.getLogger(__name__)

Body = TypeVar("Body", bound=BaseModel)
Handler = Callable[[Request], Awaitable[Response]]

encode_json = msgspec.json.Encoder().encode
_LARGE_BODY = 1 << 18
_MAX_DISCARDED = 64 << 20  # bytes beyond what a body may have that are read before the client is told
DONE = b"data: [DONE]\n\n"


class JSON(Response):
    """Anything that msgspec can encode."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode_json(content)


def to_api_error(error: Exception) -> APIError:
    """Whatever went wrong while a request was handled, as the client is told."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, EngineDeadError):
        return APIError(503, f"The engine has ended: {error}", code="engine_dead")
    if isinstance(error, ValueError):
        return bad_request(error)
    logger.exception("a request failed", exc_info=error)
    return APIError(500, "The server failed to handle the request; its log says why")


def route(handler: Handler) -> Handler:
    """Whatever a handler raises becomes an error in OpenAI's form."""

    @wraps(handler)
    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            return to_api_error(error).response()

    return handle


async def read_body(request: Request, model: type[Body], max_bytes: int) -> Body:
    """The JSON body, checked. Raises APIError."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind and kind != "application/json" and not kind.endswith("+json"):
        raise APIError(415, f"The body must be JSON: send Content-Type: application/json, not {kind[:100]!r}")
    if (coding := request.headers.get("content-encoding", "identity").lower()) != "identity":
        raise APIError(415, f"The body must be sent as it is, not compressed: drop Content-Encoding {coding[:100]!r}")
    try:
        length = int(request.headers.get("content-length", 0))
    except ValueError:
        length = 0
    if length > _MAX_DISCARDED + max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    size = values = 0
    max_values = request.app.state.server.max_body_values
    async for chunk in request.stream():
        size += len(chunk)
        values += chunk.count(b",") + 3 * chunk.count(b"{")  # objects take longest to make
        if size > _MAX_DISCARDED + max_bytes:
            break
        if size <= max_bytes and values <= max_values:
            parts.append(chunk)
        else:  # who is still sending does not hear us: the rest is read and thrown away
            parts.clear()
    if size > max_bytes:
        raise _too_large(max_bytes)
    if values > max_values:
        raise APIError(413, f"The body holds more than {max_values} values, more than the model could take; send less")
    body = b"".join(parts)
    try:
        if size < _LARGE_BODY:
            return model.model_validate_json(body)
        await asyncio.sleep(0)  # others have their turn between copying,
        value = _decode_json(body)  # reading
        await asyncio.sleep(0)  # and checking
        return model.model_validate(value)
    except ValidationError as error:
        raise from_validation(error) from None


def _decode_json(body: bytes) -> Any:
    """In half the time that pydantic takes, but errors tell less. Raises APIError."""
    try:
        return msgspec.json.decode(body)
    except (ValueError, RecursionError) as error:
        raise APIError(400, f"The body is not valid JSON: {error}", code="invalid_json") from None


def _too_large(max_bytes: int) -> APIError:
    return APIError(
        413,
        f"The body is larger than {max_bytes} bytes (--max-request-bytes); send less",
        headers={"connection": "close"},
    )


T = TypeVar("T")


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``; cancel it when the client leaves, and raise ClientDisconnect."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request.receive))
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


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event(message: Any) -> bytes:
    return b"data: %b\n\n" % encode_json(message)


class EventTemplate:
    """Events that differ in one text only: all else is written as JSON once, not for every token."""

    def __init__(self, make: Callable[[str], Any]) -> None:
        mark = secrets.token_hex(16)
        self._head, self._tail = event(make(mark)).split(encode_json(mark))

    def fill(self, text: str) -> bytes:
        return b"%b%b%b" % (self._head, encode_json(text), self._tail)


class Events(Protocol):
    """What the events of a stream say."""

    def write(self, item: tuple[int, RequestOutput]) -> bytes:
        """The events of one output; nothing when all of it is held back."""

    def end(self) -> bytes:
        """The last ones."""


class EventStream(Response):
    """Server-sent events: what ``events`` makes of the outputs of ``run``.

    The head leaves together with the first event. Until then nothing has been promised: an error is an answer with a
    status of its own, and a proxy may send the request to another replica. Later on an error is the last event, in
    OpenAI's form.

    Each step's news go to the connection at once, in the step's own turn on the event loop. A client that does not keep
    up gets them in larger pieces. One that leaves aborts the work behind.
    """

    def __init__(self, run: Running, events: Events) -> None:
        self.run, self.events = run, events
        self.status_code = 200
        self.background = None
        self.raw_headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # asks nginx to pass chunks on as they come
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body: DirectBody = scope["state"][DIRECT_BODY]
        first: asyncio.Future[bytes | Exception] = asyncio.get_running_loop().create_future()
        last: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            self._listen(partial(self._begin, body, first), body)
            await asyncio.wait((first, gone), return_when=asyncio.FIRST_COMPLETED)
            if not first.done():
                return
            news = first.result()
            if isinstance(news, Exception):
                await to_api_error(news).response()(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if news:
                body.write(news)
            self._listen(partial(self._advance, body, last), body)
            await asyncio.wait((last, gone), return_when=asyncio.FIRST_COMPLETED)
            if last.done():
                await send({"type": "http.response.body", "body": last.result(), "more_body": False})
        finally:
            body.when_writable(None)
            self.run.close()
            gone.cancel()
            scope["state"]["streamed_bytes"] = body.num_bytes

    def _listen(self, on_news: Callable[[], None], body: DirectBody) -> None:
        """Have ``on_news`` called when there is something to write, and when the client has caught up."""
        self.run.stream.on_news = on_news
        body.when_writable(on_news)
        on_news()  # what came before anybody listened

    def _begin(self, body: DirectBody, first: asyncio.Future[bytes | Exception]) -> None:
        """``first`` becomes the first events, or the error that came before any. What comes then waits in the run."""
        if first.done() or not body.is_writable:
            return
        try:
            item = self.run.take()
            while item is not None:
                if news := self.events.write(item):
                    first.set_result(news)
                    return
                item = self.run.take() if self.run.stream.news else None
            if self.run.finished:
                first.set_result(b"")
        except Exception as error:
            first.set_result(error)

    def _advance(self, body: DirectBody, last: asyncio.Future[bytes]) -> None:
        """Write what there is to say, unless the client is behind; ``last`` then becomes the end of the answer."""
        if last.done() or not body.is_writable:
            return
        news = b""
        try:
            item = self.run.take()
            while item is not None:
                news += self.events.write(item)
                item = self.run.take() if self.run.stream.news else None
            if news:
                body.write(news)
            if self.run.finished:
                last.set_result(self.events.end())
        except Exception as error:
            last.set_result(news + event(ErrorResponse(to_api_error(error).detail)) + DONE)
