"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini (dense, text)."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from octavo.interface.model_config.phi3 import Phi3Config
from octavo.layers.attention import SelfAttention
from octavo.layers.linear import QKVRows
from octavo.layers.mlp import GatedMLP
from octavo.layers.rotary import RotaryEmbedding, rotary_size
from octavo.models.llama import LlamaForCausalLM
from octavo_kernels import AttentionOptions


class Phi3ForCausalLM(LlamaForCausalLM):
    """Llama whose checkpoint holds q, k, v as one tensor, gate and up as another; part of each head may be turned."""

    text: Phi3Config

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        "qkv_proj": ["qkv_proj"] * 3,
        "gate_up_proj": ["gate_up_proj"] * 2,
    }

    def create_rotary(self) -> RotaryEmbedding:
        """The rotary embedding that layers share."""
        return RotaryEmbedding(self.config, rotary_size(self.config))

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """The attention of layer number ``layer``."""
        window = self.text.window(layer)
        return SelfAttention(
            self.config, layer, self.tp, rotary, options=AttentionOptions(window=window), rows=QKVRows(fused=True)
        )

    def create_mlp(self) -> nn.Module:
        """The MLP of one layer."""
        text = self.text
        act = text.hidden_act
        return GatedMLP(self.config.hidden_size, text.intermediate_size, False, act, self.tp, fused_weights=True)
