"""Pixtral and Mistral 3: an image in its own aspect ratio, its rows of patches ended by tokens of the text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from octavo.interface.vision_config import PIXTRAL_TOWERS, merge_size
from octavo.multimodal.processors import pixels
from octavo.multimodal.processors.base import COMMON, Expansion, ImageProcessor, no_pixels, placeholder_id, token_id

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

    from octavo.multimodal.processors.settings import Settings
    from octavo.text.tokenizer import Tokenizer


class PixtralProcessor(ImageProcessor):
    """pixel_values: float32 [1, 3, height, width]; image_sizes: int64 [1, 2], height and width."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **COMMON,
        "resample": pixels.BICUBIC,
        "image_mean": pixels.CLIP_MEAN,
        "image_std": pixels.CLIP_STD,
        "size": {"longest_edge": 1024},
    }

    def __init__(self, settings: Settings, tokenizer: Tokenizer) -> None:
        super().__init__(settings, tokenizer)
        self.placeholder = placeholder_id(settings, tokenizer, "[IMG]")
        names = settings.processor
        self.line_end = token_id(tokenizer, names.get("image_break_token") or "[IMG_BREAK]")
        self.image_end = token_id(tokenizer, names.get("image_end_token") or "[IMG_END]")
        size = settings.size()
        if "longest_edge" not in size and not size.keys() >= {"height", "width"}:
            raise settings.error("size", f"must name longest_edge, or height and width, got {size}")
        self.longest = size.get("longest_edge") or size["height"], size.get("longest_edge") or size["width"]
        if not settings.image["do_resize"]:
            raise settings.error("do_resize", "must be true, as images must be whole patches, got False")
        patch = settings.tower(PIXTRAL_TOWERS).patch_size
        is_mistral3 = settings.model["architectures"][0].startswith("Mistral3")
        merge = merge_size(settings.model, settings.source) if is_mistral3 else 1
        settings.agree("patch_size", names.get("patch_size"), patch)
        settings.agree("spatial_merge_size", names.get("spatial_merge_size"), merge)
        self.cell = patch * merge  # pixels of a token's side

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        ratio = max(height / self.longest[0], width / self.longest[1])
        if ratio > 1:
            height, width = (max(1, math.floor(edge / ratio)) for edge in (height, width))
        rows, columns = (height - 1) // self.cell + 1, (width - 1) // self.cell + 1
        return rows * self.cell, columns * self.cell

    def tensors(self, rgb: Image) -> dict[str, np.ndarray]:
        """See `ImageProcessor`."""
        import numpy as np

        height, width = self._resized(rgb.height, rgb.width)
        values = pixels.channels_first(pixels.resize(rgb, height, width, self.resample), self.table)
        return {"pixel_values": values[None], "image_sizes": np.array([[height, width]], np.int64)}

    def outline(self, width: int, height: int) -> dict[str, np.ndarray]:
        """See `ImageProcessor`."""
        import numpy as np

        height, width = self._resized(height, width)
        return {"pixel_values": no_pixels(1, 3, height, width), "image_sizes": np.array([[height, width]], np.int64)}

    def expansion(self, width: int, height: int) -> Expansion:
        """See `ImageProcessor`."""
        height, width = self._resized(height, width)
        columns = width // self.cell
        line = (*(self.placeholder,) * columns, self.line_end)
        rows = height // self.cell
        return (*(line * rows)[:-1], self.image_end), ((True,) * columns + (False,)) * rows

    @property
    def largest_image(self) -> tuple[int, int]:
        """See `ImageProcessor`."""
        return self.longest[1], self.longest[0]
