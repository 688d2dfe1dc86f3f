"""Granite 3 (dense)."""

from __future__ import annotations

from octavo.interface.model_config.granite import GraniteConfig
from octavo.layers.attention import SelfAttention
from octavo.layers.decoder import DecoderLayer, PreNormDecoderLayer
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.llama import LlamaForCausalLM
from octavo_kernels import AttentionOptions


class GraniteForCausalLM(LlamaForCausalLM):
    """Llama with multipliers of embeddings, scores, what blocks add to the residual, and logits."""

    text: GraniteConfig

    def scales(self) -> tuple[float, float]:
        """The factors of embeddings and of logits."""
        text = self.text
        return text.embedding_multiplier, 1.0 / text.logits_scaling

    def create_layer(self, layer: int, rotary: RotaryEmbedding | None) -> DecoderLayer:
        """Layer number ``layer``."""
        attention, mlp = self.create_attention(layer, rotary), self.create_mlp()
        scale = self.text.residual_multiplier
        return PreNormDecoderLayer(self.create_norm(), attention, self.create_norm(), mlp, residual_scale=scale)

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """The attention of layer number ``layer``."""
        text = self.text
        bias, scale = text.attention_bias, text.attention_multiplier
        return SelfAttention(
            self.config, layer, self.tp, rotary, qkv_bias=bias, out_bias=bias, options=AttentionOptions(scale)
        )
