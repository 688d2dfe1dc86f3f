"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini."""

from __future__ import annotations

from octavo.interface.model_config.text import PartialRotaryConfig


class Phi3Config(PartialRotaryConfig):
    """One window for all layers."""

    rms_norm_eps: float = 1e-5

    def slides(self, layer: int) -> bool:
        """See `TextConfig`."""
        return True
