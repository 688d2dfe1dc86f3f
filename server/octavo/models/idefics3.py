"""Idefics 3 (Laurencon et al., 2024) and SmolVLM: SigLIP's patches of an image's tiles, several neighbours to an
embedding (pixel shuffle), into a Llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from octavo.errors import ModelError
from octavo.interface.engine_config import ModelConfig
from octavo.interface.model_config.idefics3 import Idefics3Config
from octavo.interface.vision_config import vision_config
from octavo.layers.vision import TowerLinear
from octavo.models.base import CausalLM
from octavo.models.image_reader import ReadsImages, Vision
from octavo.models.llama import LlamaForCausalLM
from octavo.models.siglip import AnySizeVisionTransformer


class _Projection(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.proj = TowerLinear(inputs, outputs, bias=False)


class _Connector(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.modality_projection = _Projection(inputs, outputs)


class Idefics3Vision(Vision):
    """Squares of ``scale_factor`` by ``scale_factor`` patches become one embedding each."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hf = config.hf_config
        kinds = ("idefics3_vision", "idefics3", "smolvlm_vision", "smolvlm")
        tower = vision_config(hf, config.model, kinds)
        self.factor = config.text_of(Idefics3Config).scale_factor
        if tower.side % self.factor:
            raise ModelError(
                f"{config.model}: scale_factor must divide the {tower.side} patches of a tile's side, "
                f"got {self.factor!r}; correct the file or fetch the model again"
            )
        self.tower = AnySizeVisionTransformer(tower, is_clip=False, features=None)
        self.connector = _Connector(tower.hidden_size * self.factor**2, config.hidden_size)

    def encode(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """See `Vision`; ``pixel_values [1, tiles, 3, side, side]``."""
        pixels = tensors["pixel_values"][0]
        states: Tensor = self.tower(pixels)
        patch = self.tower.config.patch_size
        rows, columns = (length // patch // self.factor for length in pixels.shape[2:])
        grid = states.view(len(pixels), rows, self.factor, columns, self.factor, -1).transpose(2, 3)
        squares = grid.reshape(len(pixels) * rows * columns, -1)
        return (self.connector.modality_projection.proj(squares),)


class Idefics3ForConditionalGeneration(ReadsImages, LlamaForCausalLM):
    """Idefics 3 around a Llama."""

    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [
        (r"^model\.vision_model\.", "model.vision.tower."),
        (r"^model\.connector\.", "model.vision.connector."),
        (r"^model\.text_model\.", "model."),
        *CausalLM.checkpoint_names,
    ]

    def create_vision(self, config: ModelConfig) -> Vision:
        """See `ReadsImages`."""
        return Idefics3Vision(config)


class SmolVLMForConditionalGeneration(Idefics3ForConditionalGeneration):
    """Idefics3 in small. Images of a video's frames, in its later releases, are not read."""
