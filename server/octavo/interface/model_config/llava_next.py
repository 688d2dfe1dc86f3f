"""The language models of LLaVA-NeXT and LLaVA-OneVision."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.interface.model_config.llava import LlavaConfig


@dataclass(frozen=True, kw_only=True)
class LlavaNextConfig(LlavaConfig):
    """Fields of LLaVA-NeXT."""


@dataclass(frozen=True, kw_only=True)
class LlavaOnevisionConfig(LlavaConfig):
    """Fields of LLaVA-OneVision."""
