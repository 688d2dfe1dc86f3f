"""Seed-OSS."""

from __future__ import annotations

from octavo.layers.attention import SelfAttention
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.llama import LlamaForCausalLM


class SeedOssForCausalLM(LlamaForCausalLM):
    """Llama with biases of queries, keys and values."""

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """The attention of layer number ``layer``."""
        hf = self.config.hf_config
        bias, out_bias = hf.get("attention_bias", True), hf.get("attention_out_bias", False)
        return SelfAttention(self.config, layer, self.tp, rotary, qkv_bias=bias, out_bias=out_bias)
