"""ModernBERT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from octavo.interface.config_checks import MAX_WINDOW
from octavo.interface.model_config.declarations import choice, flag, integer, text
from octavo.interface.model_config.encoder import EncoderConfig


class ModernBertConfig(EncoderConfig):
    """Every ``global_attn_every_n_layers``-th layer attends to whole texts, the others within ``local_attention``."""

    aliases: ClassVar[Mapping[str, str]] = {
        "hidden_activation": "hidden_act",
        "norm_eps": "layer_norm_eps",
        "global_rope_theta": "rope_theta",
        "local_rope_theta": "rope_local_base_freq",
    }

    layer_norm_eps: float = 1e-5
    rope_theta: float = 160000.0
    rope_local_base_freq: float | None = 10000.0
    position_embedding_type: str = choice(("absolute",), "absolute", 'must be "absolute"')
    local_attention: int = integer(1, MAX_WINDOW, 128)
    global_attn_every_n_layers: int = integer(1, MAX_WINDOW, 3)
    norm_bias: bool = flag(False)
    classifier_bias: bool = flag(False)
    classifier_activation: str = text("gelu")

    @property
    def kinds(self) -> list[str]:
        """The kind of attention of each layer."""
        every, count = self.global_attn_every_n_layers, self.num_hidden_layers
        by_default = ["sliding_attention" if layer % every else "full_attention" for layer in range(count)]
        return self.layer_types or by_default
