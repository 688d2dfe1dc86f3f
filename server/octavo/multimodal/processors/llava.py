"""LLaVA 1.5: one square of pixels for CLIP or SigLIP, cut out of the middle or padded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from octavo.interface.vision_config import LLAVA_TOWERS, feature_layers
from octavo.multimodal.processors import pixels
from octavo.multimodal.processors.base import COMMON, Expansion, ImageProcessor, no_pixels, placeholder_id, repeated

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

    from octavo.multimodal.processors.settings import Settings
    from octavo.text.tokenizer import Tokenizer

_EDGES = {"height", "width"}
_MOST_PIXELS = 1 << 24  # of an image that is to be cropped, scaled whole


class LlavaProcessor(ImageProcessor):
    """pixel_values: float32 [1, 3, height, width]."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **COMMON,
        "resample": pixels.BICUBIC,
        "image_mean": pixels.CLIP_MEAN,
        "image_std": pixels.CLIP_STD,
        "size": {"shortest_edge": 224},
        "do_center_crop": True,
        "crop_size": {"height": 224, "width": 224},
        "do_pad": False,
    }

    def __init__(self, settings: Settings, tokenizer: Tokenizer) -> None:
        super().__init__(settings, tokenizer)
        self.placeholder = placeholder_id(settings, tokenizer, "<image>")
        self.size = settings.size()
        self.crop = settings.size("crop_size") if settings.image["do_center_crop"] else None
        if settings.image["do_resize"] and "shortest_edge" not in self.size and not self.size.keys() >= _EDGES:
            raise settings.error("size", f"must name shortest_edge, or height and width, got {self.size}")
        fixed = self.crop or self.size
        if not fixed.keys() >= _EDGES:
            name, why = ("crop_size", "") if self.crop else ("size", " where images are not cropped")
            raise settings.error(name, f"must be a height and a width{why}, got {fixed}")
        tower = settings.tower(LLAVA_TOWERS)
        _, drops_first = feature_layers(settings.model, settings.source, tower, default=-2)
        settings.agree("crop_size" if self.crop else "size", fixed, dict.fromkeys(fixed, tower.image_size))
        stated = settings.processor.get
        settings.agree("patch_size", stated("patch_size"), tower.patch_size)
        settings.agree("num_additional_image_tokens", stated("num_additional_image_tokens"), int(tower.has_class))
        strategy = "default" if drops_first else "full"
        settings.agree("vision_feature_select_strategy", stated("vision_feature_select_strategy"), strategy)
        self.count = tower.side**2 + tower.has_class - drops_first
        self.largest = fixed["width"], fixed["height"]

    def tensors(self, rgb: Image) -> dict[str, np.ndarray]:
        """See `ImageProcessor`."""
        if self.settings.image["do_pad"]:
            rgb = pixels.pad_to_square(rgb, self.settings.image["image_mean"])
        if self.settings.image["do_resize"]:
            edge = self.size.get("shortest_edge")
            height, width = (
                (self.size["height"], self.size["width"])
                if edge is None
                else pixels.shortest_edge_size(rgb.height, rgb.width, edge)
            )
            if self.crop and height * width > _MOST_PIXELS:
                kept = self.crop["height"], self.crop["width"]
                rgb = pixels.resize_middle(rgb, (height, width), kept, self.resample)
            else:
                rgb = pixels.resize(rgb, height, width, self.resample)
        if self.crop:
            rgb = pixels.center_crop(rgb, self.crop["height"], self.crop["width"])
        return {"pixel_values": pixels.channels_first(rgb, self.table)[None]}

    def outline(self, width: int, height: int) -> dict[str, np.ndarray]:
        """See `ImageProcessor`: all images look the same."""
        return {"pixel_values": no_pixels(1, 3, self.largest[1], self.largest[0])}

    def expansion(self, width: int, height: int) -> Expansion:
        """See `ImageProcessor`: all images take the same."""
        return repeated(self.placeholder, self.count)

    @property
    def largest_image(self) -> tuple[int, int]:
        """See `ImageProcessor`."""
        return self.largest
