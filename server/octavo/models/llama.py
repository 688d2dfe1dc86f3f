"""Llama 2 and 3, Mistral, SmolLM2 and whatever else says LlamaForCausalLM; most other families are variations of it."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from octavo.interface.engine_config import ModelConfig
from octavo.interface.model_config.llama import MistralConfig
from octavo.layers.attention import SelfAttention
from octavo.layers.decoder import Decoder, DecoderLayer, PreNormDecoderLayer
from octavo.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import LayerNorm, RMSNorm
from octavo.layers.parallel import TensorParallel
from octavo.layers.query_scale import GrowingQueryAttention, QueryScale
from octavo.layers.rotary import RotaryEmbedding
from octavo.layers.unregistered import set_unregistered
from octavo.models.base import CausalLM
from octavo_kernels import AttentionOptions


class LlamaForCausalLM(CausalLM):
    """RMSNorm before attention and before a gated MLP, rotary positions. Variations override the parts they change."""

    head_bias: ClassVar[bool] = False

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__(config, tp)
        hidden = config.hidden_size
        embed_tokens = VocabParallelEmbedding(config.vocab_size, hidden, tp)
        rotary = self.create_rotaries()
        layers = [self.create_layer(layer, rotary[layer]) for layer in range(config.num_layers)]
        embedding_scale, logit_scale = self.scales()
        self.model = self.create_decoder(embed_tokens, layers, embedding_scale)
        tied = embed_tokens if self.text.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(config.vocab_size, hidden, tp, tied, logit_scale, self.head_bias, self.logit_cap)

    @property
    def logit_cap(self) -> float | None:
        """The cap of logits."""
        return None

    def scales(self) -> tuple[float, float]:
        """The factors of embeddings and of logits."""
        return 1.0, 1.0

    def create_decoder(
        self, embed_tokens: VocabParallelEmbedding, layers: list[DecoderLayer], embedding_scale: float
    ) -> Decoder:
        """The model without its head."""
        return Decoder(embed_tokens, layers, self.create_norm(), embedding_scale)

    def create_rotaries(self) -> list[RotaryEmbedding | None]:
        """The rotary embeddings of each layer: one that all share, unless a family has several."""
        return [self.create_rotary()] * self.config.num_layers

    def create_rotary(self) -> RotaryEmbedding | None:
        """The rotary embedding that layers share."""
        return RotaryEmbedding(self.config)

    def create_layer(self, layer: int, rotary: RotaryEmbedding | None) -> DecoderLayer:
        """Layer number ``layer``."""
        attention = self.create_attention(layer, rotary)
        return PreNormDecoderLayer(self.create_norm(), attention, self.create_norm(), self.create_mlp())

    def create_norm(self) -> RMSNorm | LayerNorm:
        """A norm of hidden states."""
        return RMSNorm(self.config.hidden_size, self.text.rms_norm_eps)

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """The attention of layer number ``layer``."""
        bias = self.text.attention_bias
        return SelfAttention(self.config, layer, self.tp, rotary, qkv_bias=bias, out_bias=bias)

    def create_mlp(self) -> nn.Module:
        """The MLP of one layer."""
        text = self.text
        return GatedMLP(text.hidden_size, text.intermediate_size, text.mlp_bias, text.hidden_act, self.tp)


class MinistralForCausalLM(LlamaForCausalLM):
    """Llama with a sliding window in the layers that ``layer_types`` names."""

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """The attention of layer number ``layer``."""
        return SelfAttention(self.config, layer, self.tp, rotary, AttentionOptions(window=self.text.window(layer)))


class MistralForCausalLM(LlamaForCausalLM):
    """Llama with a sliding window and no biases; Ministral 3's queries grow beyond its original context."""

    _query_scale: QueryScale | None
    text: MistralConfig

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        grows = config.text_of(MistralConfig).query_growth
        scaled = grows is not None and config.max_model_len > grows[0]
        scale = QueryScale(config, *grows) if grows and scaled else None
        set_unregistered(self, _query_scale=scale)
        super().__init__(config, tp)

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """Every layer has the window; a config that does not speak of it means the first Mistral's, null means none."""
        attention = GrowingQueryAttention(
            self.config, layer, self.tp, rotary, AttentionOptions(window=self.text.window(layer))
        )
        attention.query_scale = self._query_scale
        return attention
