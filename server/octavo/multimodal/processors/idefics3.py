"""Idefics3 and SmolVLM: an image is cut into square tiles and shown once more as a whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from octavo.multimodal.processors import pixels
from octavo.multimodal.processors.base import COMMON, Expansion, ImageProcessor, between, placeholder_id

if TYPE_CHECKING:
    from PIL.Image import Image

    from octavo.multimodal.processors.settings import Settings
    from octavo.text.tokenizer import Tokenizer

_LONGEST = 4096  # pixels of a side, whatever the files say
_FAKE, _GLOBAL, _IMAGE = "<fake_token_around_image>", "<global-img>", "<image>"


class Idefics3Processor(ImageProcessor):
    """pixel_values: float32 [1, tiles, 3, side, side]; pixel_attention_mask: int64 [1, tiles, side, side]."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **COMMON, "resample": pixels.LANCZOS, "image_mean": pixels.HALF, "image_std": pixels.HALF,
        "size": {"longest_edge": 4 * 364}, "max_image_size": {"longest_edge": 364}, "do_image_splitting": True,
        "do_pad": True,
    }  # fmt: skip

    def __init__(self, settings: Settings, tokenizer: Tokenizer) -> None:
        super().__init__(settings, tokenizer)
        self.placeholder = placeholder_id(settings, tokenizer, _IMAGE)
        self.size = settings.size()
        self.side = settings.size("max_image_size")["longest_edge"]
        length = settings.processor.get("image_seq_len")
        if length is None:
            grid = settings.vision.get("image_size", self.side) // settings.vision.get("patch_size", 14)
            length = grid**2 // settings.model.get("scale_factor", 2) ** 2
        self.image_seq_len = int(length)
        most = math.ceil((self._longest + 1) / self.side) if settings.image["do_image_splitting"] else 0
        self._tiles = {
            (row, column): between(tokenizer, "", f"{_FAKE}<row_{row + 1}_col_{column + 1}>", _IMAGE)
            for row in range(most)
            for column in range(most)
        }
        self._line = between(tokenizer, _IMAGE, "\n", _FAKE)
        self._lines = between(tokenizer, _IMAGE, "\n\n", _FAKE)
        self._whole = between(tokenizer, "", _FAKE + _GLOBAL, _IMAGE)
        self._end = between(tokenizer, _IMAGE, _FAKE, "")

    @property
    def _longest(self) -> int:
        return min(_LONGEST, max(self.size.values()))

    def tensors(self, rgb: Image) -> dict[str, np.ndarray]:
        """See `ImageProcessor`."""
        if self.settings.image["do_resize"]:
            rgb = pixels.resize(rgb, *self._resized(rgb.height, rgb.width), self.resample)
        tiles = self._split(rgb) if self.settings.image["do_image_splitting"] else []
        if not tiles:
            tiles = [pixels.resize(rgb, self.side, self.side, self.resample)]
        values = np.stack([pixels.channels_first(tile, self.table) for tile in tiles])[None]
        if not self.settings.image["do_pad"]:
            return {"pixel_values": values}
        mask = np.ones((1, len(tiles), *values.shape[-2:]), np.int64)
        return {"pixel_values": values, "pixel_attention_mask": mask}

    def _split(self, rgb: Image) -> list[Image]:
        side = self.side
        height, width = self._tiled(rgb.height, rgb.width)
        rgb = pixels.resize(rgb, height, width, self.resample)
        if height <= side and width <= side:
            return [rgb]
        tiles = [
            rgb.crop((left, top, left + side, top + side))
            for top in range(0, height, side)
            for left in range(0, width, side)
        ]
        return [*tiles, pixels.resize(rgb, side, side, self.resample)]

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        if "longest_edge" not in self.size:
            return self.size["height"], self.size["width"]
        height, width = _scaled(height, width, self.size["longest_edge"], even=True)
        longest = min(_LONGEST, max(height, width))
        if max(height, width) > longest:
            height, width = _scaled(height, width, longest, even=False)
        return height, width

    def _tiled(self, height: int, width: int) -> tuple[int, int]:
        """The next multiples of a tile's side, the longer one first."""
        ratio, side = width / height, self.side
        if width >= height:
            width = math.ceil(width / side) * side
            return math.ceil(int(width / ratio) / side) * side, width
        height = math.ceil(height / side) * side
        return height, math.ceil(int(height * ratio) / side) * side

    def expansion(self, width: int, height: int) -> Expansion:
        """See `ImageProcessor`."""
        rows, columns = 0, 0
        if self.settings.image["do_image_splitting"]:
            if self.settings.image["do_resize"]:
                height, width = self._resized(height, width)
            height, width = self._tiled(height, width)
            if height > self.side or width > self.side:
                rows, columns = height // self.side, width // self.side
        ids: list[int] = []
        is_embed: list[bool] = []

        def add(text: tuple[int, ...], embeds: int = self.image_seq_len) -> None:
            ids.extend((*text, *(self.placeholder,) * embeds))
            is_embed.extend((*(False,) * len(text), *(True,) * embeds))

        for row in range(rows):
            for column in range(columns):
                add((*(self._line if row and not column else ()), *self._tiles[row, column]))
        add((*(self._lines if rows else ()), *self._whole))
        add(self._end, 0)
        return tuple(ids), tuple(is_embed)

    @property
    def largest_image(self) -> tuple[int, int]:
        """See `ImageProcessor`: a square has most tiles."""
        return self._longest, self._longest


def _scaled(height: int, width: int, longest: int, even: bool) -> tuple[int, int]:
    """The longer side as given, the other rounded down, then up to an even number."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2 if even else 0
    else:
        height, width = longest, int(longest * ratio)
        width += width % 2 if even else 0
    return max(height, 1), max(width, 1)
