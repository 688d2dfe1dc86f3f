"""The language models of checkpoints that read images: they answer text; the tensors for images are left out."""

from __future__ import annotations

from typing import ClassVar

from octavo.models.gemma3n import Gemma3nForCausalLM
from octavo.models.gemma4 import Gemma4ForCausalLM

_NAMES: list[tuple[str, str | None]] = [
    (r"^(model\.)?(vision_tower|multi_modal_projector)\.", None),
    (r"^model\.language_model\.", "model."),
    (r"^language_model\.(model|lm_head)\.", r"\1."),
]
_SOUND: list[tuple[str, str | None]] = [(r"^(model\.)?(audio_tower|embed_vision|embed_audio)\.", None)]


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
