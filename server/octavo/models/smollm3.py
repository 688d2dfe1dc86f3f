"""SmolLM3."""

from __future__ import annotations

from typing import ClassVar

from octavo.layers.attention import SelfAttention
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.llama import LlamaForCausalLM
from octavo_kernels import AttentionOptions


class SmolLM3ForCausalLM(LlamaForCausalLM):
    """Llama without rotary embeddings in every fourth layer."""

    ties_embeddings: ClassVar[bool] = True

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """``no_rope_layers`` has a 1 for each layer that turns, in spite of its name."""
        hf = self.config.hf_config
        turns = hf.get("no_rope_layers")
        turned = turns[layer] if turns else (layer + 1) % hf.get("no_rope_layer_interval", 4)
        bias, types = hf.get("attention_bias", False), hf.get("layer_types")
        slides = hf.get("use_sliding_window") and (types[layer] == "sliding_attention" if types else not turned)
        window = hf.get("sliding_window") if slides else None
        options = AttentionOptions(window=window)
        return SelfAttention(
            self.config, layer, self.tp, rotary if turned else None, options, qkv_bias=bias, out_bias=bias
        )
