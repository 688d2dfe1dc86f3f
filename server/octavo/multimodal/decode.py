"""Decode images from files' bytes. Decoding may take long, so it does not run in the server's event loop."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING

from octavo.multimodal.containers import ImageError, Outline, outline

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_SIDE = 16_384  # pixels
MAX_PIXELS = 179_000_000
_MOST_PLAIN = 32_000_000  # pixels: a plain PNG is there twice for a moment


def decode(data: bytes) -> Image:
    """The image in a file, of an animated one the first frame, turned as its EXIF data say, in whatever mode it is.

    Raises ImageError: what is no whole PNG, JPEG, WebP or GIF, has no pixels, or more than the limits, which the header
    tells before anything is decoded.
    """
    form = outline(data)
    if not form.width or not form.height:
        raise ImageError(f"image is {form.width} x {form.height} pixels; it must have some")
    if max(form.width, form.height) > MAX_SIDE or form.width * form.height > MAX_PIXELS:
        raise ImageError(
            f"image is {form.width} x {form.height} pixels, and at most {MAX_SIDE} a side and "
            f"{MAX_PIXELS // 10**6} million in all are taken; scale it down"
        )
    if form.plain and form.width * form.height <= _MOST_PLAIN and (image := _plain(data, form)):
        return image
    from PIL import Image as Pillow

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of sizes within our own limits
            image = Pillow.open(io.BytesIO(data), formats=(form.format,))
            if max(image.size) > MAX_SIDE or image.width * image.height > MAX_PIXELS:
                raise ImageError("image has two sizes; send another")
            image.load()
    except (ImageError, MemoryError):
        raise
    except Exception:  # whatever a decoder raises; its words are not for clients
        raise ImageError("image is damaged; send it again") from None
    return turned(image)


def _plain(data: bytes, form: Outline) -> Image | None:
    """A plain PNG by kornia-rs, in 0.4 times Pillow's time. None: it is not there, or finds the file damaged, of which
    Pillow is the judge."""
    from PIL import Image as Pillow

    try:
        from kornia_rs.io import decode_image_png_u8
    except ImportError:  # it is not needed
        return None
    try:
        return Pillow.fromarray(decode_image_png_u8(data, (form.height, form.width), form.plain.lower()))
    except (KeyboardInterrupt, MemoryError):
        raise
    except BaseException:  # a panic in Rust is no Exception
        return None


def turned(image: Image) -> Image:
    """The image, turned as its EXIF data say."""
    from PIL import ImageOps

    try:
        upright: Image = ImageOps.exif_transpose(image)
    except MemoryError:
        raise
    except Exception:  # EXIF data that cannot be read say nothing
        return image
    return upright
