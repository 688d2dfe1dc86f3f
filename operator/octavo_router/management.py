"""The picker's own HTTP port: metrics, liveness, and what is held, which the operator waits for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import parse_qs, urlsplit

MAX_WAIT_SECONDS = 60.0
_REQUEST_SECONDS = 10.0
Answer = tuple[int, str, bytes]  # status, content type, body
Route = Callable[[dict[str, str]], Awaitable[Answer]]
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found"}


def json_answer(value: object, status: int = 200) -> Answer:
    """The value as JSON."""
    return status, "application/json", json.dumps(value).encode()


async def start(routes: Mapping[str, Route], address: str, port: int) -> asyncio.Server:
    """Serves these ("METHOD PATH"), one request a connection. A route gets the query's fields; bodies are not read."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _REQUEST_SECONDS)
            answering = asyncio.ensure_future(_answer(routes, head))
            gone = asyncio.ensure_future(reader.read(1))  # nothing comes after the head but the client's end
            await asyncio.wait([answering, gone], return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
            if not answering.done():
                answering.cancel()
                return
            status, kind, body = answering.result()
            writer.write(
                f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
                "Connection: close\r\n\r\n".encode()
                + body
            )
            await writer.drain()
        except (OSError, EOFError, ValueError, TimeoutError, asyncio.LimitOverrunError):
            pass  # no request, or nobody waits for the answer
        finally:
            writer.close()

    return await asyncio.start_server(serve, address, port)


async def _answer(routes: Mapping[str, Route], head: bytes) -> Answer:
    words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
    target = urlsplit(words[1] if len(words) > 1 else "")
    route = routes.get(f"{words[0]} {target.path}")
    if route is None:
        return json_answer({"error": "not found"}, 404)
    try:
        return await route({name: value[-1] for name, value in parse_qs(target.query).items()})
    except ValueError as error:
        return json_answer({"error": str(error)}, 400)
