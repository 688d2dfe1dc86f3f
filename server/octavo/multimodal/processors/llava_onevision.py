"""LLaVA-OneVision: the whole image, and its tiles at the best of a list of resolutions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from octavo.multimodal.processors import pixels
from octavo.multimodal.processors.base import COMMON, Expansion, ImageProcessor, placeholder_id, repeated

if TYPE_CHECKING:
    from PIL.Image import Image

    from octavo.multimodal.processors.settings import Settings
    from octavo.text.tokenizer import Tokenizer

_RESOLUTIONS = [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)]


class LlavaOnevisionProcessor(ImageProcessor):
    """pixel_values: float32 [1, 1 + tiles, 3, side, side]; image_sizes: int64 [1, 2], the image's height and width."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **COMMON, "resample": pixels.BICUBIC, "image_mean": pixels.CLIP_MEAN, "image_std": pixels.CLIP_STD,
        "size": {"height": 384, "width": 384}, "image_grid_pinpoints": _RESOLUTIONS,
    }  # fmt: skip

    def __init__(self, settings: Settings, tokenizer: Tokenizer) -> None:
        super().__init__(settings, tokenizer)
        self.placeholder = placeholder_id(settings, tokenizer, "<image>")
        size = settings.size(square=True)
        self.height = size.get("height") or size["shortest_edge"]
        self.width = size.get("width") or size["shortest_edge"]
        self.resolutions = [(int(height), int(width)) for height, width in settings.image["image_grid_pinpoints"]]
        processor, vision = settings.processor, settings.vision
        tokens = processor.get("num_image_tokens")
        self.tokens = int(tokens or (vision.get("image_size", 384) // vision.get("patch_size", 14)) ** 2)
        strategy = processor.get("vision_feature_select_strategy") or settings.model.get(
            "vision_feature_select_strategy", "full"
        )
        self.dropped = int(strategy == "default")
        ratio = processor.get("vision_aspect_ratio") or settings.model.get("vision_aspect_ratio") or "anyres_max_9"
        self.most_tiles = int(str(ratio).removeprefix("anyres_max_"))

    def _resolution(self, height: int, width: int) -> tuple[int, int]:
        """The resolution that keeps most of the image's pixels and wastes fewest of its own."""

        def merit(resolution: tuple[int, int]) -> tuple[int, int]:
            scale = min(resolution[1] / width, resolution[0] / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            return kept, kept - resolution[0] * resolution[1]

        return max(self.resolutions, key=merit)

    def tensors(self, rgb: Image) -> dict[str, np.ndarray]:
        """See `ImageProcessor`."""
        from PIL import Image as Pillow

        height, width = self._resolution(rgb.height, rgb.width)
        scale_w, scale_h = width / rgb.width, height / rgb.height
        if scale_w < scale_h:
            inner = min(math.ceil(rgb.height * scale_w), height), width
        else:
            inner = height, min(math.ceil(rgb.width * scale_h), width)
        canvas = Pillow.new("RGB", (width, height))
        shrunk = pixels.resize(rgb, *inner, self.resample)
        canvas.paste(shrunk, ((width - inner[1]) // 2, (height - inner[0]) // 2))
        side = self.height
        tiles = [
            canvas.crop((left, top, min(left + side, width), min(top + side, height)))
            for top in range(0, height, side)
            for left in range(0, width, side)
        ]
        parts = [rgb, *tiles]
        values = [
            pixels.channels_first(pixels.resize(part, self.height, self.width, self.resample), self.table)
            for part in parts
        ]
        return {
            "pixel_values": np.stack(values)[None],
            "image_sizes": np.array([[rgb.height, rgb.width]], np.int64),
        }

    def expansion(self, width: int, height: int) -> Expansion:
        """See `ImageProcessor`: the whole image's tokens, those of the tiles without padding, one a row of these."""
        side = int(math.sqrt(self.tokens))
        best = self._resolution(height, width)
        rows, columns = side * (best[0] // self.height), side * (best[1] // self.width)
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        ratio = math.sqrt(rows * columns / (self.most_tiles * side**2))
        if ratio > 1.1:
            rows, columns = int(rows // ratio), int(columns // ratio)
        return repeated(self.placeholder, self.tokens + rows * columns + rows - self.dropped)

    @property
    def largest_image(self) -> tuple[int, int]:
        """See `ImageProcessor`: of the images that fill a resolution."""
        filling = [(width, height) for height, width in self.resolutions]
        return max(filling, key=lambda size: len(self.expansion(*size)[0]))
