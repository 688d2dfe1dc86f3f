"""StableLM."""

from __future__ import annotations

from octavo.errors import ModelError
from octavo.interface.model_config.stablelm import StableLmConfig
from octavo.layers.attention import SelfAttention
from octavo.layers.decoder import DecoderLayer, ParallelDecoderLayer
from octavo.layers.norm import LayerNorm
from octavo.layers.rotary import RotaryEmbedding, rotary_size
from octavo.models.llama import LlamaForCausalLM


class StableLmForCausalLM(LlamaForCausalLM):
    """Llama with layer norms; a quarter of each head is turned; attention and MLP one behind the other or side by
    side."""

    text: StableLmConfig

    def create_rotary(self) -> RotaryEmbedding:
        """The rotary embedding that layers share."""
        return RotaryEmbedding(self.config, rotary_size(self.config))

    def create_norm(self) -> LayerNorm:
        """A norm of hidden states."""
        return LayerNorm(self.config.hidden_size, self.text.layer_norm_eps)

    def create_layer(self, layer: int, rotary: RotaryEmbedding | None) -> DecoderLayer:
        """Layer number ``layer``."""
        if not self.text.use_parallel_residual:
            return super().create_layer(layer, rotary)
        return ParallelDecoderLayer(self.create_norm(), self.create_attention(layer, rotary), self.create_mlp())

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """The attention of layer number ``layer``."""
        if self.text.qk_layernorm:
            raise ModelError(f"{self.config.model}: StableLM models with norms of queries and keys are not supported")
        bias = self.text.attention_bias
        return SelfAttention(self.config, layer, self.tp, rotary, qkv_bias=bias)
