"""Mistral Small 3.1 and 3.2, Ministral 3."""

from __future__ import annotations

from typing import ClassVar

from octavo.interface.model_config.declarations import flag, text
from octavo.interface.model_config.llama import MistralConfig


class Mistral3Config(MistralConfig):
    """Fields of Mistral 3, with one of Mistral's language models."""

    text_types: ClassVar[tuple[str, ...]] = ("mistral", "mistral3", "ministral3")

    projector_hidden_act: str = text("gelu")
    multimodal_projector_bias: bool = flag(False)
