"""LLaVA 1.5 (Liu et al., 2023): CLIP's, SigLIP's or Pixtral's patches through a small MLP into a language model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from octavo.errors import ModelError
from octavo.interface.engine_config import ModelConfig
from octavo.interface.model_config.llama import LlamaConfig
from octavo.interface.model_config.llava import LlavaConfig
from octavo.interface.model_config.qwen2 import Qwen2Config
from octavo.interface.vision_config import LLAVA_TOWERS, PIXTRAL_TOWERS, feature_layers, tower_table, vision_config
from octavo.layers.attention import SelfAttention
from octavo.layers.rotary import RotaryEmbedding
from octavo.layers.vision import TowerLinear, tower_activation
from octavo.models.base import CausalLM
from octavo.models.image_reader import ReadsImages, Vision
from octavo.models.llama import LlamaForCausalLM
from octavo.models.pixtral import PIXTRAL_NAMES, PixtralVisionTransformer
from octavo.models.siglip import VisionTransformer
from octavo_kernels import AttentionOptions

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
    """States of the tower, without the class's, projected."""

    towers: ClassVar[tuple[str, ...]] = LLAVA_TOWERS
    feature_layer: ClassVar[int] = -2  # where config.json does not say

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hf = config.hf_config
        tower = vision_config(hf, config.model, self.towers)
        features, drops_first = feature_layers(hf, config.model, tower, self.feature_layer)
        self.first = int(drops_first)
        self.tower = VisionTransformer(tower, tower.has_class, features)
        self.projector = create_projector(config, tower.hidden_size * len(features))

    def embed(self, pixels: Tensor) -> Tensor:
        """``pixels [N, 3, side, side]``; returns ``[N, patches, hidden]``."""
        states: Tensor = self.tower(pixels)[:, self.first :]
        out: Tensor = self.projector(states.flatten(0, 1))
        return out.view(len(pixels), states.shape[1], -1)

    def encode(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """See `Vision`; ``pixel_values [1, 3, side, side]``."""
        return (self.embed(tensors["pixel_values"])[0],)


class PixtralVision(Vision):
    """Pixtral 12B's: an embedding for each patch of an image of any size."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hf = config.hf_config
        tower = vision_config(hf, config.model, PIXTRAL_TOWERS)
        features, drops_first = feature_layers(hf, config.model, tower, LlavaVision.feature_layer)
        if drops_first:
            raise ModelError(
                f'{config.model}: vision_feature_select_strategy must be "full" with a Pixtral tower, which has no '
                "token for the image's class; correct the file or fetch the model again"
            )
        self.tower = PixtralVisionTransformer(tower, config.model, features)
        self.projector = create_projector(config, tower.hidden_size * len(features))

    def encode(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """See `Vision`; ``pixel_values [1, 3, H, W]``, whole patches."""
        return (self.projector(self.tower(tensors["pixel_values"])),)


def create_projector(config: ModelConfig, width: int) -> LlavaProjector:
    """Create the projector from ``width`` of the tower to the language model's, as config.json describes it."""
    text = config.text_of(LlavaConfig)
    act, bias = text.projector_hidden_act, text.multimodal_projector_bias
    return LlavaProjector(width, config.hidden_size, act, bias)


class LlavaForConditionalGeneration(ReadsImages, LlamaForCausalLM):
    """LLaVA 1.5, and Pixtral 12B; around a Llama, a Mistral or a Qwen2, which differ in their attention."""

    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [
        *PIXTRAL_NAMES,
        *IMAGE_NAMES,
        *CausalLM.checkpoint_names,
    ]

    def create_vision(self, config: ModelConfig) -> Vision:
        """See `ReadsImages`."""
        is_pixtral = tower_table(config.hf_config).get("model_type") in PIXTRAL_TOWERS
        return PixtralVision(config) if is_pixtral else LlavaVision(config)

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """See `LlamaForCausalLM`; ``model_type`` is the language model's."""
        if isinstance(self.text, LlamaConfig):
            return super().create_attention(layer, rotary)
        bias, window = isinstance(self.text, Qwen2Config), self.text.window(layer)
        return SelfAttention(
            self.config, layer, self.tp, rotary, qkv_bias=bias, options=AttentionOptions(window=window)
        )
