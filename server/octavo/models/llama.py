"""Llama 2 and 3, Mistral, SmolLM2 and whatever else says LlamaForCausalLM; Qwen2 and Qwen3 are variations of it."""

from __future__ import annotations

from torch import nn

from octavo.interface.engine_config import ModelConfig
from octavo.layers.attention import SelfAttention
from octavo.layers.decoder import Decoder, DecoderLayer, PreNormDecoderLayer
from octavo.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import RMSNorm
from octavo.layers.parallel import TensorParallel
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.base import CausalLM


class LlamaForCausalLM(CausalLM):
    """RMSNorm before attention and before a gated MLP, rotary positions. Variations override the parts they change."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__(config, tp)
        embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp)
        rotary = RotaryEmbedding(config)
        layers = [self.create_layer(layer, rotary) for layer in range(config.num_layers)]
        self.model = Decoder(embed_tokens, layers, self.create_norm())
        tied = config.hf_config.get("tie_word_embeddings", False)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, tp, embed_tokens if tied else None)

    def create_layer(self, layer: int, rotary: RotaryEmbedding) -> DecoderLayer:
        """Layer number ``layer``."""
        attention = self.create_attention(layer, rotary)
        return PreNormDecoderLayer(self.create_norm(), attention, self.create_norm(), self.create_mlp())

    def create_norm(self) -> RMSNorm:
        """A norm of hidden states."""
        return RMSNorm(self.config.hidden_size, self.config.hf_config.get("rms_norm_eps", 1e-6))

    def create_attention(self, layer: int, rotary: RotaryEmbedding) -> SelfAttention:
        """The attention of layer number ``layer``."""
        bias = self.config.hf_config.get("attention_bias", False)
        return SelfAttention(self.config, layer, self.tp, rotary, qkv_bias=bias, out_bias=bias)

    def create_mlp(self) -> nn.Module:
        """The MLP of one layer."""
        hf = self.config.hf_config
        bias, act = hf.get("mlp_bias", False), hf.get("hidden_act", "silu")
        return GatedMLP(self.config.hidden_size, hf["intermediate_size"], bias, act, self.tp)


class MistralForCausalLM(LlamaForCausalLM):
    """Llama with a sliding window and no biases."""

    def create_attention(self, layer: int, rotary: RotaryEmbedding) -> SelfAttention:
        """Every layer has the window; a config that does not speak of it means the first Mistral's, null means none."""
        window = self.config.hf_config.get("sliding_window", 4096)
        return SelfAttention(self.config, layer, self.tp, rotary, window=window)
