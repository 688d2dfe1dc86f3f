"""Mistral Small 3.1 and 3.2, Ministral 3: Pixtral's patches, squares of neighbours merged, into a Mistral."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from octavo.errors import ModelError
from octavo.interface.engine_config import ModelConfig
from octavo.interface.model_config.mistral3 import Mistral3Config
from octavo.interface.vision_config import PIXTRAL_TOWERS, feature_layers, merge_size, vision_config
from octavo.layers.vision import TowerLinear, TowerRMSNorm, tower_activation
from octavo.models.image_reader import ReadsImages, Vision
from octavo.models.llama import MistralForCausalLM
from octavo.models.llava import IMAGE_NAMES
from octavo.models.pixtral import PIXTRAL_NAMES, PixtralVisionTransformer


class _Merger(nn.Module):
    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.merging_layer = TowerLinear(width * size**2, width, bias=False)

    def forward(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """``x [rows * columns, width]``; returns ``[squares, width]``, row by row."""
        size, width = self.size, x.shape[1]
        squares = x.view(rows // size, size, columns // size, size, width).permute(0, 2, 4, 1, 3)
        out: Tensor = self.merging_layer(squares.reshape(-1, width * size**2))
        return out


class _Projector(nn.Module):
    def __init__(self, width: int, hidden: int, size: int, act: str, bias: bool, eps: float) -> None:
        super().__init__()
        self.norm = TowerRMSNorm(width, eps)
        self.patch_merger = _Merger(width, size)
        self.linear_1, self.linear_2 = TowerLinear(width, hidden, bias), TowerLinear(hidden, hidden, bias)
        self.act = tower_activation(act)

    def forward(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """``x [rows * columns, width]``; returns ``[squares, hidden]``."""
        merged = self.patch_merger(self.norm(x), rows, columns)
        out: Tensor = self.linear_2(self.act(self.linear_1(merged)))
        return out


class Mistral3Vision(Vision):
    """An embedding for each square of ``spatial_merge_size`` by ``spatial_merge_size`` patches."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hf, text = config.hf_config, config.text_of(Mistral3Config)
        tower = vision_config(hf, config.model, PIXTRAL_TOWERS)
        features, _ = feature_layers(hf, config.model, tower, default=-1)
        if len(features) > 1:
            raise ModelError(
                f"{config.model}: vision_feature_layer must be one state of the tower for Mistral 3, got {features}; "
                "correct the file or fetch the model again"
            )
        self.tower = PixtralVisionTransformer(tower, config.model, features)
        act, bias = text.projector_hidden_act, text.multimodal_projector_bias
        size, eps = merge_size(hf, config.model), text.rms_norm_eps
        self.projector = _Projector(tower.hidden_size, config.hidden_size, size, act, bias, eps)

    def encode(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """See `Vision`; ``pixel_values [1, 3, H, W]``, whole squares of patches."""
        pixels = tensors["pixel_values"]
        rows, columns = (length // self.tower.config.patch_size for length in pixels.shape[2:])
        return (self.projector(self.tower(pixels), rows, columns),)


class Mistral3ForConditionalGeneration(ReadsImages, MistralForCausalLM):
    """Mistral around which images are read."""

    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [
        *PIXTRAL_NAMES,
        *IMAGE_NAMES,
        *MistralForCausalLM.checkpoint_names,
    ]

    def create_vision(self, config: ModelConfig) -> Vision:
        """See `ReadsImages`."""
        return Mistral3Vision(config)
