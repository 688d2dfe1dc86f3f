"""Qwen2 and Qwen2.5 (dense)."""

from __future__ import annotations

from octavo.interface.model_config.qwen2 import Qwen2Config
from octavo.layers.attention import SelfAttention
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.llama import LlamaForCausalLM
from octavo_kernels import AttentionOptions


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Llama with biases of queries, keys and values, and sliding windows in some layers."""

    text: Qwen2Config

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """The attention of layer number ``layer``."""
        window = self.text.window(layer)
        return SelfAttention(
            self.config, layer, self.tp, rotary, qkv_bias=True, options=AttentionOptions(window=window)
        )
