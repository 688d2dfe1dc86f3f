"""StarCoder2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from octavo.interface.model_config.declarations import flag, number
from octavo.interface.model_config.text import TextConfig


class Starcoder2Config(TextConfig):
    """One window for all layers, one flag for all biases."""

    aliases: ClassVar[Mapping[str, str]] = {"norm_epsilon": "layer_norm_eps"}

    num_key_value_heads: int | None = 2
    hidden_act: str = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True
    layer_norm_eps: float = number(0.0, 1.0, 1e-5)
    use_bias: bool = flag(True)

    def slides(self, layer: int) -> bool:
        """See `TextConfig`."""
        return True
