"""What is a picture is decoded, what is not is refused in one line, before it costs anything."""

from __future__ import annotations

import io
import struct
import sys
import zipfile
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps, ImageSequence
from support.images import MODES, image_of, odd_images

from octavo.multimodal.containers import ImageError
from octavo.multimodal.decode import decode


def saved(image: Image.Image, format: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_claiming(width: int, height: int, data: bytes = b"") -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", data or zlib.compress(b"\0" * 64)) + chunk(b"IEND", b"")


def filtered_png(mode: str, width: int, height: int, rng: np.random.Generator, *chunks: bytes) -> bytes:
    """Rows of every filter, on random bytes, which any PNG may have; in several IDAT chunks."""
    channels = len(mode)
    rows = rng.integers(0, 256, (height, 1 + channels * width), np.uint8)
    rows[:, 0] = rng.integers(0, 5, height)
    data = zlib.compress(rows.tobytes(), 1)
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2 if channels == 3 else 6, 0, 0, 0))
    parts = [chunk(b"IDAT", data[at : at + 5_000]) for at in range(0, len(data), 5_000)]
    return b"\x89PNG\r\n\x1a\n" + head + b"".join((*chunks, *parts)) + chunk(b"IEND", b"")


def archive() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        file.writestr("run.js", "alert(1)")
    return out.getvalue()


PICTURE = image_of("RGB", 61, 43, np.random.default_rng(0))
PNG, JPEG = saved(PICTURE, "PNG"), saved(PICTURE, "JPEG")
WEBP, LOSSLESS, GIF = saved(PICTURE, "WEBP"), saved(PICTURE, "WEBP", lossless=True), saved(PICTURE.quantize(8), "GIF")
BASELINE, SVG = JPEG.index(b"\xff\xc0"), b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'


def with_jpeg_size(width: int, height: int) -> bytes:
    return JPEG[: BASELINE + 5] + struct.pack(">HH", height, width) + JPEG[BASELINE + 9 :]


def with_gif_size(width: int, height: int) -> bytes:
    at = GIF.index(b"\x2c\0\0\0\0") + 5
    return GIF[:6] + struct.pack("<HH", width, height) + GIF[10:at] + struct.pack("<HH", width, height) + GIF[at + 4 :]


def extended_webp(width: int, height: int) -> bytes:
    body = b"VP8X" + struct.pack("<II", 10, 0) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body += WEBP[12:]
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WEBP" + body


BAD = {
    "nothing": b"",
    "one byte": b"\x89",
    "text": b"hello, this is no image",
    "html": b"<html><img></html>",
    "svg": SVG,
    "svg with xml": b'<?xml version="1.0"?>' + SVG,
    "pdf": b"%PDF-1.7 ",
    "zip": archive(),
    "bmp": saved(PICTURE, "BMP"),
    "tiff": saved(PICTURE, "TIFF"),
    "ico": saved(PICTURE, "ICO"),
    "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    "riff without webp": b"RIFF\4\0\0\0WAVE",
    "png, header alone": PNG[:8],
    "png, half of ihdr": PNG[:20],
    "png, half": PNG[: len(PNG) // 2],
    "png without its end": PNG[:-12],
    "png with a byte missing": PNG[:-1],
    "jpeg, two bytes": JPEG[:3],
    "jpeg, half": JPEG[: len(JPEG) // 2],
    "jpeg without its end": JPEG[:-2],
    "webp, header alone": WEBP[:12],
    "webp, half": WEBP[: len(WEBP) // 2],
    "gif, header alone": GIF[:6],
    "gif, half": GIF[: len(GIF) // 2],
    "gif without its end": GIF[:-1],
    "png and zip": PNG + archive(),
    "jpeg and zip": JPEG + archive(),
    "gif and zip": GIF + archive(),
    "webp and zip": WEBP + archive(),
    "png and html": PNG + b"<script>alert(1)</script>",
    "gif that is javascript": b"GIF89a/*" + GIF[8:] + b"*/=1;alert(1)",
    "jpeg and php": JPEG + b"<?php system('id');",
    "png of 0 x 9": png_claiming(0, 9),
    "png of 9 x 0": png_claiming(9, 0),
    "jpeg of 0 x 9": with_jpeg_size(0, 9),
    "gif of 0 x 0": with_gif_size(0, 0),
    "png bomb": png_claiming(100_000, 100_000),
    "png of 179 megapixels and more": png_claiming(16_384, 16_000),
    "png one pixel too wide": png_claiming(16_385, 1),
    "jpeg bomb": with_jpeg_size(65_000, 65_000),
    "gif bomb": with_gif_size(65_535, 65_535),
    "webp bomb": extended_webp(16_000_000, 16_000_000),
    "png of noise": png_claiming(9, 9, b"\xff" * 99),
    "png whose pixels are missing": png_claiming(4_000, 4_000),
    "gif without a picture": GIF[:13] + b"\x3b",
    "jpeg of damaged tables": JPEG[:24] + b"\0" * 200 + JPEG[224:],
}


@pytest.mark.parametrize("name", BAD)
def test_incomplete_pictures_are_refused_in_one_line(name: str) -> None:
    with pytest.raises(ImageError) as refused:
        decode(BAD[name])
    text = str(refused.value)
    assert "\n" not in text and text.startswith("image ") and len(text) < 200
    for word in ("PIL", "Pillow", "cannot identify", "OSError", "zlib", "0x7f"):
        assert word not in text


@pytest.mark.parametrize("data", [PNG, LOSSLESS], ids=["png", "webp"])
def test_pixels_survive_with_and_without_a_faster_decoder(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    assert np.array_equal(np.asarray(decode(data)), np.asarray(PICTURE))
    monkeypatch.setitem(sys.modules, "kornia_rs.io", None)
    assert np.array_equal(np.asarray(decode(data)), np.asarray(PICTURE))


def test_modes_and_turns_are_those_of_pillow() -> None:
    seen = set()
    for title, image in odd_images(40):
        form = "JPEG" if image.mode in ("CMYK", "YCbCr") else "PNG"
        exif = Image.Exif()
        exif[0x0112] = 1 + image.width % 8
        data = saved(image, form, exif=exif)
        expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        found = decode(data)
        assert found.mode == expected.mode, title
        assert np.array_equal(np.asarray(found), np.asarray(expected)), title
        seen.add(image.mode)
    assert seen >= set(MODES) - {"YCbCr", "PA"}


@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_a_plain_png_needs_no_pillow_and_has_its_pixels(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As most programs write it: bytes of RGB or RGBA, and text beside them that says nothing of its turning."""
    pytest.importorskip("kornia_rs")
    rng = np.random.default_rng(0)
    more = chunk(b"pHYs", struct.pack(">IIB", 3_000, 3_000, 1)), chunk(b"tEXt", b"Software\0Orientation 6")
    for width, height in ((1, 1), (1, 40), (40, 1), (97, 33), *rng.integers(1, 300, (20, 2)).tolist()):
        data = filtered_png(mode, width, height, rng, *more)
        expected = Image.open(io.BytesIO(data))
        expected.load()
        with monkeypatch.context() as patch:
            patch.setattr(Image, "open", lambda *_, **__: pytest.fail("Pillow is asked"))
            found = decode(data)
        assert found.mode == expected.mode == mode
        assert np.array_equal(np.asarray(found), np.asarray(expected))


XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/" xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="6"/>'


@pytest.mark.parametrize(
    "more",
    [
        chunk(b"eXIf", b"MM\0*\0\0\0\x08\0\1\1\x12\0\3\0\0\0\1\0\6\0\0\0\0\0\0"),
        chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP),
        chunk(
            b"zTXt",
            b"Raw profile type exif\0\0"
            + zlib.compress(
                b"\nexif\n 32\n" + (b"4578696600004d4d002a000000080001011200030000000100060000000000000000")
            ),
        ),
        chunk(b"tRNS", struct.pack(">HHH", 1, 2, 3)),
    ],
    ids=["EXIF", "XMP", "EXIF as text", "a transparent colour"],
)
def test_changes_of_a_png_s_pixels_are_seen(more: bytes) -> None:
    data = filtered_png("RGB", 30, 20, np.random.default_rng(1), more)
    expected, found = ImageOps.exif_transpose(Image.open(io.BytesIO(data))), decode(data)
    assert found.size == expected.size and found.info.get("transparency") == expected.info.get("transparency")
    assert found.size == (20, 30) or found.info["transparency"] == (1, 2, 3)
    assert np.array_equal(np.asarray(found), np.asarray(expected))


@pytest.mark.parametrize("kind", [b"zTXtComment\0\0", b"iTXtComment\0\1\0\0\0"], ids=["zTXt", "iTXt"])
def test_a_png_whose_comment_is_enormous_is_refused(kind: bytes) -> None:
    comment = chunk(kind[:4], kind[4:] + zlib.compress(bytes(100_000_000), 9))
    with pytest.raises(ImageError, match="damaged"):
        decode(filtered_png("RGB", 30, 20, np.random.default_rng(1), comment))


def test_an_animated_gif_gives_its_first_frame() -> None:
    frames = [Image.new("RGB", (20, 10), colour) for colour in ("red", "green", "blue")]
    data = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert len(list(ImageSequence.Iterator(Image.open(io.BytesIO(data))))) == 3
    assert decode(data).convert("RGB").getpixel((5, 5)) == (255, 0, 0)


def test_pictures_behind_a_jpeg_are_left_alone() -> None:
    assert decode(JPEG + JPEG).size == PICTURE.size
    assert decode(JPEG + b"\0\0\0\x18ftypmp42" + b"x" * 99).size == PICTURE.size


def test_exif_data_that_cannot_be_read_turn_nothing() -> None:
    data = JPEG[:2] + b"\xff\xe1" + struct.pack(">H", 40) + b"Exif\0\0" + b"\xff" * 32 + JPEG[2:]
    assert decode(data).size == PICTURE.size
