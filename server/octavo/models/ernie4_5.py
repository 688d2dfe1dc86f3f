"""ERNIE 4.5 (dense)."""

from __future__ import annotations

from torch import nn

from octavo.interface.model_config.ernie4_5 import Ernie4_5Config
from octavo.layers.attention import SelfAttention
from octavo.layers.linear import QKVRows
from octavo.layers.mlp import GatedMLP
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.llama import LlamaForCausalLM


class Ernie4_5ForCausalLM(LlamaForCausalLM):  # noqa: N801
    """Llama whose rotary pairs are neighbours."""

    text: Ernie4_5Config

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """The attention of layer number ``layer``."""
        bias, rows = self.text.use_bias, QKVRows(interleaved=self.config.head_size)
        return SelfAttention(self.config, layer, self.tp, rotary, qkv_bias=bias, out_bias=bias, rows=rows)

    def create_mlp(self) -> nn.Module:
        """The MLP of one layer."""
        text = self.text
        bias, act = text.use_bias, text.hidden_act
        return GatedMLP(self.config.hidden_size, text.intermediate_size, bias, act, self.tp)
