"""GTE of 2024, on Hugging Face also the family 'new'."""

from __future__ import annotations

from octavo.interface.model_config.declarations import choice
from octavo.interface.model_config.encoder import EncoderConfig, only


class GteConfig(EncoderConfig):
    """Rotary positions."""

    type_vocab_size: int = 1
    rope_theta: float = 160000.0
    position_embedding_type: str = choice(("rope",), "rope", 'must be "rope"')
    pack_qkv: bool = only(True)
    layer_norm_type: str = only("layer_norm")
    logn_attention_scale: bool = only(False)
    logn_attention_clip1: bool = only(False)


class NewConfig(GteConfig):
    """Fields of GTE under its first name."""

    rope_theta: float = 10000.0
