"""Gemma 3 with images: SigLIP's patches, averaged in squares to a fixed number of embeddings, whose tokens see each
other in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import ClassVar

from torch import Tensor
from torch.nn import functional

from octavo.errors import ModelError
from octavo.interface.engine_config import ModelConfig
from octavo.interface.model_config.gemma import Gemma3Config
from octavo.interface.vision_config import vision_config
from octavo.layers.vision import TowerRMSNorm, Weights, parameter
from octavo.models.gemma import Gemma3ForCausalLM
from octavo.models.image_reader import ReadsImages, Vision
from octavo.models.llava import IMAGE_NAMES
from octavo.models.siglip import VisionTransformer


class Gemma3Projector(Weights):
    """A mean over squares of patches, a norm, and a product."""

    def __init__(self, width: int, hidden: int, eps: float) -> None:
        super().__init__()
        self.mm_input_projection_weight = parameter(width, hidden)
        self.mm_soft_emb_norm = TowerRMSNorm(width, eps, offset=1.0)

    def forward(self, x: Tensor, square: int) -> Tensor:
        """``x [rows, columns, width]``; returns ``[rows * columns / square^2, hidden]``."""
        means = functional.avg_pool2d(x.permute(2, 0, 1), square).flatten(1).T
        out: Tensor = self.mm_soft_emb_norm(means.contiguous()) @ self.mm_input_projection_weight
        return out


class Gemma3Vision(Vision):
    """``mm_tokens_per_image`` embeddings of every image."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        tower = vision_config(config.hf_config, config.model, ("siglip_vision_model",))
        count = config.text_of(Gemma3Config).mm_tokens_per_image
        side = isqrt(count)
        if side**2 != count or tower.side % side:
            raise ModelError(
                f"{config.model}: mm_tokens_per_image must be a square whose side divides the {tower.side} patches of "
                f"an image's side, got {count!r}; correct the file or fetch the model again"
            )
        self.square = tower.side // side
        self.tower = VisionTransformer(tower, is_clip=False, features=None)
        self.projector = Gemma3Projector(tower.hidden_size, config.hidden_size, tower.eps)

    def encode(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """See `Vision`; ``pixel_values [1, 3, side, side]``."""
        states: Tensor = self.tower(tensors["pixel_values"])[0]
        side = self.tower.config.side
        return (self.projector(states.view(side, side, -1), self.square),)


class Gemma3ForConditionalGeneration(ReadsImages, Gemma3ForCausalLM):
    """Gemma 3 from 4B on."""

    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [*IMAGE_NAMES, *Gemma3ForCausalLM.checkpoint_names]

    def create_vision(self, config: ModelConfig) -> Vision:
        """See `ReadsImages`."""
        return Gemma3Vision(config)
