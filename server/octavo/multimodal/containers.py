"""The outside of image files: which format, how large, and whether the file is that image and nothing else.

Read before anything is decoded, so that what claims to be enormous costs nothing, and what is two files at once (an
image that is an archive, too) is not taken for either.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Literal

_CUT_SHORT = "image is cut short; send the whole file"
_NOT_ALONE = "image has {n} bytes behind its end, as files that are two things at once have; send the image alone"
# A frame of baseline, extended, progressive or lossless JPEG.
_FRAMES = frozenset({0xC0, 0xC1, 0xC2, 0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF})
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # within compressed data: the end of these
_COLOURS: dict[int, Literal["RGB", "RGBA", ""]] = {2: "RGB", 6: "RGBA"}
# Chunks of a PNG that change no pixel as Pillow reads them, and of text those that say how it is turned. Text that is
# compressed is Pillow's, which bounds what comes of it.
_PLAIN = frozenset(
    {b"IHDR", b"IDAT", b"IEND", b"bKGD", b"cHRM", b"gAMA", b"iCCP", b"pHYs", b"sBIT", b"sRGB", b"tEXt", b"tIME"}
)
_TURNED = (b"tEXtRaw profile type exif\0", b"tEXtXML:com.adobe.xmp\0")


class ImageError(ValueError):
    """The image cannot be used; one line for the client, without a library's words."""


@dataclass(frozen=True)
class Outline:
    """``format`` as Pillow calls it; width and height in pixels, as stored. ``plain``: the mode of a PNG whose bytes
    are its pixels', not turned, no palette and nothing transparent but by an alpha channel."""

    format: str
    width: int
    height: int
    plain: Literal["RGB", "RGBA", ""] = ""


def outline(data: bytes) -> Outline:
    """Identify the file. Raises ImageError unless it is one whole PNG, JPEG, WebP or GIF."""
    for magic, read in _READERS:
        if data.startswith(magic):
            try:
                return read(data)
            except (IndexError, struct.error):
                raise ImageError(_CUT_SHORT) from None
    raise ImageError("image is neither PNG, JPEG, WebP nor GIF; convert it")


def _end(data: bytes, end: int) -> None:
    if end > len(data):
        raise ImageError(_CUT_SHORT)
    if rest := data[end:].strip(b"\0\r\n"):
        raise ImageError(_NOT_ALONE.format(n=len(rest)))


def _png(data: bytes) -> Outline:
    width, height, depth, colours, _, _, interlaced = struct.unpack_from(">IIBBBBB", data, 16)
    at, is_plain = 8, depth == 8 and not interlaced
    while True:
        length, kind = struct.unpack_from(">I4s", data, at)
        is_plain &= kind in _PLAIN and not data.startswith(_TURNED, at + 4)
        at += 12 + length
        if kind == b"IEND":
            break
    _end(data, at)
    return Outline("PNG", width, height, _COLOURS.get(colours, "") if is_plain else "")


def _gif(data: bytes) -> Outline:
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at = 13 + _palette(flags)
    frame: tuple[int, int] | None = None
    while (kind := data[at]) != 0x3B:
        if kind == 0x21:
            at += 2
        elif kind == 0x2C:
            left, top, wide, high, local = struct.unpack_from("<HHHHB", data, at + 1)
            frame = frame or (max(width, left + wide), max(height, top + high))
            at += 11 + _palette(local)
        else:
            raise ImageError("image is damaged; send it again")
        while length := data[at]:
            at += 1 + length
        at += 1
    _end(data, at + 1)
    if frame is None:
        raise ImageError("image is a GIF without a picture; send another")
    return Outline("GIF", *(frame if width and height else (0, 0)))


def _palette(flags: int) -> int:
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _webp(data: bytes) -> Outline:
    (size,) = struct.unpack_from("<I", data, 4)
    if data[8:12] != b"WEBP":
        raise ImageError("image is neither PNG, JPEG, WebP nor GIF; convert it")
    kind = data[12:16]
    if kind == b"VP8X":
        width = 1 + int.from_bytes(data[24:27], "little")
        height = 1 + int.from_bytes(data[27:30], "little")
    elif kind == b"VP8L":
        bits = struct.unpack_from("<I", data, 21)[0]
        width, height = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    elif kind == b"VP8 ":
        width, height = (edge & 0x3FFF for edge in struct.unpack_from("<HH", data, 26))
    else:
        raise ImageError("image is damaged; send it again")
    _end(data, 8 + size + size % 2 if len(data) > 8 + size else 8 + size)
    return Outline("WEBP", width, height)


def _jpeg(data: bytes) -> Outline:
    size: tuple[int, int] | None = None
    at = 2
    while True:
        if data[at] != 0xFF:
            raise ImageError("image is damaged; send it again")
        marker = data[at + 1]
        if marker == 0xFF:  # padding
            at += 1
            continue
        at += 2
        if marker == 0xD9:
            break
        if 0xD0 <= marker <= 0xD8 or marker == 0x01:
            continue
        (length,) = struct.unpack_from(">H", data, at)
        if marker in _FRAMES and size is None:
            height, width = struct.unpack_from(">HH", data, at + 3)
            size = width, height
        at += length
        if marker == 0xDA:
            found = _MARKER.search(data, at)
            if found is None:
                raise ImageError(_CUT_SHORT)
            at = found.start()
    if size is None:
        raise ImageError("image is damaged; send it again")
    # Cameras put more pictures, or a short film, behind the first picture.
    if not data.startswith(b"\xff\xd8\xff", at) and data[at + 4 : at + 8] != b"ftyp":
        _end(data, at)
    return Outline("JPEG", *size)


_READERS = (
    (b"\x89PNG\r\n\x1a\n", _png),
    (b"\xff\xd8\xff", _jpeg),
    (b"RIFF", _webp),
    (b"GIF87a", _gif),
    (b"GIF89a", _gif),
)
