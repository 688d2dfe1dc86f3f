"""Falcon."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from octavo.interface.model_config.declarations import declare, flag, fourfold, number
from octavo.interface.model_config.text import TextConfig


class FalconConfig(TextConfig):
    """Old models have one key and value head with ``multi_query``, whatever ``num_kv_heads`` says."""

    aliases: ClassVar[Mapping[str, str]] = {
        "num_kv_heads": "num_key_value_heads",
        "n_head_kv": "num_key_value_heads",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
        "ffn_hidden_size": "intermediate_size",
        "activation": "hidden_act",
        "layer_norm_epsilon": "layer_norm_eps",
    }
    ignored: ClassVar[frozenset[str]] = frozenset({"head_dim"})

    hidden_act: str = "gelu"
    max_position_embeddings: int | None = 2048
    tie_word_embeddings: bool = True
    layer_norm_eps: float = number(0.0, 1.0, 1e-5)
    bias: bool = flag(False)
    alibi: bool = flag(False)
    multi_query: bool = flag(True)
    new_decoder_architecture: bool = flag(False)
    parallel_attn: bool = flag(True)
    num_ln_in_parallel_attn: Any = declare(lambda fields, key: fields.config[key], 2)  # of new models

    @classmethod
    def in_common_words(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `TextConfig`; an MLP is four times as wide as hidden states, where nothing is said."""
        return fourfold(super().in_common_words(config))

    @property
    def num_kv_heads(self) -> int:
        """See `TextConfig`."""
        return 1 if self.multi_query and not self.new_decoder_architecture else super().num_kv_heads
