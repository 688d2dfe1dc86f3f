"""StarCoder2."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from octavo.layers.attention import SelfAttention
from octavo.layers.mlp import MLP
from octavo.layers.norm import LayerNorm
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.base import CausalLM
from octavo.models.llama import LlamaForCausalLM
from octavo_kernels import AttentionOptions


class Starcoder2ForCausalLM(LlamaForCausalLM):
    """Layer norms, biases, a plain MLP and a sliding window."""

    ties_embeddings: ClassVar[bool] = True
    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [
        (r"\.mlp\.c_fc\.", ".mlp.fc1."),
        (r"\.mlp\.c_proj\.", ".mlp.fc2."),
        *CausalLM.checkpoint_names,
    ]

    def create_norm(self) -> LayerNorm:
        """A norm of hidden states."""
        return LayerNorm(self.config.hidden_size, self.config.hf_config.get("layer_norm_eps", 1e-5))

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """The attention of layer number ``layer``."""
        hf = self.config.hf_config
        bias, window = hf.get("use_bias", True), hf.get("sliding_window")
        return SelfAttention(
            self.config, layer, self.tp, rotary, AttentionOptions(window=window), qkv_bias=bias, out_bias=bias
        )

    def create_mlp(self) -> nn.Module:
        """The MLP of one layer."""
        hf = self.config.hf_config
        bias, act = hf.get("use_bias", True), hf.get("hidden_act", "gelu_pytorch_tanh")
        return MLP(self.config.hidden_size, hf["intermediate_size"], bias, act, self.tp)
