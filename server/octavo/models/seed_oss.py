"""Seed-OSS."""

from __future__ import annotations

from octavo.interface.model_config.seed_oss import SeedOssConfig
from octavo.layers.attention import SelfAttention
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.llama import LlamaForCausalLM


class SeedOssForCausalLM(LlamaForCausalLM):
    """Llama with biases of queries, keys and values."""

    text: SeedOssConfig

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """The attention of layer number ``layer``."""
        text = self.text
        bias, out_bias = text.attention_bias, text.attention_out_bias
        return SelfAttention(self.config, layer, self.tp, rotary, qkv_bias=bias, out_bias=out_bias)
