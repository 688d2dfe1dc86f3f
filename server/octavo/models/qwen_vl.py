"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: Qwen's language models whose tokens of images have three positions
(M-RoPE).
"""

from __future__ import annotations

from typing import ClassVar

from octavo.interface.engine_config import ModelConfig
from octavo.interface.qwen_vision_config import qwen_vision_config
from octavo.layers.mrope import MRotaryEmbedding
from octavo.layers.rotary import RotaryEmbedding, rotary_size
from octavo.models.image_reader import ReadsImages, Vision
from octavo.models.llama import LlamaForCausalLM
from octavo.models.qwen2 import Qwen2ForCausalLM
from octavo.models.qwen3 import Qwen3ForCausalLM
from octavo.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM
from octavo.models.qwen_moe import Qwen3MoeForCausalLM
from octavo.models.qwen_vision import Qwen3Vision, Qwen25Vision, Qwen35Vision, QwenVision

_NAMES: list[tuple[str, str | None]] = [
    (r"^(model\.)?visual\.", "model.vision."),
    (r"^(model\.vision\..*merger\S*)\.ln_q\.", r"\1.norm."),
    (r"^(model\.vision\..*merger)\.mlp\.0\.", r"\1.fc1."),
    (r"^(model\.vision\..*merger)\.mlp\.2\.", r"\1.fc2."),
    (r"^(model\.vision\..*)\.linear_fc([12])\.", r"\1.fc\2."),
    (r"^model\.vision\.patch_embed\.proj\.", "model.vision.patch_embed."),
    (r"^model\.language_model\.", "model."),
    (r"^language_model\.(model|lm_head)\.", r"\1."),
    (r"^language_model\.", "model."),
]


class QwenVL(ReadsImages, LlamaForCausalLM):
    """The language model that the families share."""

    vision_class: ClassVar[type[QwenVision]] = QwenVision
    # M-RoPE: whether positions take turns, and how many pairs follow each if config.json does not say.
    interleaved: ClassVar[bool] = False
    sections: ClassVar[tuple[int, int, int]] = (16, 24, 24)

    def create_rotary(self) -> RotaryEmbedding:
        """See `LlamaForCausalLM`. Text alone needs nothing of the three positions."""
        if not self.config.reads_images:
            return RotaryEmbedding(self.config, self.rotary_size)
        return MRotaryEmbedding(self.config, self.interleaved, self.sections, self.rotary_size)

    @property
    def rotary_size(self) -> int:
        """The number of a head's leading elements that are turned."""
        return self.config.head_size

    def layers_of_one_stage(self) -> list[range]:
        """See `CausalLM`. What is added to the first layers' results is where images are encoded."""
        whole, config = super().layers_of_one_stage(), self.config
        if config.reads_images:
            tower = qwen_vision_config(config.hf_config, config.model, self.vision_class.kind)
            whole.append(range(len(tower.deep_layers)))
        return whole

    def create_vision(self, config: ModelConfig) -> Vision:
        """See `ReadsImages`."""
        return self.vision_class(config)


class Qwen2VLForConditionalGeneration(QwenVL, Qwen2ForCausalLM):
    """Qwen2-VL."""

    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [*_NAMES, *Qwen2ForCausalLM.checkpoint_names]


class Qwen2_5_VLForConditionalGeneration(Qwen2VLForConditionalGeneration):  # noqa: N801
    """Qwen2.5-VL."""

    vision_class = Qwen25Vision


class Qwen3VLForConditionalGeneration(QwenVL, Qwen3ForCausalLM):
    """Qwen3-VL, dense."""

    vision_class = Qwen3Vision
    interleaved = True
    sections = (24, 20, 20)
    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [*_NAMES, *Qwen3ForCausalLM.checkpoint_names]


class Qwen3VLMoeForConditionalGeneration(QwenVL, Qwen3MoeForCausalLM):
    """Qwen3-VL's mixtures of experts."""

    vision_class = Qwen3Vision
    interleaved = True
    sections = (24, 20, 20)
    stacked_experts: ClassVar[tuple[bool, bool]] = (True, False)
    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [*_NAMES, *Qwen3MoeForCausalLM.checkpoint_names]


class Qwen3_5ForConditionalGeneration(QwenVL, Qwen3_5ForCausalLM):  # noqa: N801
    """Qwen3.5, dense."""

    vision_class = Qwen35Vision
    interleaved = True
    sections = (11, 11, 10)
    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [*_NAMES, *Qwen3_5ForCausalLM.checkpoint_names]

    @property
    def rotary_size(self) -> int:
        """See `QwenVL`."""
        return rotary_size(self.config)


class Qwen3_5MoeForConditionalGeneration(Qwen3_5ForConditionalGeneration, Qwen3_5MoeForCausalLM):  # noqa: N801
    """Qwen3.5's mixtures of experts."""
