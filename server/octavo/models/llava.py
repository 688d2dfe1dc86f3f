"""LLaVA 1.5 (Liu et al., 2023): CLIP's or SigLIP's patches through a small MLP into a Llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from octavo.interface.engine_config import ModelConfig
from octavo.interface.vision_config import vision_config
from octavo.layers.vision import TowerLinear, tower_activation
from octavo.models.base import CausalLM
from octavo.models.image_reader import ReadsImages, Vision
from octavo.models.llama import LlamaForCausalLM
from octavo.models.siglip import VisionTransformer

IMAGE_NAMES: list[tuple[str, str | None]] = [
    (r"^(model\.)?vision_tower\.(vision_model\.)?", "model.vision.tower."),
    (r"^(model\.)?multi_modal_projector\.", "model.vision.projector."),
    (r"^model\.language_model\.", "model."),
    (r"^language_model\.(model|lm_head)\.", r"\1."),
    (r"^model\.vision\.tower\.embeddings\.position_ids$", None),
]


class LlavaProjector(nn.Module):
    """Two linear layers, from the tower's width to the language model's."""

    def __init__(self, width: int, hidden: int, act: str, bias: bool) -> None:
        super().__init__()
        self.linear_1, self.linear_2 = TowerLinear(width, hidden, bias), TowerLinear(hidden, hidden, bias)
        self.act = tower_activation(act)

    def forward(self, x: Tensor) -> Tensor:
        """``x [T, width]``; returns ``[T, hidden]``."""
        out: Tensor = self.linear_2(self.act(self.linear_1(x)))
        return out


class LlavaVision(Vision):
    """The states of one of the tower's last layers, without the class's, projected."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hf = config.hf_config
        tower = vision_config(hf, config.model, ("clip_vision_model", "siglip_vision_model"))
        layer = hf.get("vision_feature_layer", -2)
        features = layer if isinstance(layer, list) else [layer]
        is_clip = tower.kind == "clip_vision_model"
        self.first = int(hf.get("vision_feature_select_strategy", "default") == "default")
        self.tower = VisionTransformer(tower, is_clip, features)
        act, bias = hf.get("projector_hidden_act", "gelu"), hf.get("multimodal_projector_bias", True)
        self.projector = LlavaProjector(tower.hidden_size * len(features), config.hidden_size, act, bias)

    def encode(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """See `Vision`; ``pixel_values [1, 3, H, W]``."""
        states: Tensor = self.tower(tensors["pixel_values"])[:, self.first :]
        return (self.projector(states.flatten(0, 1)),)


class LlavaForConditionalGeneration(ReadsImages, LlamaForCausalLM):
    """LLaVA 1.5 around a Llama."""

    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [*IMAGE_NAMES, *CausalLM.checkpoint_names]

    def create_vision(self, config: ModelConfig) -> Vision:
        """See `ReadsImages`."""
        return LlavaVision(config)
