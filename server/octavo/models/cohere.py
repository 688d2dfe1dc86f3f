"""Cohere's Command R, Aya (Cohere) and Command R7B, Command A (Cohere 2)."""

from __future__ import annotations

from octavo.errors import ModelError
from octavo.interface.model_config.cohere import CohereConfig
from octavo.layers.attention import SelfAttention
from octavo.layers.decoder import DecoderLayer, ParallelDecoderLayer
from octavo.layers.linear import QKVRows
from octavo.layers.norm import LayerNorm
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.llama import LlamaForCausalLM
from octavo_kernels import AttentionOptions


class CohereForCausalLM(LlamaForCausalLM):
    """Attention and MLP side by side, layer norms without bias, rotary pairs of neighbours, scaled logits."""

    text: CohereConfig

    def scales(self) -> tuple[float, float]:
        """The factors of embeddings and of logits."""
        return 1.0, self.text.logit_scale

    def create_norm(self) -> LayerNorm:
        """A norm of hidden states."""
        return LayerNorm(self.config.hidden_size, self.text.layer_norm_eps, bias=False)

    def create_layer(self, layer: int, rotary: RotaryEmbedding | None) -> DecoderLayer:
        """Layer number ``layer``."""
        return ParallelDecoderLayer(self.create_norm(), self.create_attention(layer, rotary), self.create_mlp())

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """The attention of layer number ``layer``."""
        if self.text.use_qk_norm:
            raise ModelError(f"{self.config.model}: Cohere models with norms of queries and keys are not supported")
        return self._attention(layer, rotary, None)

    def _attention(self, layer: int, rotary: RotaryEmbedding | None, window: int | None) -> SelfAttention:
        bias, rows = self.text.attention_bias, QKVRows(interleaved=self.config.head_size)
        return SelfAttention(
            self.config,
            layer,
            self.tp,
            rotary,
            AttentionOptions(window=window),
            qkv_bias=bias,
            out_bias=bias,
            rows=rows,
        )


class Cohere2ForCausalLM(CohereForCausalLM):
    """A window in three of four layers; those without see no positions."""

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """The attention of layer number ``layer``."""
        window = self.text.window(layer)
        return self._attention(layer, rotary if window else None, window)
