"""Qwen2-MoE and Qwen3-MoE: mixtures of experts in some layers or all, in Qwen2-MoE beside a shared expert."""

from __future__ import annotations

from torch import nn

from octavo.interface.model_config.qwen_moe import Qwen2MoeConfig, Qwen3MoeConfig, QwenMoeConfig
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

    text: QwenMoeConfig

    def create_layer(self, layer: int, rotary: RotaryEmbedding | None) -> DecoderLayer:
        """Layer number ``layer``."""
        attention = self.create_attention(layer, rotary)
        mlp = self.create_experts() if self.text.is_sparse(layer) else self.create_mlp()
        return PreNormDecoderLayer(self.create_norm(), attention, self.create_norm(), mlp)

    def create_experts(self) -> nn.Module:
        """The experts of one layer."""
        text, hidden = self.text, self.config.hidden_size
        settings = expert_settings(text.num_experts, hidden, text.expert_size, text.hidden_act)
        routing = Routing(text.num_experts_per_tok, renormalise=text.norm_topk_prob)
        shared = self.create_shared_expert()
        return FusedMoE(settings, routing, self.tp, shared, gates_shared=shared is not None)

    def create_shared_expert(self) -> GatedMLP | None:
        """The MLP beside the experts of one layer."""
        return None


class Qwen2MoeForCausalLM(_QwenMoe, Qwen2ForCausalLM):
    """Qwen1.5-MoE and Qwen2's 57B-A14B."""

    text: Qwen2MoeConfig

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """The attention of layer number ``layer``."""
        bias, window = self.text.qkv_bias, self.text.window(layer)
        return SelfAttention(
            self.config, layer, self.tp, rotary, qkv_bias=bias, options=AttentionOptions(window=window)
        )

    def create_shared_expert(self) -> GatedMLP | None:
        """See `_QwenMoe`."""
        text, size = self.text, self.text.shared_expert_intermediate_size
        return GatedMLP(text.hidden_size, size, False, text.hidden_act, self.tp) if size else None


class Qwen3MoeForCausalLM(_QwenMoe, Qwen3ForCausalLM):
    """Qwen3's 30B-A3B and 235B-A22B."""

    text: Qwen3MoeConfig
