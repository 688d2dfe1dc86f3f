"""The header of a file of weights on a server, and nothing behind it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from octavo.errors import ModelError

_FIRST_PIECE = 16 << 10  # bytes of a file whose header is wanted; most have no longer one
_MAX_HEADER = 100 << 20


def get_header(read: Callable[[int, int], bytes], size: int | None, into: Path) -> None:
    """Write the header of a safetensors or GGUF file to ``into``, which gets the file's ``size``, but takes no room
    for the rest. ``read(first, last)``: these bytes of the file, or up to its end. Raises ModelError."""
    have, wanted = b"", _FIRST_PIECE
    while wanted:
        piece = read(len(have), len(have) + wanted - 1)
        have += piece
        with open(into, "wb") as out:
            out.write(have)
            out.truncate(max(size or 0, len(have)))
        wanted = _missing(into, have) if piece else 0


def _missing(file: Path, have: bytes) -> int:
    """Return the number of bytes still to read of ``file``, which begins with ``have``, for its header; 0 if
    complete."""
    if file.suffix == ".safetensors":
        length = int.from_bytes(have[:8], "little")
        if length > _MAX_HEADER:
            raise ModelError(f"{file.name} is no safetensors file: its header would take {length} bytes")
        return max(0, 8 + length - len(have))
    from octavo.gguf.header import GGUFFile

    if len(have) > _MAX_HEADER or not have.startswith(b"GGUF"):
        raise ModelError(f"{file.name} is no GGUF file, or its header does not end")
    with contextlib.suppress(ModelError):
        return len(have) if GGUFFile(file).header_bytes > len(have) else 0
    return len(have)
