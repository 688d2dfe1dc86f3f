"""Qwen3 (dense)."""

from __future__ import annotations

from octavo.interface.model_config.qwen2 import Qwen2Config


class Qwen3Config(Qwen2Config):
    """Qwen2's windows."""

    head_dim: int | None = 128
