"""LLaVA 1.5: one square of pixels for CLIP or SigLIP, cut out of the middle or padded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from octavo.errors import ModelError
from octavo.multimodal.processors import pixels
from octavo.multimodal.processors.base import COMMON, Expansion, ImageProcessor, placeholder_id, repeated

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

    from octavo.multimodal.processors.settings import Settings
    from octavo.text.tokenizer import Tokenizer


class LlavaProcessor(ImageProcessor):
    """pixel_values: float32 [1, 3, height, width]."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **COMMON, "resample": pixels.BICUBIC, "image_mean": pixels.CLIP_MEAN, "image_std": pixels.CLIP_STD,
        "size": {"shortest_edge": 224}, "do_center_crop": True, "crop_size": {"height": 224, "width": 224},
        "do_pad": False,
    }  # fmt: skip

    def __init__(self, settings: Settings, tokenizer: Tokenizer) -> None:
        super().__init__(settings, tokenizer)
        self.placeholder = placeholder_id(settings, tokenizer, "<image>")
        self.size = settings.size()
        self.crop = settings.size("crop_size") if settings.image["do_center_crop"] else None
        fixed = self.crop or self.size
        if "height" not in fixed or "width" not in fixed:
            raise ModelError(
                f"the image processor's size must be a height and a width where it does not crop, got {fixed}"
            )
        patch = settings.processor.get("patch_size") or settings.vision.get("patch_size", 14)
        count = (fixed["height"] // patch) * (fixed["width"] // patch)
        strategy = settings.processor.get("vision_feature_select_strategy") or settings.model.get(
            "vision_feature_select_strategy", "default"
        )
        extra = settings.processor.get("num_additional_image_tokens")
        if extra is None:  # CLIP has a token for its class
            extra = int(settings.vision.get("model_type") == "clip_vision_model")
        self.count = count + extra - (strategy == "default")
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
            rgb = pixels.resize(rgb, height, width, self.resample)
        if self.crop:
            rgb = pixels.center_crop(rgb, self.crop["height"], self.crop["width"])
        return {"pixel_values": pixels.channels_first(rgb, self.table)[None]}

    def expansion(self, width: int, height: int) -> Expansion:
        """See `ImageProcessor`: all images take the same."""
        return repeated(self.placeholder, self.count)

    @property
    def largest_image(self) -> tuple[int, int]:
        """See `ImageProcessor`."""
        return self.largest
