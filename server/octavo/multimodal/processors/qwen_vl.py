"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5: an image in its own aspect ratio, as rows of patches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from octavo.multimodal.processors import pixels
from octavo.multimodal.processors.base import COMMON, Expansion, ImageProcessor, no_pixels, placeholder_id, repeated

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

    from octavo.multimodal.items import ImageFeatures
    from octavo.multimodal.processors.settings import Settings
    from octavo.text.tokenizer import Tokenizer


class QwenVLProcessor(ImageProcessor):
    """pixel_values: float32 [patches, 3 * temporal_patch_size * patch_size**2], the patches of a merged square beside
    each other; image_grid_thw: int64 [1, 3], 1 and the rows and columns of patches."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **COMMON,
        "resample": pixels.BICUBIC,
        "image_mean": pixels.CLIP_MEAN,
        "image_std": pixels.CLIP_STD,
        "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": None,
        "max_pixels": None,
    }

    def __init__(self, settings: Settings, tokenizer: Tokenizer) -> None:
        super().__init__(settings, tokenizer)
        image = settings.image
        self.placeholder = placeholder_id(settings, tokenizer, "<|image_pad|>")
        for name in ("patch_size", "merge_size", "temporal_patch_size"):
            stated = settings.vision.get(name.replace("merge_size", "spatial_merge_size"))
            settings.agree(name, image[name], image[name] if stated is None else stated)
            _check_positive(settings, name, image[name])
        self.patch, self.merge, self.temporal = image["patch_size"], image["merge_size"], image["temporal_patch_size"]
        if not image["do_resize"]:
            raise settings.error("do_resize", "must be true, as images must be whole squares of patches, got False")
        self.min_pixels = _area(settings, "min_pixels", "shortest_edge")
        self.max_pixels = _area(settings, "max_pixels", "longest_edge")
        if self.min_pixels > self.max_pixels:
            name = "min_pixels" if "min_pixels" in settings.asked else "max_pixels"
            least = f"{self.min_pixels} (the least) to {self.max_pixels} (the most)"
            raise settings.error(name, f"leaves no number of pixels: {least}")

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        return pixels.smart_resize(height, width, self.patch * self.merge, self.min_pixels, self.max_pixels)

    def tensors(self, rgb: Image) -> dict[str, np.ndarray]:
        """See `ImageProcessor`."""
        import numpy as np

        rgb = pixels.resize(rgb, *self._resized(rgb.height, rgb.width), self.resample)
        patch, merge = self.patch, self.merge
        rows, columns = rgb.height // patch, rgb.width // patch
        values = pixels.channels_first(rgb, self.table)
        values = values.reshape(3, rows // merge, merge, patch, columns // merge, merge, patch)
        values = values.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
        values = np.broadcast_to(values, (*values.shape[:5], self.temporal, patch, patch))
        return {
            "pixel_values": values.reshape(rows * columns, 3 * self.temporal * patch * patch),
            "image_grid_thw": np.array([[1, rows, columns]], np.int64),
        }

    def outline(self, width: int, height: int) -> dict[str, np.ndarray]:
        """See `ImageProcessor`."""
        import numpy as np

        height, width = self._resized(height, width)
        rows, columns = height // self.patch, width // self.patch
        values = no_pixels(rows * columns, 3 * self.temporal * self.patch**2)
        return {"pixel_values": values, "image_grid_thw": np.array([[1, rows, columns]], np.int64)}

    def expansion(self, width: int, height: int) -> Expansion:
        """See `ImageProcessor`."""
        height, width = self._resized(height, width)
        return repeated(self.placeholder, (height // self.patch) * (width // self.patch) // self.merge**2)

    def grid(self, image: ImageFeatures) -> tuple[int, int, int]:
        """See `ImageProcessor`."""
        time, rows, columns = image.tensors["image_grid_thw"][0].tolist()
        return time, rows // self.merge, columns // self.merge

    @property
    def largest_image(self) -> tuple[int, int]:
        """See `ImageProcessor`: of whole grids within max_pixels, or of strips, which are one row at least."""
        factor = self.patch * self.merge
        cells = max(1, self.max_pixels // factor**2)
        grids = [(cells // rows * factor, rows * factor) for rows in range(1, math.isqrt(cells) + 1)]
        images = [*((width, height) for width, height in grids if width <= 200 * height), (200 * factor, factor)]
        return max(images, key=lambda size: math.prod(self._resized(size[1], size[0])))


def _area(settings: Settings, name: str, edge: str) -> int:
    """A limit in pixels, by either of its names: the user's before that of files."""
    value = settings.image[name]
    if value is None or ("size" in settings.asked and name not in settings.asked):
        name, value = "size", {**QwenVLProcessor.defaults["size"], **settings.size()}[edge]
    _check_positive(settings, name, value)
    return int(value)


def _check_positive(settings: Settings, name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise settings.error(name, f"must be a positive integer, got {value!r:.60}")
