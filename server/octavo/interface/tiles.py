"""Tiling of images of any size (AnyRes of LLaVA-NeXT, Liu et al., 2024).

The image is fitted into the best of a list of resolutions and cut into tiles; the patches of the padding are left out
of those that the tower sees. Processor and model must agree on all of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.interface.config_checks import Fields
from octavo.interface.vision_config import MAX_SIDE, VisionConfig

_MOST_RESOLUTIONS = 1000  # every image is compared with each
_ANYRES = "anyres_max_"
# (height, width) in tiles, where config.json says none.
_NEXT = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
_ONEVISION = tuple((rows, columns) for rows in range(1, 7) for columns in range(1, 7))


@dataclass(frozen=True)
class Patches:
    """The patches of an image: ``rows`` and ``columns`` of all tiles', from row ``top`` and column ``left`` on, which
    become ``scaled`` (rows, columns)."""

    top: int
    left: int
    rows: int
    columns: int
    scaled: tuple[int, int]


@dataclass(frozen=True)
class Tiling:
    """``resolutions``: (height, width) in pixels. ``tile``: pixels of a side; ``side``: patches of it. ``most``: tiles
    whose patches are kept at most (None: all of them)."""

    resolutions: tuple[tuple[int, int], ...]
    tile: int
    side: int
    most: int | None

    def resolution(self, height: int, width: int) -> tuple[int, int]:
        """The resolution that keeps most of the image's pixels and wastes fewest of its own."""

        def merit(resolution: tuple[int, int]) -> tuple[int, int]:
            scale = min(resolution[1] / width, resolution[0] / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            return kept, kept - resolution[0] * resolution[1]

        return max(self.resolutions, key=merit)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tiles."""
        best = self.resolution(height, width)
        return best[0] // self.tile, best[1] // self.tile

    def patches(self, height: int, width: int) -> Patches:
        """Return the patches kept of an image of ``height`` x ``width`` pixels."""
        rows, columns = (count * self.side for count in self.grid(height, width))
        top = left = 0
        if width / height > columns / rows:
            top = (rows - int(round(height * (columns / width), 7))) // 2
        else:
            left = (columns - int(round(width * (rows / height), 7))) // 2
        rows, columns = rows - 2 * top, columns - 2 * left
        ratio = 0.0 if self.most is None else math.sqrt(rows * columns / (self.most * self.side**2))
        scaled = (int(rows // ratio), int(columns // ratio)) if ratio > 1.1 else (rows, columns)
        return Patches(top, left, rows, columns, scaled)

    def largest_image(self) -> tuple[int, int]:
        """(height, width) of an image that no other has more patches and rows than."""
        images = list(self.resolutions)
        for height, width in self.resolutions if self.most is not None else ():
            # A size a little above `most` is not scaled down, and padding may leave just that.
            for edge, other in ((height, width), (width, height)):
                kept = 1.1**2 * self.most * self.side * self.tile / other  # type: ignore[operator]
                for patches in range(max(1, int(kept) - 2), min(int(kept) + 1, edge // self.tile * self.side)):
                    pixels = max(1, round(patches * self.tile / self.side))
                    images.append((pixels, width) if edge == height else (height, pixels))
        return max(images, key=lambda size: self.count(*size))

    def count(self, height: int, width: int) -> int:
        """Patches that are kept, and one for the end of each of their rows."""
        rows, columns = self.patches(height, width).scaled
        return rows * columns + rows


def tiling(hf_config: Mapping[str, Any], source: str, tower: VisionConfig, onevision: bool) -> Tiling:
    """Read the tiling of LLaVA-NeXT or LLaVA-OneVision from config.json. Raises ModelError."""
    fields, tile = Fields(dict(hf_config), source, str), tower.image_size
    default = [[rows * tile, columns * tile] for rows, columns in (_ONEVISION if onevision else _NEXT)]
    stated = hf_config.get("image_grid_pinpoints")
    resolutions = default if stated is None else stated
    if not isinstance(resolutions, list) or not 0 < len(resolutions) <= _MOST_RESOLUTIONS:
        fields.refuse("image_grid_pinpoints", "must be a list of [height, width]")
    for resolution in resolutions:
        pair = resolution if isinstance(resolution, (list, tuple)) and len(resolution) == 2 else (None,)
        if any(type(edge) is not int or not 0 < edge <= MAX_SIDE or edge % tile for edge in pair):
            raise fields.error(
                f"image_grid_pinpoints must be [height, width] in multiples of the tower's image_size ({tile}) up to "
                f"{MAX_SIDE}, got {resolution!r:.60}"
            )
    most = None
    if onevision:
        ratio = hf_config.get("vision_aspect_ratio") or f"{_ANYRES}9"
        number = ratio.removeprefix(_ANYRES) if isinstance(ratio, str) else ""
        if not (number.isascii() and number.isdigit() and 0 < int(number[:9]) <= _MOST_RESOLUTIONS):
            fields.refuse("vision_aspect_ratio", f'must be "{_ANYRES}N", N tiles from 1 to {_MOST_RESOLUTIONS}')
        most = int(number)
    return Tiling(tuple((height, width) for height, width in resolutions), tile, tower.side, most)
