"""Pixels as transformers' Pillow backend computes them: Pillow resizes bytes, the rest is a table of 256 values.

Neither Pillow nor numpy is imported before an image is processed, here and in the processors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
_PADDED = 1 << 12  # pixels of a padded square's side at most, far above what any tower sees
BILINEAR, BICUBIC, LANCZOS = 2, 3, 1
_MOST_RESIZED = 100_000_000  # pixels


def to_rgb(image: Image) -> Image:
    """The image in mode RGB, what is transparent on white."""
    from PIL import Image as Pillow

    if image.mode == "RGB" and image.info.get("transparency") is None:
        return image
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    background = Pillow.new("RGBA", image.size, (255, 255, 255, 255))
    return Pillow.alpha_composite(background, image.convert("RGBA")).convert("RGB")


def resize(image: Image, height: int, width: int, resample: int) -> Image:
    """The image in another size; ``resample`` is Pillow's number of the filter. Raises ValueError for a strip of an
    image whose narrow side would make it enormous."""
    from PIL import Image as Pillow

    if height * width > _MOST_RESIZED:
        raise ValueError(
            f"image is {image.width} x {image.height} pixels, {width} x {height} as the model takes it; crop it"
        )
    return image.resize((width, height), Pillow.Resampling(resample))


def shortest_edge_size(height: int, width: int, edge: int) -> tuple[int, int]:
    """(height, width) with a shorter side of ``edge``, the longer one rounded down."""
    long = int(edge * max(height, width) / min(height, width))
    return (long, edge) if width <= height else (edge, long)


def resize_middle(image: Image, size: tuple[int, int], kept: tuple[int, int], resample: int) -> Image:
    """The middle of the image in another ``size``, ``kept`` of it at most (height, width each): what `resize` and
    `center_crop` make, to a rounding, without what is cut off, which may be a thousand times as large."""
    from PIL import Image as Pillow

    height, width = (min(edge, most) for edge, most in zip(size, kept, strict=True))
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    down, right = image.height / size[0], image.width / size[1]
    by = Pillow.Resampling(resample)  # rows, then columns, as for a whole image
    image = image.resize((width, image.height), by, (left * right, 0, (left + width) * right, image.height))
    return image.resize((width, height), by, (0, top * down, width, (top + height) * down))


def center_crop(image: Image, height: int, width: int) -> Image:
    """The middle of the image, on black where the image is smaller."""
    left, top = -((width - image.width + 1) // 2), -((height - image.height + 1) // 2)
    if width <= image.width:
        left = (image.width - width) // 2
    if height <= image.height:
        top = (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def pad_to_square(image: Image, mean: Sequence[float]) -> Image:
    """The image in the middle of a square of its longer side, in the colour of ``mean`` (0 to 1)."""
    from PIL import Image as Pillow

    if image.width == image.height:
        return image
    if max(image.size) > _PADDED:  # a strip may become a square of a thousand times its pixels
        width, height = (max(1, edge * _PADDED // max(image.size)) for edge in image.size)
        image = resize(image, height, width, BILINEAR)
    side = max(image.size)
    red, green, blue = (int(value * 255) for value in mean)
    square = Pillow.new("RGB", (side, side), (red, green, blue))
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square


def value_table(rescale: float | None, mean: Sequence[float] | None, std: Sequence[float] | None) -> np.ndarray:
    """float32 [3, 256]: what becomes of each byte in each channel. Rescaled in float64, normalised in float32, as
    transformers does; None leaves a step out."""
    import numpy as np

    values = np.arange(256, dtype=np.float64) * (1.0 if rescale is None else rescale)
    table = np.repeat(values.astype(np.float32)[None], 3, axis=0)
    if mean is None or std is None:
        return table
    return (table - np.asarray(mean, np.float32)[:, None]) / np.asarray(std, np.float32)[:, None]


def channels_first(image: Image, table: np.ndarray) -> np.ndarray:
    """float32 [3, height, width] of an RGB image by `value_table`."""
    import numpy as np

    data = np.asarray(image)
    out = np.empty((3, image.height, image.width), np.float32)
    for channel in range(3):
        np.take(table[channel], data[:, :, channel], out=out[channel])
    return out


def smart_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """(height, width), multiples of ``factor``, near the image's aspect ratio, with an area within the limits. The rule
    of Qwen2-VL's processor. Raises ValueError for an image that is more than 200 times as long as wide."""
    if max(height, width) > 200 * min(height, width):
        raise ValueError(
            f"image is {width} x {height} pixels, and the model takes none that is more than 200 times as long as "
            "wide; crop it"
        )
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif rows * columns < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        rows, columns = math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return rows, columns
