"""Qwen3 (dense): Qwen2's windows, no bias, and a norm of each query and key head."""

from __future__ import annotations

from octavo.interface.model_config.qwen3 import Qwen3Config
from octavo.layers.attention import SelfAttention
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.llama import LlamaForCausalLM
from octavo_kernels import AttentionOptions


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Llama with norms of queries and keys, and sliding windows in some layers."""

    text: Qwen3Config

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """The attention of layer number ``layer``."""
        bias, window = self.text.attention_bias, self.text.window(layer)
        return SelfAttention(
            self.config,
            layer,
            self.tp,
            rotary,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=True,
            options=AttentionOptions(window=window),
        )
