"""DeepSeek V2, V2-Lite, V3, R1 and Kimi K2: multi-head latent attention, experts behind the first layers."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from torch import nn

from octavo.interface.model_config.deepseek import DeepseekConfig
from octavo.layers.decoder import DecoderLayer, PreNormDecoderLayer
from octavo.layers.latent_attention import LatentSelfAttention
from octavo.layers.mlp import GatedMLP
from octavo.layers.moe import FusedMoE, Routing, expert_settings
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.base import CausalLM
from octavo.models.llama import LlamaForCausalLM


class DeepseekV2ForCausalLM(LlamaForCausalLM):
    """The chosen experts' scores are used as they are, times a constant."""

    text: DeepseekConfig

    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [
        (r"\.mlp\.shared_experts\.", ".mlp.shared_expert."),
        *CausalLM.checkpoint_names,
    ]

    def create_rotary(self) -> RotaryEmbedding:
        """Rotary embeddings of a part of queries, and of the key that heads share."""
        return RotaryEmbedding(self.config)

    def create_layer(self, layer: int, rotary: RotaryEmbedding | None) -> DecoderLayer:
        """Layer number ``layer``."""
        assert rotary is not None
        interleaved = self.text.rope_interleave
        attention = LatentSelfAttention(self.config, layer, self.tp, rotary, interleaved)
        text = self.text
        mlp = self.create_mlp() if layer < text.first_k_dense_replace else self.create_experts()
        return PreNormDecoderLayer(self.create_norm(), attention, self.create_norm(), mlp)

    def routing(self) -> Routing:
        """The choice of experts."""
        text = self.text
        scale = text.routed_scaling_factor
        return Routing(text.num_experts_per_tok, renormalise=False, scale=scale, groups=text.groups)

    def create_experts(self) -> nn.Module:
        """The experts of one layer, and the MLP that every row goes through."""
        text, hidden = self.text, self.config.hidden_size
        inner, act, count = text.expert_size, text.hidden_act, text.n_shared_experts
        shared = GatedMLP(hidden, inner * count, text.mlp_bias, act, self.tp) if count else None
        return FusedMoE(expert_settings(text.num_experts, hidden, inner, act), self.routing(), self.tp, shared)


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """Experts are chosen within groups, with a bias of the choice."""

    leaves_out_mtp_layers: ClassVar[bool] = True

    def routing(self) -> Routing:
        """The choice of experts."""
        text = self.text
        groups, scale = text.groups, text.routed_scaling_factor
        how = Routing(text.num_experts_per_tok, "sigmoid", text.norm_topk_prob, scale, groups)
        return replace(how, correction=True)
