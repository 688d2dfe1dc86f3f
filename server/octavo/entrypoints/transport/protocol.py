"""uvicorn's HTTP parser with limits: heads have a bounded size, and clients send at a reasonable pace or are let go.
A client that has closed its sending side only is answered."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from octavo.entrypoints.errors import APIError
from octavo.entrypoints.transport.stream_body import DIRECT_BODY

MAX_HEAD_BYTES = 64 * 1024  # request line and headers together
HEAD_SECONDS = 20.0  # from the connection, or the first byte of a further request, to the end of the headers
MIN_BODY_RATE = 1_024  # bytes a second, looked at every BODY_SECONDS
BODY_SECONDS = 20.0
UNREAD_SECONDS = 60.0  # that a client may leave what it was sent unread, when that is more than a few pieces
FIRST_PROBE_SECONDS = 0.5  # before the first probe whether a client that sends nothing more still listens,
PROBE_SECONDS = 2.0  # and between two of them
ECHO_SECONDS = 0.25  # in which a probe of a closed connection comes back
LAST_CALL_SECONDS = 6.0  # clients keep an idle connection for 5 s (httpx, and with it openai)


class _HeadTooLarge(Exception):
    pass


class DirectBody:
    """Writes the body of one answer straight to its connection: tokens go past what only looks at an answer's head."""

    def __init__(self, connection: LimitedHttpProtocol, cycle: RequestResponseCycle) -> None:
        self._connection, self._cycle = connection, cycle
        self.num_bytes = 0

    @property
    def is_writable(self) -> bool:
        """Whether the client is connected and has room."""
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
        """Call nobody back any more."""
        self._connection.on_writable = None


class LimitedHttpProtocol(HttpToolsProtocol):
    """Answers with 400, 408 or 431 in OpenAI's form what never becomes a request."""

    cycle: RequestResponseCycle

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._head_bytes = 0  # received while the head was not complete
        self._body_bytes = 0  # received since the pace was last looked at
        self._too_large = False
        self._deadline: asyncio.TimerHandle | None = None
        self._idle_since = self.loop.time()
        self._last_call = False
        self._farewell: asyncio.TimerHandle | None = None
        self._cycles: list[RequestResponseCycle] = []  # of requests that have no whole answer yet
        self.on_writable: Callable[[], None] | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._probe: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        self._cancel_farewell()
        self._cancel_unread()
        if self._probe is not None:
            self._probe.cancel()
        for cycle in self._cycles:  # uvicorn itself tells the last of pipelined requests only
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        else:
            self._body_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse_head()

    # What the parser calls.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._cancel_farewell()
        if self._deadline is None:  # a further request on a connection that is kept alive
            self._expect_head()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value) + 4)

    def _count(self, size: int) -> None:
        """A head may come complete in one piece of data, so its parts are counted too."""
        self._head_size = getattr(self, "_head_size", 0) + size
        if self._head_size > MAX_HEAD_BYTES:
            self._too_large = True
            raise _HeadTooLarge

    def on_headers_complete(self) -> None:
        self.scope["state"]["last_call"] = self._last_call
        self._in_head = False
        self._head_size = 0
        self._cancel_deadline()
        self._body_bytes = 0
        self._deadline = self.loop.call_later(BODY_SECONDS, self._check_pace)
        super().on_headers_complete()
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete] + [self.cycle]
        self.scope["state"][DIRECT_BODY] = DirectBody(self, self.cycle)

    def on_message_complete(self) -> None:
        self._cancel_deadline()
        self._in_head, self._head_bytes = True, 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._idle_since = self.loop.time()
        if self._last_call and self._is_idle and self.is_open:
            self._close_when_idle()

    # The client does not read.

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._cancel_unread()
        super().resume_writing()
        if self.on_writable is not None:
            self.on_writable()

    def _cancel_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    # The client sends nothing more.

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio reads what uvicorn leaves out
        """Its requests are answered all the same, when they are whole: it may have closed its sending side only
        (`nc -N`, `shutdown(SHUT_WR)`). Returns whether the connection stays open; TLS cannot be half closed."""
        self._cancel_deadline()
        if self.cycle is not None and self.cycle.more_body:  # never whole
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        waiting = [cycle for cycle in self._cycles if not (cycle.response_complete or cycle.disconnected)]
        if not waiting or self.scheme == "https":
            return False
        waiting[-1].keep_alive = False  # closes the connection behind its answer
        self._set_keepalive_probes()
        self._probe = self.loop.call_later(FIRST_PROBE_SECONDS, self._probe_client)
        return True

    def _set_keepalive_probes(self) -> None:
        """Have the kernel notice that a client has vanished, within about a minute also when nothing is written."""
        sock = self.transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
                if hasattr(socket, option):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), 5)

    def _probe_client(self) -> None:
        """TCP tells a closed connection from a half-closed one only when something is sent. Before an answer begins
        that is a 100 Continue: HTTP/1.1 allows any number of them."""
        begun = any(cycle.response_started and not cycle.response_complete for cycle in self._cycles)
        if not begun and self.cycle.scope["http_version"] == "1.1" and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._probe = self.loop.call_later(ECHO_SECONDS, self._end_if_closed)

    def _end_if_closed(self) -> None:
        """End the requests of a client that has closed its whole connection."""
        if self.transport.is_closing():
            return
        poller = select.poll()
        poller.register(self.transport.get_extra_info("socket").fileno(), 0)  # hang-ups and errors are always told
        if poller.poll(0):
            self.transport.abort()
        else:
            self._probe = self.loop.call_later(PROBE_SECONDS, self._probe_client)

    # The server is about to end.

    def say_farewell(self) -> None:
        """The next answer tells the client to close. Until then it cannot know, and may well send one more request: to
        close at once, be it right behind an answer, would break that. So a connection is closed by us only when it has
        been idle for so long that its client will hardly use it again."""
        self._last_call = True
        if self._is_idle and not self._head_bytes:  # else a request is under way, or arriving
            self._close_when_idle()

    def _close_when_idle(self) -> None:
        left = max(0.0, self._idle_since + LAST_CALL_SECONDS - self.loop.time())
        self._cancel_farewell()
        self._farewell = self.loop.call_later(left, self.timeout_keep_alive_handler)

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def is_open(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    def _cancel_farewell(self) -> None:
        if self._farewell is not None:
            self._farewell.cancel()
            self._farewell = None

    # Deadlines.

    def _expect_head(self) -> None:
        self._in_head, self._head_bytes = True, 0
        self._deadline = self.loop.call_later(HEAD_SECONDS, self._give_up, "the request's headers")

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _check_pace(self) -> None:
        if self.cycle is not None and self.cycle.response_started:
            return
        if self.flow.read_paused or self._body_bytes >= MIN_BODY_RATE * BODY_SECONDS:
            self._body_bytes = 0
            self._deadline = self.loop.call_later(BODY_SECONDS, self._check_pace)
        else:
            self._give_up("the request's body")

    def _give_up(self, what: str) -> None:
        self._answer(APIError(408, f"Waited too long for {what}; send faster", code="timeout"))

    def _refuse_head(self) -> None:
        self._answer(
            APIError(
                431, f"The request's headers are larger than {MAX_HEAD_BYTES} bytes; send less", code="head_too_large"
            )
        )

    def send_400_response(self, msg: str) -> None:
        if self._too_large:
            self._refuse_head()
        else:
            self._answer(APIError(400, f"Not valid HTTP: {msg}", code="invalid_http"))

    def _answer(self, error: APIError) -> None:
        """Written past the application, which has not seen a request; then the connection is closed."""
        if self.transport is None or self.transport.is_closing():
            return
        body = error.body
        head = (
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
