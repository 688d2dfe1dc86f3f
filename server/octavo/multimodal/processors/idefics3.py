"""Idefics3 and SmolVLM: an image is cut into square tiles and shown once more as a whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from hashlib import sha256
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from octavo.interface.vision_config import IDEFICS3_TOWERS
from octavo.multimodal.items import ImageFeatures
from octavo.multimodal.processors import pixels
from octavo.multimodal.processors.base import COMMON, Expansion, ImageProcessor, between, no_pixels, placeholder_id

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

    from octavo.multimodal.processors.settings import Settings
    from octavo.text.tokenizer import Tokenizer

_MOST_TILES = 64  # of a side
_LONGEST = 4096  # pixels of a side, whatever the files say
_FAKE, _GLOBAL, _IMAGE = "<fake_token_around_image>", "<global-img>", "<image>"


class Idefics3Processor(ImageProcessor):
    """pixel_values: float32 [1, tiles, 3, side, side]. There is no pixel_attention_mask: no tile is padded."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **COMMON,
        "resample": pixels.LANCZOS,
        "image_mean": pixels.HALF,
        "image_std": pixels.HALF,
        "size": {"longest_edge": 4 * 364},
        "max_image_size": {"longest_edge": 364},
        "do_image_splitting": True,
        "do_pad": True,
    }

    def __init__(self, settings: Settings, tokenizer: Tokenizer) -> None:
        super().__init__(settings, tokenizer)
        self.placeholder = placeholder_id(settings, tokenizer, _IMAGE)
        self.size = settings.size()
        if "longest_edge" not in self.size and not self.size.keys() >= {"height", "width"}:
            raise settings.error("size", f"must name longest_edge, or height and width, got {self.size}")
        tile = settings.size("max_image_size")
        if "longest_edge" not in tile:
            raise settings.error("max_image_size", f"must name longest_edge, got {tile}")
        self.side = tile["longest_edge"]
        if settings.image["do_image_splitting"] and not settings.image["do_resize"]:
            raise settings.error("do_resize", "must be true, or an image may take any number of tiles, got False")
        tower, factor = settings.tower(IDEFICS3_TOWERS), settings.model.get("scale_factor", 2)
        patches = self.side // tower.patch_size
        if type(factor) is not int or factor < 1 or not patches or patches % factor:
            raise settings.error(
                "max_image_size",
                f"must be a tile whose side has a multiple of scale_factor ({factor}) patches of {tower.patch_size} "
                f"pixels, got {self.side}",
            )
        self.image_seq_len = (patches // factor) ** 2
        settings.agree("image_seq_len", settings.processor.get("image_seq_len"), self.image_seq_len)
        most = math.ceil((self._longest + 1) / self.side) if settings.image["do_image_splitting"] else 0
        if most > _MOST_TILES:
            raise settings.error(
                "max_image_size", f"must be a tile of which {_MOST_TILES} make up a side at most, got {self.side}"
            )
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
        longest = self.size.get("longest_edge")
        return max(self.size["height"], self.size["width"]) if longest is None else min(_LONGEST, longest)

    def tensors(self, rgb: Image) -> dict[str, np.ndarray]:
        """See `ImageProcessor`."""
        import numpy as np

        if self.settings.image["do_resize"]:
            rgb = pixels.resize(rgb, *self._resized(rgb.height, rgb.width), self.resample)
        tiles = self._split(rgb) if self.settings.image["do_image_splitting"] else []
        if not tiles:
            tiles = [pixels.resize(rgb, self.side, self.side, self.resample)]
        return {"pixel_values": np.stack([pixels.channels_first(tile, self.table) for tile in tiles])[None]}

    def outline(self, width: int, height: int) -> dict[str, np.ndarray]:
        """See `ImageProcessor`."""
        rows, columns = self._grid(width, height)
        return {"pixel_values": no_pixels(1, rows * columns + 1, 3, self.side, self.side)}

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

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of tiles beside the whole image; 0, 0: there are none."""
        if not self.settings.image["do_image_splitting"]:
            return 0, 0
        height, width = self._tiled(*self._resized(height, width))
        return (height // self.side, width // self.side) if max(height, width) > self.side else (0, 0)

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
        rows, columns = self._grid(width, height)
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

    def parts(self, image: ImageFeatures) -> list[ImageFeatures]:
        """See `ImageProcessor`: tiles, so that a step need not encode all of them."""
        values, place = image.tensors["pixel_values"], image.places.get("pixel_values")
        embeds = [at for at, is_embed in enumerate(image.is_embed) if is_embed]
        ends = [at + 1 for at in embeds[self.image_seq_len - 1 :: self.image_seq_len]]
        ends[-1] = len(image.is_embed)
        found = []
        for number, (begin, end) in enumerate(pairwise([0, *ends])):
            tile = values[:, number : number + 1]
            places = {} if place is None else {"pixel_values": place + number * tile.nbytes}
            ids, flags = image.token_ids[begin:end], image.is_embed[begin:end]
            digest = sha256(f"{image.digest} {number}".encode()).hexdigest()
            found.append(ImageFeatures(digest, {"pixel_values": tile}, ids, flags, image.file, places))
        return found

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
