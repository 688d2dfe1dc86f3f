"""Gemma 1, 2 and 3 (text)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from octavo.interface.model_config.gemma import GemmaConfig, WindowedGemmaConfig
from octavo.layers.attention import SelfAttention
from octavo.layers.decoder import DecoderLayer, PreNormDecoderLayer
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import RMSNorm
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.base import CausalLM
from octavo.models.llama import LlamaForCausalLM
from octavo_kernels import AttentionOptions


class GemmaForCausalLM(LlamaForCausalLM):
    """Llama with norms around 0, embeddings times sqrt(H) and GELU gates."""

    text: GemmaConfig

    @property
    def norm_offset(self) -> float:
        """The part of a norm's weight that checkpoints leave out; GGUF files hold all of it."""
        return 0.0 if self.config.files.format == "gguf" else 1.0

    def scales(self) -> tuple[float, float]:
        """The factors of embeddings, sqrt(H) rounded to the model's dtype, and of logits."""
        dtype = getattr(torch, self.config.dtype)
        return torch.tensor(self.config.hidden_size**0.5, dtype=dtype, device="cpu").item(), 1.0

    def create_norm(self) -> RMSNorm:
        """A norm of hidden states."""
        return RMSNorm(self.config.hidden_size, self.text.rms_norm_eps, self.norm_offset)

    def create_mlp(self) -> nn.Module:
        """The MLP of one layer."""
        text = self.text
        return GatedMLP(text.hidden_size, text.intermediate_size, False, text.act, self.tp)


class Gemma2ForCausalLM(GemmaForCausalLM):
    """Gemma with norms behind the blocks, too, capped scores and logits, and windows in every other layer."""

    text: WindowedGemmaConfig

    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [
        (r"\.post_attention_layernorm\.", ".attention_output_norm."),
        (r"\.pre_feedforward_layernorm\.", ".post_attention_layernorm."),
        (r"\.post_feedforward_layernorm\.", ".mlp_output_norm."),
        *CausalLM.checkpoint_names,
    ]
    qk_norm: ClassVar[bool] = False
    caps_scores: ClassVar[bool] = True

    @property
    def logit_cap(self) -> float | None:
        """See `LlamaForCausalLM`."""
        return self.text.final_logit_softcapping

    def create_layer(self, layer: int, rotary: RotaryEmbedding | None) -> DecoderLayer:
        """Layer number ``layer``."""
        attention, mlp, norm = self.create_attention(layer, rotary), self.create_mlp(), self.create_norm
        return PreNormDecoderLayer(norm(), attention, norm(), mlp, attention_output_norm=norm(), mlp_output_norm=norm())

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """The attention of layer number ``layer``."""
        text = self.text
        bias = text.attention_bias
        return SelfAttention(
            self.config,
            layer,
            self.tp,
            rotary,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=self.qk_norm,
            options=AttentionOptions(
                scale=text.query_pre_attn_scalar**-0.5,
                window=text.window(layer),
                softcap=text.attn_logit_softcapping if self.caps_scores else None,
            ),
            norm_offset=self.norm_offset,
        )


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """Gemma 2 with norms of queries and keys, no capped scores, and positions of their own in layers with a window."""

    qk_norm: ClassVar[bool] = True
    caps_scores: ClassVar[bool] = False  # whatever attn_logit_softcapping says

    def create_rotaries(self) -> list[RotaryEmbedding | None]:
        """One for each type of layer."""
        text = self.text
        shared = {kind: RotaryEmbedding(self.config, parameters=text.rope(kind)) for kind in set(text.kinds)}
        return [shared[kind] for kind in text.kinds]
