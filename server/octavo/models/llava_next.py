"""LLaVA-NeXT (Liu et al., 2024) and LLaVA-OneVision (Li et al., 2024): an image as a whole and in tiles, without their
padding, and a learned token behind each row of the tiles' patches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from octavo.errors import ModelError
from octavo.interface.engine_config import ModelConfig
from octavo.interface.tiles import tiling
from octavo.interface.vision_config import LLAVA_ONEVISION_TOWERS
from octavo.layers.vision import Weights, parameter
from octavo.models.image_reader import Vision
from octavo.models.llava import LlavaForConditionalGeneration, LlavaVision


class _Newline(Weights):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = parameter(hidden)


class LlavaNextVision(LlavaVision):
    """Embeddings of the whole image, then those of its tiles, row by row of the whole."""

    onevision: ClassVar[bool] = False

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        tower = self.tower.config
        self.tiling = tiling(config.hf_config, config.model, tower, self.onevision)
        if self.first != tower.has_class:
            raise ModelError(
                f'{config.model}: vision_feature_select_strategy must be "default" with a CLIP tower and "full" with '
                "any other, so that tiles have their patches alone; correct the file or fetch the model again"
            )
        self.newline = _Newline(config.hidden_size)

    def encode(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """See `Vision`; ``pixel_values [1, 1 + tiles, 3, side, side]``, ``image_sizes [1, 2]``: height and width."""
        height, width = tensors["image_sizes"][0].tolist()
        found = self.embed(tensors["pixel_values"][0])
        (rows, columns), side = self.tiling.grid(height, width), self.tiling.side
        kept = self.tiling.patches(height, width)
        grid = found[1:].view(rows, columns, side, side, -1).transpose(1, 2)
        grid = grid.reshape(rows * side, columns * side, -1)
        grid = grid[kept.top : kept.top + kept.rows, kept.left : kept.left + kept.columns]
        if kept.scaled != (kept.rows, kept.columns):
            grid = functional.interpolate(grid.permute(2, 0, 1)[None], kept.scaled, mode="bilinear")[0].permute(1, 2, 0)
        ends = self.newline.weight.expand(len(grid), 1, -1)
        return (torch.cat((found[0], torch.cat((grid, ends), dim=1).flatten(0, 1))),)


class LlavaOnevisionVision(LlavaNextVision):
    """LLaVA-NeXT's tower, which scales down the patches of images with more than so many tiles."""

    towers: ClassVar[tuple[str, ...]] = LLAVA_ONEVISION_TOWERS
    feature_layer: ClassVar[int] = -1
    onevision: ClassVar[bool] = True


class LlavaNextForConditionalGeneration(LlavaForConditionalGeneration):
    """LLaVA-NeXT, called LLaVA 1.6, too."""

    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [
        (r"^(model\.)?image_newline$", "model.vision.newline.weight"),
        *LlavaForConditionalGeneration.checkpoint_names,
    ]

    def create_vision(self, config: ModelConfig) -> Vision:
        """See `ReadsImages`."""
        return LlavaNextVision(config)


class LlavaOnevisionForConditionalGeneration(LlavaNextForConditionalGeneration):
    """LLaVA-OneVision; each image of a prompt in tiles, and no video."""

    def create_vision(self, config: ModelConfig) -> Vision:
        """See `ReadsImages`."""
        return LlavaOnevisionVision(config)
