"""Answers lines of batches through the application itself, so that they are checked and answered as any request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from octavo.entrypoints.batches.lines import Line, answered, failed

if TYPE_CHECKING:
    import httpx
    from starlette.types import ASGIApp

    from octavo.entrypoints.state import ServerState

_LONGEST_WAIT = 2.0  # seconds between attempts while the queue is full


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
            write(line, failed(line, "invalid_line", line.problem), False)
            await asyncio.sleep(0)
            continue
        response = await _send(client, line)
        status = response.status_code
        output = answered(line, status, response.headers.get("x-request-id", ""), response.content)
        write(line, output, status < 400)


async def _send(client: httpx.AsyncClient, line: Line) -> httpx.Response:
    """The response, once there is room in the queue. Raises StoppedError."""
    wait = 0.05
    while True:
        response = await client.post(line.url, content=line.body)
        if response.status_code == 503:
            raise StoppedError(response.json()["error"]["message"])
        if response.status_code != 429:
            return response
        await asyncio.sleep(wait)
        wait = min(2 * wait, _LONGEST_WAIT)
