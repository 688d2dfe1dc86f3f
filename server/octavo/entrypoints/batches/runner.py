"""Answers lines of batches through the application itself, so that they are checked and answered as any request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from octavo.entrypoints.batches.lines import Limits, Line, answered, error_of, failed

if TYPE_CHECKING:
    import httpx
    from starlette.types import ASGIApp

    from octavo.entrypoints.state import ServerState

logger = logging.getLogger(__name__)

_LONGEST_WAIT = 2.0  # seconds between attempts while the queue is full
_AROUND_BODY = 1 << 16  # bytes of a line that are none of its body's
_HOPELESS = "too_many_sequences"  # code of a 429 that stays one
_STOPPED = ("engine_dead", "not_alive", "loading", "draining", "aborted")  # codes of a 503 that others would get, too


class StoppedError(Exception):
    """The server ends, or its engine has died: no further line can be answered."""


def client_of(app: ASGIApp, state: ServerState) -> httpx.AsyncClient:
    """A client whose requests stay in this process."""
    import httpx  # not before somebody has a batch

    headers = {"content-type": "application/json"}
    if state.args.api_key:
        headers["authorization"] = f"Bearer {state.args.api_key[0]}"
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, root_path=state.args.root_path)
    return httpx.AsyncClient(transport=transport, base_url="http://batch", headers=headers, timeout=None)


def limits_of(state: ServerState) -> Limits:
    """Limits of a request's body, and room for what a line has around it."""
    return Limits(state.max_body_bytes + _AROUND_BODY, state.max_body_values + 100)


async def answer_lines(
    client: httpx.AsyncClient, lines: Iterable[Line], width: int, write: Callable[[Line, bytes, bool], None]
) -> None:
    """Answer lines, at most ``width`` of them at a time. ``write`` gets each line, its line of output and whether it
    succeeded, as they end. Raises StoppedError."""
    waiting = iter(lines)
    async with asyncio.TaskGroup() as group:
        for _ in range(width):
            group.create_task(_work(client, waiting, write))


async def _work(client: httpx.AsyncClient, waiting: Iterator[Line], write: Callable[[Line, bytes, bool], None]) -> None:
    for line in waiting:  # each of the workers takes the next one
        if line.problem is not None:
            write(line, failed(line, line.code, line.problem), False)
            await asyncio.sleep(0)
        else:
            write(line, *await _answer(client, line))


async def _answer(client: httpx.AsyncClient, line: Line) -> tuple[bytes, bool]:
    """The line's output, and whether it succeeded: whatever goes wrong is this line's error. Raises StoppedError."""
    try:
        response = await _send(client, line)
        status = response.status_code
        return answered(line, status, response.headers.get("x-request-id", ""), response.content), status < 400
    except StoppedError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # a library's, in Rust
            raise
        logger.exception("line %d of a batch failed", line.number)
        return failed(line, "server_error", "Internal server error; see the server's log"), False


async def _send(client: httpx.AsyncClient, line: Line) -> httpx.Response:
    """The response, once there is room in the queue. Raises StoppedError."""
    wait = 0.05
    while True:
        response = await client.post(line.url, content=line.body)
        error = error_of(response.content) if response.status_code in (429, 503) else None
        code = None if error is None else error["code"]
        if error is not None and code in _STOPPED:
            raise StoppedError(error["message"])
        if response.status_code != 429 or code == _HOPELESS:
            return response
        await asyncio.sleep(wait)
        wait = min(2 * wait, _LONGEST_WAIT)
