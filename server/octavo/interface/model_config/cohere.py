"""Command R, Aya, Command R7B and Command A."""

from __future__ import annotations

from octavo.interface.config_checks import MAX_FACTOR, MAX_LAYERS
from octavo.interface.model_config.declarations import flag, integer, number
from octavo.interface.model_config.text import TextConfig


class CohereConfig(TextConfig):
    """Scaled logits, layer norms."""

    layer_norm_eps: float = number(0.0, 1.0, 1e-5)
    logit_scale: float = number(0.0, MAX_FACTOR, 0.0625, above=True)
    tie_word_embeddings: bool = True
    rope_theta: float = 5e5
    use_qk_norm: bool = flag(False)


class Cohere2Config(CohereConfig):
    """Windows in all layers but every ``sliding_window_pattern``-th."""

    rope_theta: float = 10000.0
    sliding_window: int | None = 4096
    sliding_window_pattern: int = integer(1, MAX_LAYERS, 4)

    def slides_by_default(self, layer: int) -> bool:
        """See `TextConfig`."""
        return (layer + 1) % self.sliding_window_pattern != 0
