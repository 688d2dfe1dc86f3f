"""Qwen2 and Qwen2.5 (dense)."""

from __future__ import annotations

from octavo.interface.model_config.text import TextConfig


class Qwen2Config(TextConfig):
    """Fields of Qwen2. ``use_sliding_window`` gives windows to the layers that ``layer_types`` names, by default to
    those from ``max_window_layers`` on."""

    num_key_value_heads: int | None = 32
    sliding_window: int | None = 4096

    def window(self, layer: int) -> int | None:
        """See `TextConfig`."""
        return super().window(layer) if self.use_sliding_window else None

    def slides_by_default(self, layer: int) -> bool:
        """See `TextConfig`."""
        return layer >= self.max_window_layers
