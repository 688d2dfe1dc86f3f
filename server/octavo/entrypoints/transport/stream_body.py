"""The body of a streamed response: straight to the connection of our own server, or ASGI messages of any other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from starlette.types import Scope, Send

DIRECT_BODY = "direct_body"  # key of a request's scope["state"]: the StreamBody of a server that has a direct path


class StreamBody(Protocol):
    """Takes what a stream writes, once its head has been sent."""

    num_bytes: int  # written past ASGI

    @property
    def is_writable(self) -> bool:
        """False while the client is behind, or gone."""

    def when_writable(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called when a client that was behind has caught up."""

    def write(self, data: bytes) -> None:
        """Send a piece. Only while the body is writable, and not empty."""

    async def drain(self) -> None:
        """Wait until what was written has been sent."""

    def close(self) -> None:
        """Drop the callback and whatever has not been sent."""


class AsgiBody:
    """A body of ASGI messages, one at a time: not writable until the server has taken the last one."""

    num_bytes = 0

    def __init__(self, send: Send) -> None:
        self._send_message = send
        self._sending: asyncio.Task[None] | None = None
        self._on_writable: Callable[[], None] | None = None

    @property
    def is_writable(self) -> bool:
        """The server has taken the last message."""
        return self._sending is None

    def when_writable(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called when the server has taken a message."""
        self._on_writable = callback

    def write(self, data: bytes) -> None:
        """Send a message."""
        self._sending = asyncio.ensure_future(self._send(data))

    async def _send(self, data: bytes) -> None:
        try:
            await self._send_message({"type": "http.response.body", "body": data, "more_body": True})
        except OSError:
            return  # the client has disconnected, as `receive` reports
        self._sending = None
        if self._on_writable is not None:
            self._on_writable()

    async def drain(self) -> None:
        """Wait until the server has taken the last message."""
        if self._sending is not None:
            await self._sending

    def close(self) -> None:
        """Drop a message that the server has not taken."""
        self._on_writable = None
        if self._sending is not None:
            self._sending.cancel()


def stream_body(scope: Scope, send: Send) -> StreamBody:
    """The body of the response to a request."""
    direct: StreamBody | None = scope["state"].get(DIRECT_BODY)
    return direct or AsgiBody(send)
