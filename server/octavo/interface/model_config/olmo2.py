"""OLMo 2 and OLMo 3 (dense)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from octavo.interface.model_config.text import TextConfig


class Olmo2Config(TextConfig):
    """Fields of OLMo 2, which has no windows."""

    rms_norm_eps: float = 1e-5

    def window(self, layer: int) -> int | None:
        """See `TextConfig`."""
        return None


class Olmo3Config(TextConfig):
    """Windows in three of four layers, whose positions are not stretched to longer contexts."""

    rms_norm_eps: float = 1e-5
    rope_theta: float = 5e5
    sliding_window: int | None = 4096

    def slides_by_default(self, layer: int) -> bool:
        """See `TextConfig`."""
        return (layer + 1) % 4 != 0

    def rope(self, layer_type: str | None = None) -> dict[str, Any]:
        """See `TextConfig`."""
        found = self.rope_scaling or self.rope_parameters or {}
        if layer_type != "sliding_attention" or any(isinstance(kind, dict) for kind in found.values()):
            return super().rope(layer_type)
        return replace(self, rope_scaling={"rope_theta": super().rope()["rope_theta"]}).rope()
