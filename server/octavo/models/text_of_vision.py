"""The language models of checkpoints that read images: they answer text; the tensors for images are left out.

Where all positions of a token are one, as they are in text, M-RoPE is the usual rotary embedding.
"""

from __future__ import annotations

from typing import ClassVar

from octavo.models.gemma3n import Gemma3nForCausalLM
from octavo.models.gemma4 import Gemma4ForCausalLM
from octavo.models.llama import MistralForCausalLM
from octavo.models.qwen2 import Qwen2ForCausalLM
from octavo.models.qwen3 import Qwen3ForCausalLM
from octavo.models.qwen_moe import Qwen3MoeForCausalLM

_NAMES: list[tuple[str, str | None]] = [
    (r"^(model\.)?(visual|vision_tower|multi_modal_projector)\.", None),
    (r"^model\.language_model\.", "model."),
    (r"^language_model\.(model|lm_head)\.", r"\1."),
]
_SOUND: list[tuple[str, str | None]] = [(r"^(model\.)?(audio_tower|embed_vision|embed_audio)\.", None)]


class Qwen2VLForConditionalGeneration(Qwen2ForCausalLM):
    """Qwen2-VL's text."""

    leaves_out: str | None = "images"
    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [*_NAMES, *Qwen2ForCausalLM.checkpoint_names]


class Qwen2_5_VLForConditionalGeneration(Qwen2VLForConditionalGeneration):  # noqa: N801
    """Qwen2.5-VL's text."""


class Qwen3VLForConditionalGeneration(Qwen3ForCausalLM):
    """Qwen3-VL's text."""

    leaves_out: str | None = "images"
    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [*_NAMES, *Qwen3ForCausalLM.checkpoint_names]


class Qwen3VLMoeForConditionalGeneration(Qwen3MoeForCausalLM):
    """The text of Qwen3-VL's mixtures of experts."""

    leaves_out: str | None = "images"
    stacked_experts: ClassVar[tuple[bool, bool]] = (True, False)
    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [*_NAMES, *Qwen3MoeForCausalLM.checkpoint_names]


class Mistral3ForConditionalGeneration(MistralForCausalLM):
    """The text of Mistral Small 3.1 and 3.2 and of Ministral 3."""

    leaves_out: str | None = "images"
    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [*_NAMES, *MistralForCausalLM.checkpoint_names]


class Gemma3nForConditionalGeneration(Gemma3nForCausalLM):
    """The text of Gemma 3n E2B and E4B."""

    leaves_out: str | None = "images, video and audio"
    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [
        *_SOUND,
        *_NAMES,
        *Gemma3nForCausalLM.checkpoint_names,
    ]


class Gemma4ForConditionalGeneration(Gemma4ForCausalLM):
    """The text of Gemma 4, all sizes."""

    leaves_out: str | None = "images, video and audio"
    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [*_SOUND, *_NAMES, *Gemma4ForCausalLM.checkpoint_names]


class Gemma4UnifiedForConditionalGeneration(Gemma4ForConditionalGeneration):
    """The text of Gemma 4 12B."""
