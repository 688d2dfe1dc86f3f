"""GPT-2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from octavo.interface.config_checks import MAX_POSITIONS
from octavo.interface.model_config.declarations import flag, fourfold, integer, number
from octavo.interface.model_config.text import TextConfig


class GPT2Config(TextConfig):
    """Learned positions, layer norms and biases everywhere."""

    aliases: ClassVar[Mapping[str, str]] = {
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
        "n_positions": "max_position_embeddings",
        "n_inner": "intermediate_size",
        "activation_function": "hidden_act",
        "layer_norm_epsilon": "layer_norm_eps",
    }
    ignored: ClassVar[frozenset[str]] = frozenset({"head_dim", "num_key_value_heads"})
    is_rotary: ClassVar[bool] = False

    max_position_embeddings: int = integer(1, MAX_POSITIONS)
    hidden_act: str = "gelu_new"
    tie_word_embeddings: bool = True
    layer_norm_eps: float = number(0.0, 1.0, 1e-5)
    scale_attn_weights: bool = flag(True)
    scale_attn_by_inverse_layer_idx: bool = flag(False)

    @classmethod
    def in_common_words(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `TextConfig`; an MLP is four times as wide as hidden states, where nothing is said."""
        return fourfold(super().in_common_words(config))
