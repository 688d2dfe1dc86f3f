"""LLaVA-NeXT and LLaVA-OneVision: the whole image, and its tiles at the best of a list of resolutions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from octavo.interface.tiles import tiling
from octavo.interface.vision_config import LLAVA_ONEVISION_TOWERS, LLAVA_TOWERS, feature_layers
from octavo.multimodal.processors import pixels
from octavo.multimodal.processors.base import (
    COMMON,
    Expansion,
    ImageProcessor,
    no_pixels,
    placeholder_id,
    repeated,
)

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

    from octavo.multimodal.processors.settings import Settings
    from octavo.text.tokenizer import Tokenizer


class LlavaNextProcessor(ImageProcessor):
    """pixel_values: float32 [1, 1 + tiles, 3, side, side]; image_sizes: int64 [1, 2], the image's height and width."""

    onevision: ClassVar[bool] = False
    defaults: ClassVar[Mapping[str, Any]] = {
        **COMMON,
        "resample": pixels.BICUBIC,
        "image_mean": pixels.CLIP_MEAN,
        "image_std": pixels.CLIP_STD,
        "size": {"shortest_edge": 224},
        "do_center_crop": True,
        "crop_size": {"height": 224, "width": 224},
        "image_grid_pinpoints": None,
    }

    def __init__(self, settings: Settings, tokenizer: Tokenizer) -> None:
        super().__init__(settings, tokenizer)
        self.placeholder = placeholder_id(settings, tokenizer, "<image>")
        tower = settings.tower(LLAVA_ONEVISION_TOWERS if self.onevision else LLAVA_TOWERS)
        self.side = tower.image_size
        for name in ("size", "crop_size") if settings.image.get("do_center_crop") else ("size",):
            edges = settings.size(name, square=True)
            if set(edges) == {"shortest_edge"}:
                edges = dict.fromkeys(("height", "width"), edges["shortest_edge"])
            settings.agree(name, edges, {"height": self.side, "width": self.side})
        if not settings.image["do_resize"]:
            raise settings.error("do_resize", f"must be true, as tiles are {self.side} x {self.side} pixels, got False")
        self.tiling = tiling(settings.model, settings.source, tower, self.onevision)
        resolutions = [list(resolution) for resolution in self.tiling.resolutions]
        if (pinpoints := settings.image["image_grid_pinpoints"]) != resolutions:  # whose order is config.json's
            is_same = isinstance(pinpoints, list) and sorted(map(str, pinpoints)) == sorted(map(str, resolutions))
            settings.agree("image_grid_pinpoints", None if is_same else pinpoints, resolutions)
        _, drops_first = feature_layers(settings.model, settings.source, tower, -1 if self.onevision else -2)
        self.tokens = tower.side**2 + tower.has_class - drops_first  # of the whole image
        stated = settings.processor.get
        strategy = "default" if drops_first else "full"
        settings.agree("vision_feature_select_strategy", stated("vision_feature_select_strategy"), strategy)
        if self.onevision:
            settings.agree("num_image_tokens", stated("num_image_tokens"), tower.side**2 + tower.has_class)
            settings.agree("vision_aspect_ratio", stated("vision_aspect_ratio"), f"anyres_max_{self.tiling.most}")
        else:
            settings.agree("patch_size", stated("patch_size"), tower.patch_size)
            settings.agree("num_additional_image_tokens", stated("num_additional_image_tokens"), int(tower.has_class))

    def tensors(self, rgb: Image) -> dict[str, np.ndarray]:
        """See `ImageProcessor`."""
        import numpy as np
        from PIL import Image as Pillow

        height, width = self.tiling.resolution(rgb.height, rgb.width)
        scale_w, scale_h = width / rgb.width, height / rgb.height
        if scale_w < scale_h:
            inner = min(math.ceil(rgb.height * scale_w), height), width
        else:
            inner = height, min(math.ceil(rgb.width * scale_h), width)
        canvas = Pillow.new("RGB", (width, height))
        shrunk = pixels.resize(rgb, *inner, self.resample)
        canvas.paste(shrunk, ((width - inner[1]) // 2, (height - inner[0]) // 2))
        side = self.side
        tiles = [
            canvas.crop((left, top, left + side, top + side))
            for top in range(0, height, side)
            for left in range(0, width, side)
        ]
        whole = pixels.resize(rgb, side, side, self.resample)
        values = [pixels.channels_first(part, self.table) for part in (whole, *tiles)]
        return {
            "pixel_values": np.stack(values)[None],
            "image_sizes": np.array([[rgb.height, rgb.width]], np.int64),
        }

    def outline(self, width: int, height: int) -> dict[str, np.ndarray]:
        """See `ImageProcessor`."""
        import numpy as np

        rows, columns = (-(-side // self.side) for side in self.tiling.resolution(height, width))
        return {
            "pixel_values": no_pixels(1, 1 + rows * columns, 3, self.side, self.side),
            "image_sizes": np.array([[height, width]], np.int64),
        }

    def expansion(self, width: int, height: int) -> Expansion:
        """See `ImageProcessor`: the whole image's tokens, those of the tiles without padding, one a row of these."""
        return repeated(self.placeholder, self.tokens + self.tiling.count(height, width))

    @property
    def largest_image(self) -> tuple[int, int]:
        """See `ImageProcessor`."""
        height, width = self.tiling.largest_image()
        return width, height


class LlavaOnevisionProcessor(LlavaNextProcessor):
    """LLaVA-NeXT's processor with other defaults; patches of more than so many tiles are scaled down."""

    onevision: ClassVar[bool] = True
    defaults: ClassVar[Mapping[str, Any]] = {
        **COMMON,
        "resample": pixels.BICUBIC,
        "image_mean": pixels.CLIP_MEAN,
        "image_std": pixels.CLIP_STD,
        "size": {"height": 384, "width": 384},
        "image_grid_pinpoints": None,
    }
