"""The language models of LLaVA-NeXT and LLaVA-OneVision."""

from __future__ import annotations

from octavo.interface.model_config.llava import LlavaConfig


class LlavaNextConfig(LlavaConfig):
    """Fields of LLaVA-NeXT."""


class LlavaOnevisionConfig(LlavaConfig):
    """Fields of LLaVA-OneVision."""
