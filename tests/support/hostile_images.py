"""Files that claim to be images, and are not, or are too much of one."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator

import numpy as np
from PIL import Image


def image(form: str, seed: int = 1, width: int = 40, height: int = 50) -> bytes:
    """A small image that is well."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, form)
    return out.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    """Of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, data: bytes = b"", *more: bytes, depth: int = 8, color: int = 2) -> bytes:
    """A PNG of any claimed size around compressed ``data``."""
    head = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + b"".join(more) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def with_size(form: str, width: int, height: int) -> bytes:
    """A small image whose header claims another size."""
    data = bytearray(image(form))
    if form == "GIF":
        at = data.index(b"\x2c\0\0\0\0") + 5
        data[at : at + 4] = struct.pack("<HH", width, height)
    elif form == "JPEG":
        at = next(i for i in range(len(data)) if data[i] == 0xFF and data[i + 1] == 0xC0) + 5
        data[at : at + 4] = struct.pack(">HH", height, width)
    elif form == "WEBP":
        data[26:30] = struct.pack("<HH", width, height)
    return bytes(data)


def webp_canvas(width: int, height: int) -> bytes:
    """An extended WebP of any claimed size."""
    canvas = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBP" + b"VP8X" + struct.pack("<I", 10) + bytes(4) + canvas
    return b"RIFF" + struct.pack("<I", len(body)) + body


def hostile_files() -> Iterator[tuple[str, bytes, str]]:
    """(what it is, the file, words of the error)."""
    yield "nothing", b"", "neither PNG"
    yield "0 x 5", png(0, 5), "0 x 5 pixels"
    yield "5 x 0", png(5, 0), "5 x 0 pixels"
    yield "0 x 0 GIF", with_size("GIF", 0, 0)[:6] + bytes(4) + image("GIF")[10:], "pixels"
    yield "60,000 pixels wide", png(60_000, 60_000), "16384 a side"
    yield "2^31 pixels wide", png(2**31 - 1, 2**31 - 1), "16384 a side"
    yield "268 megapixels", png(16_384, 16_384), "million in all"
    yield "a GIF's huge picture on a small screen", with_size("GIF", 65_535, 65_535), "16384 a side"
    yield "a JPEG of 65,500 a side", with_size("JPEG", 65_500, 65_500), "16384 a side"
    yield "a WebP of 16,383 a side", with_size("WEBP", 16_383, 16_383), "million in all"
    yield "a WebP with a canvas of 2^24", webp_canvas(2**24, 2**24), "16384 a side"
    text = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(100_000_000), 9))
    rows = zlib.compress(b"".join(b"\0" + bytes(30) for _ in range(10)))
    yield "a PNG whose comment is 100 MB", png(10, 10, rows, text), "damaged"
    profile = chunk(b"iCCP", b"x\0\0" + zlib.compress(bytes(100_000_000), 9))
    yield "a PNG whose colour profile is 100 MB", png(10, 10, zlib.compress(b"\0"), profile), "damaged"
    yield "a PNG with too little in it", png(300, 300, zlib.compress(b"\0" * 10)), "damaged"
    yield "a PNG whose data are no zlib", png(10, 10, b"not compressed"), "damaged"
    yield "a PNG of depth 7", png(10, 10, rows, depth=7), "damaged"
    for form in ("PNG", "JPEG", "WEBP", "GIF"):
        whole = image(form)
        yield f"half a {form}", whole[: len(whole) // 2], "cut short"
        yield f"a {form} that is an archive, too", whole + b"PK\3\4" + bytes(20) + b"archive", "behind its end"
    yield "the beginning of a PNG", b"\x89PNG\r\n\x1a\n", "cut short"
    yield "a PNG with HTML behind it", image("PNG") + b"<script>alert(1)</script>", "behind its end"
    yield "a PDF around an image", b"%PDF-1.7\n" + image("JPEG"), "neither PNG"
    yield "an SVG", b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>', "neither PNG"
    yield "an SVG with a head", b'<?xml version="1.0"?><!DOCTYPE svg [<!ENTITY a SYSTEM "file:///x">]><svg/>', "neither"
    yield "PostScript", b"%!PS-Adobe-3.0 EPSF-3.0\n(%pipe%id) (r) file\n", "neither PNG"
    yield "a page", b"<!doctype html><title>image</title>", "neither PNG"
    yield "a program", b"\x7fELF" + bytes(100), "neither PNG"
    yield "a sound as RIFF", b"RIFF\x24\0\0\0WAVEfmt " + bytes(28), "neither PNG"
    for form in ("TIFF", "BMP", "ICO", "PPM"):
        yield f"a {form}", image(form), "neither PNG"
    yield "a url in a file", b"data:image/png;base64,iVBORw0KGgo=", "neither PNG"
