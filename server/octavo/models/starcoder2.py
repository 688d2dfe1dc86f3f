"""StarCoder2."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from octavo.interface.model_config.starcoder2 import Starcoder2Config
from octavo.layers.attention import SelfAttention
from octavo.layers.mlp import MLP
from octavo.layers.norm import LayerNorm
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.base import CausalLM
from octavo.models.llama import LlamaForCausalLM
from octavo_kernels import AttentionOptions


class Starcoder2ForCausalLM(LlamaForCausalLM):
    """Layer norms, biases, a plain MLP and a sliding window."""

    text: Starcoder2Config

    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [
        (r"\.mlp\.c_fc\.", ".mlp.fc1."),
        (r"\.mlp\.c_proj\.", ".mlp.fc2."),
        *CausalLM.checkpoint_names,
    ]

    def create_norm(self) -> LayerNorm:
        """A norm of hidden states."""
        return LayerNorm(self.config.hidden_size, self.text.layer_norm_eps)

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """The attention of layer number ``layer``."""
        text = self.text
        bias, window = text.use_bias, text.window(layer)
        return SelfAttention(
            self.config, layer, self.tp, rotary, qkv_bias=bias, out_bias=bias, options=AttentionOptions(window=window)
        )

    def create_mlp(self) -> nn.Module:
        """The MLP of one layer."""
        text = self.text
        bias, act = text.use_bias, text.hidden_act
        return MLP(self.config.hidden_size, text.intermediate_size, bias, act, self.tp)
