"""Cohere's Command R, Aya (Cohere) and Command R7B, Command A (Cohere 2)."""

from __future__ import annotations

from typing import ClassVar

from octavo.errors import ModelError
from octavo.layers.attention import SelfAttention
from octavo.layers.decoder import DecoderLayer, ParallelDecoderLayer
from octavo.layers.linear import QKVRows
from octavo.layers.norm import LayerNorm
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.llama import LlamaForCausalLM
from octavo_kernels import AttentionOptions


class CohereForCausalLM(LlamaForCausalLM):
    """Attention and MLP side by side, layer norms without bias, rotary pairs of neighbours, scaled logits."""

    ties_embeddings: ClassVar[bool] = True

    def scales(self) -> tuple[float, float]:
        """What embeddings and logits are multiplied by."""
        return 1.0, self.config.hf_config.get("logit_scale", 0.0625)

    def create_norm(self) -> LayerNorm:
        """A norm of hidden states."""
        return LayerNorm(self.config.hidden_size, self.config.hf_config.get("layer_norm_eps", 1e-5), bias=False)

    def create_layer(self, layer: int, rotary: RotaryEmbedding | None) -> DecoderLayer:
        """Layer number ``layer``."""
        return ParallelDecoderLayer(self.create_norm(), self.create_attention(layer, rotary), self.create_mlp())

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """The attention of layer number ``layer``."""
        if self.config.hf_config.get("use_qk_norm"):
            raise ModelError(f"{self.config.model}: Cohere models with norms of queries and keys are not supported")
        return self._attention(layer, rotary, None)

    def _attention(self, layer: int, rotary: RotaryEmbedding | None, window: int | None) -> SelfAttention:
        bias, rows = self.config.hf_config.get("attention_bias", False), QKVRows(interleaved=self.config.head_size)
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
        hf = self.config.hf_config
        types = hf.get("layer_types")
        slides = types[layer] == "sliding_attention" if types else (layer + 1) % hf.get("sliding_window_pattern", 4)
        window = hf.get("sliding_window", 4096) if slides else None
        return self._attention(layer, rotary if window else None, window)
