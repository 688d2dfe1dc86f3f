"""EXAONE 4."""

from __future__ import annotations

from octavo.interface.config_checks import MAX_LAYERS, Fields
from octavo.interface.model_config.declarations import declare
from octavo.interface.model_config.text import TextConfig


def _pattern(fields: Fields, key: str) -> int | None:
    if fields.config.get("layer_types") is not None:  # beside which the pattern may be 0 or letters
        return None
    every: int = fields.integer(key, 1, MAX_LAYERS)
    return every


class Exaone4Config(TextConfig):
    """Windows in all layers but every ``sliding_window_pattern``-th; where there are some, others see no positions."""

    num_key_value_heads: int | None = 32
    rms_norm_eps: float = 1e-5
    sliding_window: int | None = 4096
    sliding_window_pattern: int | None = declare(_pattern, 4, null=True)

    def slides_by_default(self, layer: int) -> bool:
        """See `TextConfig`."""
        return (layer + 1) % (self.sliding_window_pattern or 4) != 0
