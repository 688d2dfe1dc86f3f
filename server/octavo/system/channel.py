"""The connection of front end and core, and of core and ranks: length-prefixed frames over a socket pair, one end of
which the child inherits.

There is no address that another process could connect to, and no thread: on two CPUs that all processes share, waking
one for every message costs more than the message.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum, unique

_HEAD = struct.Struct("=IB")  # bytes of the payload, kind
_READ_BYTES = 1 << 18
_LOOK_SECONDS = 50e-6


@unique
class Kind(IntEnum):
    """Kinds of messages."""

    # to the core
    ADD = 0
    ABORT = 1
    FINISH_SAMPLES = 2
    BLOCKS_OF = 6
    LOAD_ADAPTER = 21
    # from the core
    READY = 3
    FAILED = 4
    OUTPUTS = 5
    BLOCKS = 7
    ADAPTER = 22
    # to a rank
    STEP = 8
    MASK = 9
    # from a rank, which says READY too
    SUM = 10
    RESULTS = 14
    # between nodes
    JOIN = 11
    BEAT = 12
    TENSOR = 13
    # between the core and a worker in a process of its own
    RESULT = 15
    GRAMMAR = 16
    GRAMMARS = 17


def frame(kind: Kind, payload: bytes) -> bytes:
    """A message as bytes."""
    return _HEAD.pack(len(payload), kind) + payload


class Frames:
    """Reassembles frames from received data."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        """Add received data."""
        self._data += data

    def take(self) -> tuple[Kind, bytearray] | None:
        """The next frame that is complete: its kind and payload."""
        if len(self._data) < _HEAD.size:
            return None
        size, kind = _HEAD.unpack_from(self._data)
        end = _HEAD.size + size
        if len(self._data) < end:
            return None
        payload = self._data[_HEAD.size : end]
        del self._data[:end]
        return Kind(kind), payload


class Channel:
    """One end. Sending never blocks: what a slow or stopped reader does not read is buffered."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._frames = Frames()
        self._unsent = bytearray()
        self._poll = select.poll()

    def send(self, kind: Kind, payload: bytes) -> None:
        """Queue a message and send what the socket takes."""
        self.send_frame(frame(kind, payload))

    def send_frame(self, data: bytes) -> None:
        """`send` for a message that `frame` has made."""
        self._unsent += data
        self._push()

    def _push(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except ConnectionError:  # the reader has gone; `receive` reports it
            self._unsent.clear()

    def receive(self) -> Iterator[tuple[Kind, bytearray]]:
        """The frames that have arrived. Raises EOFError when the other end is closed."""
        size = _READ_BYTES
        while size == _READ_BYTES:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except ConnectionError:
                data = b""
            if not data:
                raise EOFError("the other end is closed")
            size = len(data)
            self._frames.feed(self._decode(data))
        while found := self._frames.take():
            yield found

    def _decode(self, data: bytes) -> bytes:
        """Return what received ``data`` means. Raises EOFError for what the other end did not send."""
        return data

    def wait(self, seconds: float | None = None, others: Sequence[int] = ()) -> bool:
        """Wait for something to receive, here or from the descriptors ``others``; False after ``seconds`` without.
        Sends what is buffered meanwhile."""
        until = None if seconds is None else time.monotonic() + seconds
        poll = select.poll() if others else self._poll
        for descriptor in others:
            poll.register(descriptor, select.POLLIN)
        while True:
            poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            left = None if until is None else max(0.0, until - time.monotonic()) * 1e3
            events = poll.poll(left)
            if not events:
                return False
            if any(event & ~select.POLLOUT for _, event in events):
                return True
            self._push()

    def wait_unless(self, done: Callable[[], bool]) -> None:
        """Wait for something to receive, or until ``done``, which is asked every `_LOOK_SECONDS`."""
        while not done() and not self.wait(0.0):
            time.sleep(_LOOK_SECONDS)

    def flush(self, seconds: float) -> bool:
        """Wait until everything is sent, at most ``seconds``; whether it is."""
        until = time.monotonic() + seconds
        while self._unsent and time.monotonic() < until:
            self._poll.register(self._socket, select.POLLOUT)
            self._poll.poll(max(0.0, until - time.monotonic()) * 1e3)
            self._push()
        return not self._unsent

    def fileno(self) -> int:
        """Return the socket's file descriptor."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the connection, under whoever waits for it too."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # closed already
            pass
