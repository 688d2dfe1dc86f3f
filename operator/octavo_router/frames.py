"""HTTP/2's frames from the bytes of a connection (RFC 9113). Pure.

Bodies are what nearly all bytes are, and Envoy sends them in frames of 16 KiB, whatever it is offered: their bytes are
passed on as views of what was read, as soon as they are here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 3, 4, 6, 8  # types
END_STREAM, ACK, END_HEADERS, PADDED = 1, 1, 4, 8  # flags
MAX_PAYLOAD = 2**14  # bytes: what a peer may send that was told nothing else
_HEAD = struct.Struct(">HBBBL")  # the payload's length in three bytes, type, flags, stream
_STREAM = 2**31 - 1  # the highest bit is nobody's
Frame = tuple[int, int, int, memoryview]  # type, flags, stream, payload


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """One frame to send."""
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


class FrameError(Exception):
    """An error of a peer: it sent a frame larger than it was told it may."""


class Frames:
    """Takes apart what comes, in whatever pieces."""

    def __init__(self) -> None:
        self._rest = b""  # of a frame that is not here yet, or not its head
        self._part: tuple[int, int, int] | None = None  # of DATA that was told in part: flags, stream, missing bytes

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that are whole with these bytes. A DATA frame without padding may be told as several, of which the
        last has the flags. Raises FrameError."""
        data = self._rest + data if self._rest else data
        self._rest, at, view = b"", 0, memoryview(data)
        if self._part:
            flags, stream, left = self._part
            at = min(left, len(data))
            self._part = (flags, stream, left - at) if at < left else None
            if at:
                yield DATA, 0 if self._part else flags, stream, view[:at]
        while len(data) - at >= _HEAD.size:
            high, low, kind, flags, stream = _HEAD.unpack_from(data, at)
            length, begin = high << 8 | low, at + _HEAD.size
            if length > MAX_PAYLOAD:
                raise FrameError(f"a frame of {length} bytes")
            end, stream = begin + length, stream & _STREAM
            if end > len(data):
                if kind != DATA or flags & PADDED:
                    break
                self._part = flags, stream, end - len(data)
                flags, end = 0, len(data)
            at = end
            yield kind, flags, stream, view[begin:end]
        if at < len(data):
            self._rest = data[at:]
