"""uvicorn's HTTP protocol with limits on the size of heads and the rate of bodies, and with graceful draining.

A client that has only closed its sending side gets its response.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from octavo.entrypoints.errors import APIError
from octavo.entrypoints.transport.stream_body import DIRECT_BODY

MAX_HEAD_BYTES = 64 * 1024  # request line and headers together
HEAD_SECONDS = 20.0  # from the connection, or the first byte of a further request, to the end of the headers
MIN_BODY_RATE = 1_024  # bytes per second, checked every BODY_SECONDS
BODY_SECONDS = 20.0
UNREAD_SECONDS = 60.0  # that a client may leave full socket buffers unread
FIRST_PROBE_SECONDS = 0.5  # before the first probe of a client that has closed its sending side,
PROBE_SECONDS = 2.0  # and between two probes
PROBE_REPLY_SECONDS = 0.25  # in which the kernel learns that a connection is closed
DRAIN_IDLE_SECONDS = 6.0  # clients keep an idle connection for 5 s (httpx, and with it openai)


class _HeadTooLargeError(Exception):
    """Stops the parser."""


class _Parser(httptools.HttpRequestParser):
    """Reads requests that offer to upgrade as if they did not, as RFC 9110, 7.8 allows: httptools would end with their
    head, though Java's standard client offers h2c with each POST and sends the body all the same."""

    def __init__(self, protocol: LimitedHttpProtocol) -> None:
        super().__init__(protocol)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
        self._protocol = protocol

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]  # uvicorn feeds bytes
        """Parse what has arrived, by another parser from the first offer on."""
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            if not self._protocol.is_upgrade_offered:
                raise  # CONNECT
            self._protocol.read_without_upgrade(data[offer.args[0] :])


class DirectBody:
    """A StreamBody written straight to its connection as HTTP chunks, past ASGI and the middleware."""

    def __init__(self, connection: LimitedHttpProtocol, cycle: RequestResponseCycle) -> None:
        self._connection, self._cycle = connection, cycle
        self.num_bytes = 0

    @property
    def is_writable(self) -> bool:
        """The client is connected and has room."""
        return not (self._connection.flow.write_paused or self._cycle.disconnected)

    def when_writable(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called when a client that was behind has caught up."""
        self._connection.on_writable = callback

    def write(self, data: bytes) -> None:
        """Send a chunk."""
        self.num_bytes += len(data)
        self._connection.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def drain(self) -> None:
        """Nothing waits here: the transport keeps the order."""

    def close(self) -> None:
        """Drop the callback."""
        self._connection.on_writable = None


class LimitedHttpProtocol(HttpToolsProtocol):
    """Answers what never becomes a request with a 400, 408 or 431 in OpenAI's form."""

    cycle: RequestResponseCycle

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = _Parser(self)
        self.is_upgrade_offered = False  # by the request whose head has just been read
        self._in_head = True
        self._head_bytes = 0  # received while the head was not complete
        self._body_bytes = 0  # received since the rate was last checked
        self._too_large = False
        self._deadline: asyncio.TimerHandle | None = None
        self._idle_since = self.loop.time()
        self._draining = False
        self._idle_timer: asyncio.TimerHandle | None = None
        self._cycles: list[RequestResponseCycle] = []  # of requests without a complete response
        self.on_writable: Callable[[], None] | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the timer of the first head."""
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel all timers and tell every request."""
        self._cancel_deadline()
        self._cancel_idle_timer()
        self._cancel_unread_timer()
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        for cycle in self._cycles:  # uvicorn itself tells the last of pipelined requests only
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count what the limits are about."""
        if self._in_head:
            self._head_bytes += len(data)
        else:
            self._body_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._send_431()

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._cancel_idle_timer()
        if self._deadline is None:  # a further request on a kept-alive connection
            self._start_head_timer()

    def on_url(self, url: bytes) -> None:
        """Count the request line."""
        super().on_url(url)
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header."""
        super().on_header(name, value)
        self._count_head(len(name) + len(value) + 4)

    def _count_head(self, size: int) -> None:
        """Counts the parts too, since a whole head may arrive in one piece of data."""
        self._head_size = getattr(self, "_head_size", 0) + size
        if self._head_size > MAX_HEAD_BYTES:
            self._too_large = True
            raise _HeadTooLargeError

    def on_headers_complete(self) -> None:
        """Start the request and the timer of its body."""
        offered = self.parser.should_upgrade() and any(name == b"upgrade" for name, _ in self.headers)
        self.is_upgrade_offered = offered and self.parser.get_method() != b"CONNECT"
        if self.is_upgrade_offered:
            return
        self.scope["state"]["connection_draining"] = self._draining
        self._in_head = False
        self._head_size = 0
        self._cancel_deadline()
        self._body_bytes = 0
        self._deadline = self.loop.call_later(BODY_SECONDS, self._check_body_rate)
        super().on_headers_complete()
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete] + [self.cycle]
        self.scope["state"][DIRECT_BODY] = DirectBody(self, self.cycle)

    def on_message_complete(self) -> None:
        """The body is complete."""
        if self.is_upgrade_offered:
            return
        self._cancel_deadline()
        self._in_head, self._head_bytes = True, 0
        super().on_message_complete()

    def read_without_upgrade(self, rest: bytes) -> None:
        """Read the head again without its offer to upgrade, then ``rest``, which follows it."""
        version = self.parser.get_http_version().encode()
        head = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                options = [option.strip() for option in value.split(b",")]
                value = b", ".join(option for option in options if option.lower() != b"upgrade")
            if name != b"upgrade" and (value or name != b"connection"):
                head.append(b"%b: %b" % (name, value))
        self.is_upgrade_offered, self._head_size = False, 0
        self.parser = _Parser(self)
        self.parser.feed_data(b"\r\n".join([*head, b"", rest]))

    def on_response_complete(self) -> None:
        """A response has been sent."""
        super().on_response_complete()
        self._idle_since = self.loop.time()
        if self._draining and self._is_idle and self.is_open:
            self._start_idle_timer()

    # Clients that do not read.

    def pause_writing(self) -> None:
        """The client is behind: start its timer."""
        super().pause_writing()
        if self._unread_timer is None:
            self._unread_timer = self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._cancel_unread_timer()
        super().resume_writing()
        if self.on_writable is not None:
            self.on_writable()

    def _cancel_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    # Clients that have closed their sending side.

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio reads what uvicorn leaves out
        """Complete requests are answered all the same: the client may have closed its sending side only (`nc -N`,
        `shutdown(SHUT_WR)`). Returns whether the connection stays open; TLS cannot be half closed."""
        self._cancel_deadline()
        if self.cycle is not None and self.cycle.more_body:  # it stays incomplete
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        waiting = [cycle for cycle in self._cycles if not (cycle.response_complete or cycle.disconnected)]
        if not waiting or self.scheme == "https":
            return False
        waiting[-1].keep_alive = False  # closes the connection after its response
        self._set_keepalive_probes()
        self._probe_timer = self.loop.call_later(FIRST_PROBE_SECONDS, self._probe_client)
        return True

    def _set_keepalive_probes(self) -> None:
        """Have the kernel notice a vanished client within about a minute, even if nothing is written."""
        sock = self.transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
                if hasattr(socket, option):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), 5)

    def _probe_client(self) -> None:
        """Only sending something tells a closed connection from a half-closed one. Before a response begins that is a
        100 Continue, of which HTTP/1.1 allows any number."""
        begun = any(cycle.response_started and not cycle.response_complete for cycle in self._cycles)
        if not begun and self.cycle.scope["http_version"] == "1.1" and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._probe_timer = self.loop.call_later(PROBE_REPLY_SECONDS, self._abort_if_closed)

    def _abort_if_closed(self) -> None:
        """Abort if the client has closed both directions."""
        if self.transport.is_closing():
            return
        poller = select.poll()
        poller.register(self.transport.get_extra_info("socket").fileno(), 0)  # hang-ups and errors are always reported
        if poller.poll(0):
            self.transport.abort()
        else:
            self._probe_timer = self.loop.call_later(PROBE_SECONDS, self._probe_client)

    # Draining.

    def begin_drain(self) -> None:
        """Close the connection once it has been idle for DRAIN_IDLE_SECONDS; the next response tells the client to.

        Closing at once, even right after a response, would break a request that the client is about to send.
        """
        self._draining = True
        if self._is_idle and not self._head_bytes:  # else a request is in progress, or arriving
            self._start_idle_timer()

    def _start_idle_timer(self) -> None:
        left = max(0.0, self._idle_since + DRAIN_IDLE_SECONDS - self.loop.time())
        self._cancel_idle_timer()
        self._idle_timer = self.loop.call_later(left, self.timeout_keep_alive_handler)

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def is_open(self) -> bool:
        """The client may still send requests."""
        return self.transport is not None and not self.transport.is_closing()

    def _cancel_idle_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    # Deadlines.

    def _start_head_timer(self) -> None:
        self._in_head, self._head_bytes = True, 0
        self._deadline = self.loop.call_later(HEAD_SECONDS, self._time_out, "the request's headers")

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _check_body_rate(self) -> None:
        if self.cycle is not None and self.cycle.response_started:
            return
        if self.flow.read_paused or self._body_bytes >= MIN_BODY_RATE * BODY_SECONDS:
            self._body_bytes = 0
            self._deadline = self.loop.call_later(BODY_SECONDS, self._check_body_rate)
        else:
            self._time_out("the request's body")

    def _time_out(self, what: str) -> None:
        self._send_error(APIError(408, f"Timed out waiting for {what}; send it faster", code="timeout"))

    def _send_431(self) -> None:
        self._send_error(
            APIError(
                431,
                f"The request line and headers are larger than {MAX_HEAD_BYTES} bytes; send less",
                code="head_too_large",
            )
        )

    def send_400_response(self, msg: str) -> None:
        """Answer what the parser refused: a 431 for a head over the limit, else a 400."""
        if self._too_large:
            self._send_431()
        else:
            self._send_error(APIError(400, f"Invalid HTTP: {msg}", code="invalid_http"))

    def _send_error(self, error: APIError) -> None:
        """Respond without the application, which has not seen a request, and close the connection."""
        if self.transport is None or self.transport.is_closing():
            return
        body = error.body
        head = (
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
