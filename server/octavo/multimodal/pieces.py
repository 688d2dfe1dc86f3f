"""Bytes in pieces, as they arrived."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Pieces:
    """The bytes of a file, or of a long text in UTF-8. They are never put together in a process with an event loop:
    copying megabytes holds the interpreter, and with it the loop, for milliseconds. Only ``str`` and ``bytes`` do."""

    pieces: Sequence[bytes]  # none of them empty

    def __len__(self) -> int:
        return sum(map(len, self.pieces))

    def __bytes__(self) -> bytes:
        return b"".join(self.pieces)

    def __str__(self) -> str:
        return bytes(self).decode(errors="replace")

    def begin(self, size: int) -> str:
        """The first ``size`` letters; of a text that is no ASCII, about as many."""
        found = b""
        for piece in self.pieces:
            found += piece[: size - len(found)]
            if len(found) == size:
                break
        return found.decode(errors="replace")
