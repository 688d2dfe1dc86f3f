"""SmolLM3."""

from __future__ import annotations

from octavo.interface.config_checks import MAX_LAYERS
from octavo.interface.model_config.declarations import integer, turns
from octavo.interface.model_config.text import TextConfig


class SmolLM3Config(TextConfig):
    """``no_rope_layers`` has a 1 for each layer that turns, in spite of its name; the others may have a window."""

    num_key_value_heads: int | None = 4
    tie_word_embeddings: bool = True
    rope_theta: float = 2e6
    no_rope_layers: list[int] | None = turns()
    no_rope_layer_interval: int = integer(1, MAX_LAYERS, 4)

    def turned(self, layer: int) -> bool:
        """True if layer number ``layer`` has rotary embeddings."""
        turns = self.no_rope_layers
        return bool(turns[layer] if turns else (layer + 1) % self.no_rope_layer_interval)

    def window(self, layer: int) -> int | None:
        """See `TextConfig`."""
        return super().window(layer) if self.use_sliding_window else None

    def slides_by_default(self, layer: int) -> bool:
        """See `TextConfig`."""
        return not self.turned(layer)
