"""Llama 4 (text): experts whose weights are applied to what they read, layers without rotary embeddings."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from torch import nn

from octavo.interface.engine_config import ModelConfig
from octavo.interface.model_config.llama4 import Llama4Config
from octavo.layers.attention import SelfAttention
from octavo.layers.decoder import DecoderLayer, PreNormDecoderLayer
from octavo.layers.linear import QKVRows
from octavo.layers.mlp import GatedMLP
from octavo.layers.moe import FusedMoE, Routing, expert_settings
from octavo.layers.norm import RMSNorm, UnitNorm
from octavo.layers.parallel import TensorParallel
from octavo.layers.query_scale import GrowingQueryAttention, QueryScale
from octavo.layers.rotary import RotaryEmbedding
from octavo.layers.unregistered import set_unregistered
from octavo.models.llama import LlamaForCausalLM
from octavo_kernels import AttentionOptions


class Llama4Attention(GrowingQueryAttention):
    """Attention with queries and keys normed without weights, which commutes with turning them."""

    head_norm: ClassVar[type[RMSNorm]] = UnitNorm


class Llama4ForCausalLM(LlamaForCausalLM):
    """Dense and sparse layers, each of them as text_config says; most attend within chunks of attention_chunk_size, the
    others to all positions, without rotary embeddings and with queries that grow."""

    _query_scale: QueryScale | None
    text: Llama4Config

    stacked_experts: ClassVar[tuple[bool, bool]] = (True, False)
    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [
        (r"^(model\.)?(vision_model|multi_modal_projector)\.", None),
        (r"^model\.language_model\.", "model."),
        (r"^language_model\.(model|lm_head)\.", r"\1."),
        (r"\.feed_forward\.router\.", ".mlp.gate."),
        (r"\.feed_forward\.", ".mlp."),
        *LlamaForCausalLM.checkpoint_names,
    ]

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        text = config.text_of(Llama4Config)
        floor = text.floor_scale
        scaled = text.attn_temperature_tuning and config.max_model_len >= floor
        scale = QueryScale(config, floor, text.attn_scale, first=1) if scaled else None
        set_unregistered(self, _query_scale=scale)
        super().__init__(config, tp)

    def create_rotary(self) -> RotaryEmbedding:
        """The rotary embedding that layers share. Its factor on queries and keys is undone by their norms: here they
        are normed before they are turned."""
        rotary = RotaryEmbedding(self.config)
        if self.text.use_qk_norm:
            rotary.cos_sin_cache.div_(rotary.scale)
        return rotary

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """``no_rope_layers`` has a 1 for each layer that turns, in spite of its name; these attend in chunks."""
        text = self.text
        turned, chunk = text.turned(layer), text.window(layer)
        bias, norms = text.attention_bias, turned and text.use_qk_norm
        attention = Llama4Attention(
            self.config,
            layer,
            self.tp,
            rotary if turned else None,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=norms,
            options=AttentionOptions(window=chunk, chunked=chunk is not None),
            rows=QKVRows(interleaved=self.config.head_size),
        )
        if rotary and attention.q_norm and attention.k_norm:  # which take back all of the scale but what eps sees of it
            attention.q_norm.eps = attention.k_norm.eps = attention.q_norm.eps / rotary.scale**2
        attention.query_scale = None if turned else self._query_scale
        return attention

    def create_layer(self, layer: int, rotary: RotaryEmbedding | None) -> DecoderLayer:
        """Layer number ``layer``."""
        text, hidden = self.text, self.config.hidden_size
        act = text.hidden_act
        mlp: nn.Module
        if text.is_sparse(layer):
            inner = text.intermediate_size
            settings = replace(expert_settings(text.num_experts, hidden, inner, act), weighs_input=True)
            routing = Routing(text.num_experts_per_tok, "sigmoid", renormalise=False)
            mlp = FusedMoE(settings, routing, self.tp, GatedMLP(hidden, inner, False, act, self.tp))
        else:
            mlp = GatedMLP(hidden, text.intermediate_size_mlp, False, act, self.tp)
        return PreNormDecoderLayer(self.create_norm(), self.create_attention(layer, rotary), self.create_norm(), mlp)


class Llama4ForConditionalGeneration(Llama4ForCausalLM):
    """The text of Scout and Maverick."""

    leaves_out: str | None = "images"
