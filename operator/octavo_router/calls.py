"""A server of gRPC calls for Envoy alone: one method, messages both ways, over HTTP/2 without TLS (RFC 9113).

A request costs a tenth of what it does in a general library for gRPC, which is most of what a pick costs. It can be
this short because of who asks: calls are not told apart, so the fields of their heads are not read, and answers are far
smaller than the windows that Envoy opens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol, cast

from octavo_router.frames import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PADDED,
    PING,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    FrameError,
    Frames,
    frame,
)

INTERNAL, UNIMPLEMENTED = 13, 12  # gRPC's status codes
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_MESSAGE_HEAD = 5  # bytes
_MAX_WINDOW, _FIRST_WINDOW = 2**31 - 1, 2**16 - 1
_INITIAL_WINDOW_SIZE = 4  # a setting
# Fields in HPACK's plainest form, which needs no state (RFC 7541): ":status: 200" and "content-type" by their numbers.
_HEAD = b"\x88\x0f\x10\x10application/grpc"
_STATUS = b"\x00\x0bgrpc-status"
logger = logging.getLogger(__name__)


class Call(Protocol):
    """The handler of one call."""

    def received(self, message: bytes) -> None:
        """A message has come. An error ends the call with INTERNAL."""

    def closed(self) -> None:
        """The call is over, whoever ended it. Comes once, and nothing after it."""


class Stream:
    """The way back of one call. Both methods are without effect once it is over."""

    def __init__(self, connection: Connection, number: int) -> None:
        self._connection, self._number = connection, number
        self._has_begun = False
        self.data = bytearray()  # that has come, and is no whole message yet
        self.call: Call | None = None

    def send(self, message: bytes) -> None:
        """A message to the caller."""
        if self.call:
            framed = b"\0" + len(message).to_bytes(4) + message
            self._connection.write(self._begin() + frame(DATA, 0, self._number, framed))

    def finish(self, status: int = 0) -> None:
        """Ends the call; the caller gets the status."""
        if self.call:
            code = str(status).encode()
            fields = (b"" if self._has_begun else _HEAD) + _STATUS + bytes([len(code)]) + code
            self._connection.write(frame(HEADERS, END_HEADERS | END_STREAM, self._number, fields))
            self._connection.forget(self._number)

    def _begin(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        return frame(HEADERS, END_HEADERS, self._number, _HEAD)


class Connection(asyncio.Protocol):
    """One of Envoy's. `answer` makes what answers a call when it begins."""

    def __init__(self, answer: Callable[[Stream], Call]) -> None:
        self._answer = answer
        self._transport: asyncio.Transport | None = None
        self._frames = Frames()
        self._greeting, self._has_greeted = b"", False
        self._unread_window = 0  # bytes that were read and not given back to the peer's window
        self._streams: dict[int, Stream] = {}
        self._newest = 0  # number of a stream

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Opens the windows for what comes."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of no class of asyncio's
        settings = _INITIAL_WINDOW_SIZE.to_bytes(2) + _MAX_WINDOW.to_bytes(4)
        self.write(frame(SETTINGS, 0, 0, settings) + _wider(_MAX_WINDOW - _FIRST_WINDOW))

    def connection_lost(self, _: Exception | None) -> None:
        """End its calls."""
        for number in list(self._streams):
            self.forget(number)

    def write(self, data: bytes) -> None:
        """Send bytes to the peer."""
        if self._transport:
            self._transport.write(data)

    def forget(self, number: int) -> None:
        """A stream is over."""
        stream = self._streams.pop(number, None)
        if stream and stream.call:
            call, stream.call = stream.call, None
            call.closed()

    def data_received(self, data: bytes) -> None:
        """Frames, in whatever pieces."""
        if not self._has_greeted:
            data = self._greeting + data
            if len(data) < len(_PREFACE):
                self._greeting = data
                return
            if not data.startswith(_PREFACE):
                return self._refuse("no HTTP/2")
            self._has_greeted, data = True, data[len(_PREFACE) :]
        try:
            for kind, flags, stream, payload in self._frames.feed(data):
                self._frame_received(kind, flags, stream, payload)
        except FrameError as error:
            self._refuse(str(error))

    def _refuse(self, why: str) -> None:
        logger.warning("a connection that is none of Envoy's is closed: %s", why)
        if self._transport:
            self._transport.close()

    def _frame_received(self, kind: int, flags: int, number: int, payload: memoryview) -> None:
        if kind == DATA:
            self._widen(len(payload))
            if stream := self._streams.get(number):
                stream.data += payload[1 : len(payload) - payload[0]] if flags & PADDED else payload
                self._messages(stream)
        elif kind == HEADERS and number > self._newest:
            self._newest = number
            stream = self._streams[number] = Stream(self, number)
            stream.call = self._answer(stream)
        elif kind == RST_STREAM:
            self.forget(number)
        elif kind == SETTINGS and not flags & ACK:
            self.write(frame(SETTINGS, ACK, 0, b""))
        elif kind == PING and not flags & ACK:
            self.write(frame(PING, ACK, 0, bytes(payload)))
        if kind in (DATA, HEADERS) and flags & END_STREAM and (ended := self._streams.get(number)):
            ended.finish()

    def _messages(self, stream: Stream) -> None:
        while stream.call and len(stream.data) >= _MESSAGE_HEAD:
            end = _MESSAGE_HEAD + int.from_bytes(stream.data[1:_MESSAGE_HEAD])
            if len(stream.data) < end:
                return
            is_compressed = stream.data[0]
            with memoryview(stream.data) as view:
                message = bytes(view[_MESSAGE_HEAD:end])  # one copy: bodies have up to 32 MiB
            del stream.data[:end]
            if is_compressed:
                return stream.finish(UNIMPLEMENTED)
            try:
                stream.call.received(message)
            except Exception:
                logger.exception("a call failed")
                stream.finish(INTERNAL)

    def _widen(self, many: int) -> None:
        """Bodies are as large as Envoy lets them be: the window stays open. A stream's own is never used up."""
        self._unread_window += many
        if self._unread_window > _MAX_WINDOW // 4:
            self.write(_wider(self._unread_window))
            self._unread_window = 0


def _wider(many: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, 0, many.to_bytes(4))


async def serve(answer: Callable[[Stream], Call], port: int) -> asyncio.Server:
    """Serve on loopback. `answer` creates the handler of a call when it begins."""
    return await asyncio.get_running_loop().create_server(lambda: Connection(answer), "127.0.0.1", port)
