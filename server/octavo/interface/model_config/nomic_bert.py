"""Nomic BERT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from octavo.interface.model_config.declarations import choice
from octavo.interface.model_config.encoder import EncoderConfig, only


class NomicBertConfig(EncoderConfig):
    """Fields as released; transformers renames them. Positions beyond those of its training are not supported."""

    aliases: ClassVar[Mapping[str, str]] = {
        "n_embd": "hidden_size",
        "n_inner": "intermediate_size",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
        "n_positions": "max_position_embeddings",
        "max_trained_positions": "max_position_embeddings",
        "layer_norm_epsilon": "layer_norm_eps",
        "rotary_emb_base": "rope_theta",
    }

    hidden_act: str = "silu"
    rope_theta: float = 1000.0
    position_embedding_type: str = choice(("absolute",), "absolute", 'must be "absolute"')
    activation_function: str = only("swiglu")
    prenorm: bool = only(False)
    parallel_block: bool = only(False)
    causal: bool = only(False)
    use_rms_norm: bool = only(False)
    qkv_proj_bias: bool = only(False)
    mlp_fc1_bias: bool = only(False)
    mlp_fc2_bias: bool = only(False)
    rotary_emb_fraction: float = only(1.0)
    rotary_emb_interleaved: bool = only(False)
    rotary_scaling_factor: float | None = only(None)
    moe_every_n_layers: int = only(0)
