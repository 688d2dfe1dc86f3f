"""Llama 4 (text): experts whose weights are applied to what they read, layers without rotary embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from torch import nn

from octavo.errors import ConfigError
from octavo.interface.engine_config import ModelConfig
from octavo.layers.attention import SelfAttention
from octavo.layers.decoder import DecoderLayer, PreNormDecoderLayer
from octavo.layers.linear import QKVRows
from octavo.layers.mlp import GatedMLP
from octavo.layers.moe import FusedMoE, Routing, expert_settings
from octavo.layers.norm import RMSNorm
from octavo.layers.parallel import TensorParallel
from octavo.layers.rotary import RotaryEmbedding
from octavo.layers.weights import WeightSlot
from octavo.models.llama import LlamaForCausalLM


class UnitNorm(RMSNorm):
    """An RMS norm without a weight of its own: it is 1."""

    def __init__(self, size: int, eps: float, offset: float | None = None) -> None:
        super().__init__(size, eps, offset)
        self.weight.fill_(1.0)

    def weight_slots(self) -> Iterator[WeightSlot]:
        """None."""
        return iter(())


class Llama4Attention(SelfAttention):
    """Queries and keys are normed without weights, which commutes with turning them."""

    head_norm: ClassVar[type[RMSNorm]] = UnitNorm


class Llama4ForCausalLM(LlamaForCausalLM):
    """Dense and sparse layers, each of them as text_config says. Up to attention_chunk_size positions, attention in
    chunks is attention, and queries keep their scale."""

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
        hf = config.hf_config
        limits = [hf.get("attention_chunk_size", 8192)]
        if hf.get("attn_temperature_tuning", True):
            limits.append(hf.get("floor_scale", 8192) - 1)
        if config.max_model_len > (most := min(limit for limit in limits if limit is not None)):
            raise ConfigError(
                f"max_model_len is {config.max_model_len}, and attention in chunks (Llama 4's beyond {most} tokens) is "
                f"not supported; use --max-model-len {most}"
            )
        super().__init__(config, tp)

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """``no_rope_layers`` has a 1 for each layer that turns, in spite of its name."""
        hf = self.config.hf_config
        turns = hf.get("no_rope_layers")
        turned = turns[layer] if turns else (layer + 1) % hf.get("no_rope_layer_interval", 4)
        bias, norms = hf.get("attention_bias", False), bool(turned) and hf.get("use_qk_norm", True)
        return Llama4Attention(
            self.config,
            layer,
            self.tp,
            rotary if turned else None,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=norms,
            rows=QKVRows(interleaved=self.config.head_size),
        )

    def create_layer(self, layer: int, rotary: RotaryEmbedding | None) -> DecoderLayer:
        """Layer number ``layer``."""
        hf, hidden = self.config.hf_config, self.config.hidden_size
        step, act = hf.get("interleave_moe_layer_step", 1), hf.get("hidden_act", "silu")
        sparse = hf.get("moe_layers")
        mlp: nn.Module
        if layer in sparse if sparse else (layer + 1) % step == 0:
            inner = hf["intermediate_size"]
            settings = replace(expert_settings(hf["num_experts"], hidden, inner, act), weighs_input=True)
            routing = Routing(hf.get("num_experts_per_tok", 1), "sigmoid", renormalise=False)
            mlp = FusedMoE(settings, routing, self.tp, GatedMLP(hidden, inner, False, act, self.tp))
        else:
            mlp = GatedMLP(hidden, hf["intermediate_size_mlp"], False, act, self.tp)
        return PreNormDecoderLayer(self.create_norm(), self.create_attention(layer, rotary), self.create_norm(), mlp)


class Llama4ForConditionalGeneration(Llama4ForCausalLM):
    """The text of Scout and Maverick."""

    leaves_out: ClassVar[str | None] = "images"
