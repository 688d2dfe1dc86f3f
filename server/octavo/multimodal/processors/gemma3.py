"""Gemma 3: one square of pixels, always the same number of tokens, line breaks around it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from octavo.errors import ConfigError
from octavo.interface.vision_config import GEMMA3_TOWERS
from octavo.multimodal.processors import pixels
from octavo.multimodal.processors.base import COMMON, Expansion, ImageProcessor, no_pixels, placeholder_id, token_id

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

    from octavo.multimodal.items import ImageFeatures
    from octavo.multimodal.processors.settings import Settings
    from octavo.text.tokenizer import Tokenizer

_MOST_BREAKS = 64  # line breaks beside each other that are tokenised as the tokenizer would


class Gemma3Processor(ImageProcessor):
    """pixel_values: float32 [1, 3, height, width]. Pan and scan is off, as it is in the released processor."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **COMMON,
        "resample": pixels.BILINEAR,
        "image_mean": pixels.HALF,
        "image_std": pixels.HALF,
        "size": {"height": 224, "width": 224},
        "do_pan_and_scan": False,
    }

    def __init__(self, settings: Settings, tokenizer: Tokenizer) -> None:
        super().__init__(settings, tokenizer)
        if settings.image["do_pan_and_scan"]:
            raise ConfigError("do_pan_and_scan is true, and Gemma 3's crops are not supported; set it to false")
        size = settings.size(square=True)
        if not size.keys() >= {"height", "width"}:
            raise settings.error("size", f"must be a height and a width, got {size}")
        self.height, self.width = size["height"], size["width"]
        self.image_token = placeholder_id(settings, tokenizer, "<image_soft_token>")
        self.placeholder = _named(settings, tokenizer, "boi_token_index", "<start_of_image>")
        self.end = _named(settings, tokenizer, "eoi_token_index", "<end_of_image>")
        self.image_seq_length = int(settings.model.get("mm_tokens_per_image", 256))
        settings.agree("image_seq_length", settings.processor.get("image_seq_length"), self.image_seq_length)
        side = settings.tower(GEMMA3_TOWERS).image_size
        settings.agree("size", size, {"height": side, "width": side})
        if not settings.image["do_resize"]:
            raise settings.error("do_resize", f"must be true, as the tower takes {side} x {side} pixels, got False")
        # Text and line breaks are tokenised together: what stands before an image may end in some, too.
        breaks = [tuple(tokenizer.encode("\n" * count, add_special_tokens=False)) for count in range(_MOST_BREAKS)]
        self._breaks = breaks
        self._count = {ids[0]: count for count, ids in enumerate(breaks) if len(ids) == 1}

    def tensors(self, rgb: Image) -> dict[str, np.ndarray]:
        """See `ImageProcessor`."""
        rgb = pixels.resize(rgb, self.height, self.width, self.resample)
        return {"pixel_values": pixels.channels_first(rgb, self.table)[None]}

    def outline(self, width: int, height: int) -> dict[str, np.ndarray]:
        """See `ImageProcessor`."""
        return {"pixel_values": no_pixels(1, 3, self.height, self.width)}

    def expansion(self, width: int, height: int) -> Expansion:
        """See `ImageProcessor`. The line breaks are not in it: they may become one token with their neighbours."""
        count = self.image_seq_length
        return ((self.placeholder, *(self.image_token,) * count, self.end), (False, *(True,) * count, False))

    def insert(self, ids: list[int], image: ImageFeatures) -> int:
        """See `ImageProcessor`."""
        ids += self._breaks[2]
        offset = super().insert(ids, image)
        ids += self._breaks[2]
        return offset

    def joined(self, ids: list[int], offsets: list[int]) -> tuple[list[int], list[int]]:
        """See `ImageProcessor`: line breaks that have met are tokenised as one text."""
        out: list[int] = []
        at: list[int] = []
        starts = set(offsets)
        run = 0
        for place, token in enumerate([*ids, -1]):
            count = self._count.get(token, 0)
            if count and run + count < _MOST_BREAKS:
                run += count
                continue
            out += self._breaks[run]
            run = count
            if count:
                continue
            if place in starts:
                at.append(len(out))
            out.append(token)
        return out[:-1], at

    @property
    def largest_image(self) -> tuple[int, int]:
        """See `ImageProcessor`."""
        return self.width, self.height


def _named(settings: Settings, tokenizer: Tokenizer, field: str, token: str) -> int:
    value = settings.model.get(field)
    return value if isinstance(value, int) else token_id(tokenizer, token)
