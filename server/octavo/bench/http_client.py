"""HTTP/1.1 that does next to nothing while the clock runs: what comes is kept with its time, and read afterwards.

A benchmark's client shares the machine with the server that it measures. Reading each event as it comes would take
processor time from the server and move the figures.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools

from octavo.errors import ConfigError

CONNECT_TIMEOUT = 30.0  # seconds


@dataclass(slots=True)
class Exchange:
    """A request and what came back. Times are those of `time.perf_counter`."""

    started: float = 0.0
    status: int = 0  # 0: no answer
    pieces: list[tuple[float, bytes]] = field(default_factory=list)  # of the body, with the time each came
    error: str = ""

    @property
    def body(self) -> bytes:
        """All that came of the answer's body."""
        return b"".join(piece for _, piece in self.pieces)


class _Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self) -> None:
        self.open = True
        self._exchange: Exchange | None = None

    def begin(self, request: bytes, exchange: Exchange) -> asyncio.Future[None]:
        """Send; the result is there when the answer has come whole, or the connection is lost."""
        self._parser, self._exchange, self._until_closed = httptools.HttpResponseParser(self), exchange, True
        self._now, self._ended = 0.0, asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self._ended

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self._exchange is None:
            self.close()  # nobody has asked for anything
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"the answer is no HTTP: {error}")
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        whole = self._exchange is not None and self._exchange.status and self._until_closed and not error
        self._end("" if whole else str(error or "the server closed the connection"))

    def close(self) -> None:
        """Give the connection up."""
        self.open = False
        self.transport.close()

    # Callbacks of the parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._until_closed = False

    def on_headers_complete(self) -> None:
        if self._exchange is not None:
            self._exchange.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._exchange is not None:
            self._exchange.pieces.append((self._now, body))

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.close()
        self._end("")

    def _end(self, error: str) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None and not self._ended.done():
            exchange.error = error
            self._ended.set_result(None)


class HTTPClient:
    """Connections to one server, as many as requests are under way; a connection serves one after the other."""

    def __init__(self, base_url: str, headers: Mapping[str, str], verify: bool = True) -> None:
        """``verify`` False: whatever certificate the server has. Raises ConfigError where ``base_url`` is none."""
        try:
            url = urlsplit(base_url)
            host, port = url.hostname, url.port or (443 if url.scheme == "https" else 80)
        except ValueError as error:
            raise ConfigError(f"--base-url {base_url!r} is no address: {error}") from None
        if url.scheme not in ("http", "https") or not host:
            raise ConfigError(f"--base-url {base_url!r} is no address: it must begin with http:// or https://")
        self._address, self._path = (host, port), url.path.rstrip("/")
        self._tls = _tls_context(verify) if url.scheme == "https" else None
        lines = {"Host": url.netloc.rpartition("@")[2], "Accept": "*/*", "Content-Type": "application/json"} | dict(
            headers
        )
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: list[_Connection] = []

    async def post(
        self, path: str, body: dict[str, Any], headers: str = "", exchange: Exchange | None = None
    ) -> Exchange:
        """Send ``body`` as JSON and wait for the whole answer. ``headers``: further lines, for this request alone.
        ``exchange``: the result, for who wants to see it grow. What goes wrong is in the result, never raised."""
        content, exchange = json.dumps(body).encode(), exchange or Exchange()
        exchange.started = time.perf_counter()
        lines = f"{self._headers}{headers}Content-Length: {len(content)}\r\n"
        head = f"POST {self._path}{path} HTTP/1.1\r\n{lines}\r\n"
        request, idle = head.encode() + content, [connection for connection in self._idle if connection.open]
        self._idle = idle[:-1]
        try:
            connection = idle[-1] if idle else await self._connect()
            await self._send(connection, request, exchange)
            if idle and not exchange.status and not connection.open:  # closed since the last answer, not on this one
                exchange.error = ""
                connection = await self._connect()
                await self._send(connection, request, exchange)
        except (OSError, TimeoutError) as error:
            exchange.error = str(error) or type(error).__name__
        return exchange

    async def _connect(self) -> _Connection:
        async with asyncio.timeout(CONNECT_TIMEOUT):
            loop = asyncio.get_running_loop()
            return (await loop.create_connection(_Connection, *self._address, ssl=self._tls))[1]

    async def _send(self, connection: _Connection, request: bytes, exchange: Exchange) -> None:
        try:
            await connection.begin(request, exchange)
        except asyncio.CancelledError:
            connection.close()
            raise
        if connection.open:
            self._idle.append(connection)

    def close(self) -> None:
        """Close the connections."""
        for connection in self._idle:
            connection.close()


def _tls_context(verify: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if not verify:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
