"""Qwen3 (dense): Qwen2's windows, no bias, and a norm of each query and key head."""

from __future__ import annotations

from octavo.layers.attention import SelfAttention
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.llama import LlamaForCausalLM
from octavo.models.qwen2 import layer_window
from octavo_kernels import AttentionOptions


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Llama with norms of queries and keys, and sliding windows in some layers."""

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """The attention of layer number ``layer``."""
        hf = self.config.hf_config
        bias, window = hf.get("attention_bias", False), layer_window(hf, layer)
        options = AttentionOptions(window=window)
        return SelfAttention(self.config, layer, self.tp, rotary, options, qkv_bias=bias, out_bias=bias, qk_norm=True)
