"""OPT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from octavo.interface.config_checks import MAX_POSITIONS, MAX_WIDTH
from octavo.interface.model_config.declarations import flag, integer
from octavo.interface.model_config.text import TextConfig


class OPTConfig(TextConfig):
    """Learned positions; norms before or behind blocks."""

    aliases: ClassVar[Mapping[str, str]] = {"ffn_dim": "intermediate_size", "activation_function": "hidden_act"}
    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "head_dim",
            "num_key_value_heads",
            "rope_parameters",
            "rope_scaling",
            "rope_theta",
            "layer_types",
            "sliding_window",
        }
    )
    is_rotary: ClassVar[bool] = False

    max_position_embeddings: int = integer(1, MAX_POSITIONS)
    hidden_act: str = "relu"
    tie_word_embeddings: bool = True
    word_embed_proj_dim: int | None = integer(1, MAX_WIDTH, None)
    enable_bias: bool = flag(True)
    layer_norm_elementwise_affine: bool = flag(True)
    do_layer_norm_before: bool = flag(True)
    _remove_final_layer_norm: bool = flag(False)
