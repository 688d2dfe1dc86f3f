"""DeepSeek V2, V2-Lite, V3, R1 and Kimi K2: multi-head latent attention, experts behind the first layers."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from torch import nn

from octavo.layers.decoder import DecoderLayer, PreNormDecoderLayer
from octavo.layers.latent_attention import LatentSelfAttention
from octavo.layers.mlp import GatedMLP
from octavo.layers.moe import FusedMoE, Routing, expert_settings
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.base import CausalLM
from octavo.models.llama import LlamaForCausalLM


class DeepseekV2ForCausalLM(LlamaForCausalLM):
    """The chosen experts' scores are used as they are, times a constant."""

    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [
        (r"\.mlp\.shared_experts\.", ".mlp.shared_expert."),
        *CausalLM.checkpoint_names,
    ]

    def create_rotary(self) -> RotaryEmbedding:
        """Of a part of queries, and of the key that heads share."""
        return RotaryEmbedding(self.config)

    def create_layer(self, layer: int, rotary: RotaryEmbedding | None) -> DecoderLayer:
        """Layer number ``layer``."""
        assert rotary is not None
        interleaved = self.config.hf_config.get("rope_interleave", True)
        attention = LatentSelfAttention(self.config, layer, self.tp, rotary, interleaved)
        hf = self.config.hf_config
        mlp = self.create_mlp() if layer < hf["first_k_dense_replace"] else self.create_experts()
        return PreNormDecoderLayer(self.create_norm(), attention, self.create_norm(), mlp)

    def routing(self) -> Routing:
        """How experts are chosen."""
        hf = self.config.hf_config
        limited = hf.get("topk_method") == "group_limited_greedy"
        groups = (hf["n_group"], hf["topk_group"]) if limited else None
        scale = hf.get("routed_scaling_factor", 1.0)
        return Routing(hf["num_experts_per_tok"], renormalise=False, scale=scale, groups=groups)

    def create_experts(self) -> nn.Module:
        """The experts of one layer, and the MLP that every row goes through."""
        hf, hidden = self.config.hf_config, self.config.hidden_size
        inner, act, count = hf["moe_intermediate_size"], hf.get("hidden_act", "silu"), hf.get("n_shared_experts") or 0
        shared = GatedMLP(hidden, inner * count, hf.get("mlp_bias", False), act, self.tp) if count else None
        return FusedMoE(expert_settings(hf["num_experts"], hidden, inner, act), self.routing(), self.tp, shared)


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """Experts are chosen within groups, with a bias of the choice."""

    leaves_out_mtp_layers: ClassVar[bool] = True

    def routing(self) -> Routing:
        """How experts are chosen."""
        hf = self.config.hf_config
        groups, scale = (hf["n_group"], hf["topk_group"]), hf.get("routed_scaling_factor", 1.0)
        how = Routing(hf["num_experts_per_tok"], "sigmoid", hf.get("norm_topk_prob", True), scale, groups)
        return replace(how, correction=True)
