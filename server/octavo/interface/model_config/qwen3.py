"""Qwen3 (dense)."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.interface.model_config.qwen2 import Qwen2Config


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(Qwen2Config):
    """Qwen2's windows."""

    head_dim: int | None = 128
