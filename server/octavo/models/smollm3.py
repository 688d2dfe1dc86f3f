"""SmolLM3."""

from __future__ import annotations

from octavo.interface.model_config.smollm3 import SmolLM3Config
from octavo.layers.attention import SelfAttention
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.llama import LlamaForCausalLM
from octavo_kernels import AttentionOptions


class SmolLM3ForCausalLM(LlamaForCausalLM):
    """Llama without rotary embeddings in every fourth layer."""

    text: SmolLM3Config

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """``no_rope_layers`` has a 1 for each layer that turns, in spite of its name."""
        bias, window = self.text.attention_bias, self.text.window(layer)
        return SelfAttention(
            self.config,
            layer,
            self.tp,
            rotary if self.text.turned(layer) else None,
            qkv_bias=bias,
            out_bias=bias,
            options=AttentionOptions(window=window),
        )
