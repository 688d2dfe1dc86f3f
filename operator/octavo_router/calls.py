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

INTERNAL, UNIMPLEMENTED = 13, 12  # gRPC's status codes
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 8  # types of frames
_END_STREAM, _ACK, _END_HEADERS, _PADDED = 1, 1, 4, 8  # flags
_FRAME_HEAD, _MESSAGE_HEAD = 9, 5  # bytes
_MAX_FRAME = 2**14  # bytes: what a peer may send that was told nothing else
_MAX_WINDOW, _FIRST_WINDOW = 2**31 - 1, 2**16 - 1
_INITIAL_WINDOW_SIZE = 4  # a setting
# Fields in HPACK's plainest form, which needs no state (RFC 7541): ":status: 200" and "content-type" by their numbers.
_HEAD = b"\x88\x0f\x10\x10application/grpc"
_STATUS = b"\x00\x0bgrpc-status"
logger = logging.getLogger(__name__)


class Call(Protocol):
    """What answers one call."""

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
            self._connection.write(self._begin() + _frame(_DATA, 0, self._number, framed))

    def finish(self, status: int = 0) -> None:
        """Ends the call; the caller gets the status."""
        if self.call:
            code = str(status).encode()
            fields = (b"" if self._has_begun else _HEAD) + _STATUS + bytes([len(code)]) + code
            self._connection.write(_frame(_HEADERS, _END_HEADERS | _END_STREAM, self._number, fields))
            self._connection.forget(self._number)

    def _begin(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        return _frame(_HEADERS, _END_HEADERS, self._number, _HEAD)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


class Connection(asyncio.Protocol):
    """One of Envoy's. `answer` makes what answers a call when it begins."""

    def __init__(self, answer: Callable[[Stream], Call]) -> None:
        self._answer = answer
        self._transport: asyncio.Transport | None = None
        self._data = bytearray()
        self._has_greeted = False
        self._unread_window = 0  # bytes that were read and not given back to the peer's window
        self._streams: dict[int, Stream] = {}
        self._newest = 0  # number of a stream

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Opens the windows for what comes."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of no class of asyncio's
        settings = _INITIAL_WINDOW_SIZE.to_bytes(2) + _MAX_WINDOW.to_bytes(4)
        self.write(_frame(_SETTINGS, 0, 0, settings) + _wider(_MAX_WINDOW - _FIRST_WINDOW))

    def connection_lost(self, _: Exception | None) -> None:
        """Its calls are over."""
        for number in list(self._streams):
            self.forget(number)

    def write(self, data: bytes) -> None:
        """To the peer."""
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
        self._data += data
        at = 0
        if not self._has_greeted:
            if len(self._data) < len(_PREFACE):
                return
            if not self._data.startswith(_PREFACE):
                return self._refuse("no HTTP/2")
            self._has_greeted, at = True, len(_PREFACE)
        while len(self._data) - at >= _FRAME_HEAD:
            length = int.from_bytes(self._data[at : at + 3])
            if length > _MAX_FRAME:
                return self._refuse(f"a frame of {length} bytes")
            if len(self._data) - at < _FRAME_HEAD + length:
                break
            kind, flags = self._data[at + 3], self._data[at + 4]
            stream = int.from_bytes(self._data[at + 5 : at + 9]) & _MAX_WINDOW
            at += _FRAME_HEAD
            self._frame_received(kind, flags, stream, self._data[at : at + length])
            at += length
        del self._data[:at]

    def _refuse(self, why: str) -> None:
        logger.warning("a connection that is none of Envoy's is closed: %s", why)
        self._data.clear()
        if self._transport:
            self._transport.close()

    def _frame_received(self, kind: int, flags: int, number: int, payload: bytearray) -> None:
        if kind == _DATA:
            self._widen(len(payload))
            if stream := self._streams.get(number):
                stream.data += payload[1 : len(payload) - payload[0]] if flags & _PADDED else payload
                self._messages(stream)
        elif kind == _HEADERS and number > self._newest:
            self._newest = number
            stream = self._streams[number] = Stream(self, number)
            stream.call = self._answer(stream)
        elif kind == _RST_STREAM:
            self.forget(number)
        elif kind == _SETTINGS and not flags & _ACK:
            self.write(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING and not flags & _ACK:
            self.write(_frame(_PING, _ACK, 0, bytes(payload)))
        if kind in (_DATA, _HEADERS) and flags & _END_STREAM and (ended := self._streams.get(number)):
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
    return _frame(_WINDOW_UPDATE, 0, 0, many.to_bytes(4))


async def serve(answer: Callable[[Stream], Call], port: int) -> asyncio.Server:
    """On loopback. `answer` makes what answers a call when it begins."""
    return await asyncio.get_running_loop().create_server(lambda: Connection(answer), "127.0.0.1", port)
