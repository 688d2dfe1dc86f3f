"""ERNIE 4.5 (dense)."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from octavo.layers.attention import SelfAttention
from octavo.layers.linear import QKVRows
from octavo.layers.mlp import GatedMLP
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.llama import LlamaForCausalLM


class Ernie4_5ForCausalLM(LlamaForCausalLM):  # noqa: N801
    """Llama whose rotary pairs are neighbours."""

    ties_embeddings: ClassVar[bool] = True

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """The attention of layer number ``layer``."""
        bias, rows = self.config.hf_config.get("use_bias", False), QKVRows(interleaved=self.config.head_size)
        return SelfAttention(self.config, layer, self.tp, rotary, qkv_bias=bias, out_bias=bias, rows=rows)

    def create_mlp(self) -> nn.Module:
        """The MLP of one layer."""
        hf = self.config.hf_config
        bias, act = hf.get("use_bias", False), hf.get("hidden_act", "silu")
        return GatedMLP(self.config.hidden_size, hf["intermediate_size"], bias, act, self.tp)
