"""Qwen2-MoE and Qwen3-MoE: mixtures of experts in some layers or all, in Qwen2-MoE beside a shared expert."""

from __future__ import annotations

from torch import nn

from octavo.layers.attention import SelfAttention
from octavo.layers.decoder import DecoderLayer, PreNormDecoderLayer
from octavo.layers.mlp import GatedMLP
from octavo.layers.moe import FusedMoE, Routing, expert_settings
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.llama import LlamaForCausalLM
from octavo.models.qwen2 import Qwen2ForCausalLM
from octavo.models.qwen3 import Qwen3ForCausalLM
from octavo_kernels import AttentionOptions


class _QwenMoe(LlamaForCausalLM):
    """Layers with experts: those that mlp_only_layers does not name, every decoder_sparse_step-th of all."""

    def create_layer(self, layer: int, rotary: RotaryEmbedding | None) -> DecoderLayer:
        """Layer number ``layer``."""
        hf, attention = self.config.hf_config, self.create_attention(layer, rotary)
        dense = layer in (hf.get("mlp_only_layers") or []) or (layer + 1) % hf.get("decoder_sparse_step", 1)
        mlp = self.create_mlp() if dense else self.create_experts()
        return PreNormDecoderLayer(self.create_norm(), attention, self.create_norm(), mlp)

    def create_experts(self) -> nn.Module:
        """The experts of one layer."""
        hf, hidden = self.config.hf_config, self.config.hidden_size
        act, shared = hf.get("hidden_act", "silu"), hf.get("shared_expert_intermediate_size")
        shared_expert = GatedMLP(hidden, shared, False, act, self.tp) if shared else None
        settings = expert_settings(hf["num_experts"], hidden, hf["moe_intermediate_size"], act)
        routing = Routing(hf["num_experts_per_tok"], renormalise=hf.get("norm_topk_prob", False))
        return FusedMoE(settings, routing, self.tp, shared_expert, gates_shared=bool(shared))


class Qwen2MoeForCausalLM(_QwenMoe, Qwen2ForCausalLM):
    """Qwen1.5-MoE and Qwen2's 57B-A14B."""

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """The attention of layer number ``layer``. With ``use_sliding_window``, those that ``layer_types`` names have a
        window or, where it is not given, every other layer below ``max_window_layers``."""
        hf = self.config.hf_config
        types = hf.get("layer_types")
        if types:
            slides = types[layer] == "sliding_attention"
        else:
            slides = layer % 2 == 0 and layer < hf.get("max_window_layers", 28)
        window = hf.get("sliding_window", 4096) if slides and hf.get("use_sliding_window", False) else None
        bias = hf.get("qkv_bias", True)
        return SelfAttention(self.config, layer, self.tp, rotary, AttentionOptions(window=window), qkv_bias=bias)


class Qwen3MoeForCausalLM(_QwenMoe, Qwen3ForCausalLM):
    """Qwen3's 30B-A3B and 235B-A22B."""

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """The attention of layer number ``layer``. With ``use_sliding_window``, all layers have a window."""
        hf = self.config.hf_config
        bias, window = hf.get("attention_bias", False), hf.get("sliding_window", 4096)
        window = window if hf.get("use_sliding_window", False) else None
        options = AttentionOptions(window=window)
        return SelfAttention(self.config, layer, self.tp, rotary, options, qkv_bias=bias, out_bias=bias, qk_norm=True)
