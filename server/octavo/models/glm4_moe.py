"""GLM-4.5 and 4.6: experts chosen by sigmoids, shared ones beside them, and dense first layers."""

from __future__ import annotations

from typing import ClassVar

from octavo.layers.attention import SelfAttention
from octavo.layers.decoder import DecoderLayer, PreNormDecoderLayer
from octavo.layers.mlp import GatedMLP
from octavo.layers.moe import FusedMoE, Routing, expert_settings
from octavo.layers.rotary import RotaryEmbedding, rotary_size
from octavo.models.llama import LlamaForCausalLM


class Glm4MoeForCausalLM(LlamaForCausalLM):
    """Llama that turns half of each head, with experts from layer first_k_dense_replace on."""

    leaves_out_mtp_layers: ClassVar[bool] = True
    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [
        (r"\.shared_experts\.", ".shared_expert."),
        *LlamaForCausalLM.checkpoint_names,
    ]

    def create_rotary(self) -> RotaryEmbedding:
        """The rotary embedding that layers share."""
        return RotaryEmbedding(self.config, rotary_size(self.config, 0.5))

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """The attention of layer number ``layer``."""
        hf = self.config.hf_config
        bias, norms = hf.get("attention_bias", False), hf.get("use_qk_norm", False)
        return SelfAttention(self.config, layer, self.tp, rotary, qkv_bias=bias, qk_norm=norms)

    def create_layer(self, layer: int, rotary: RotaryEmbedding | None) -> DecoderLayer:
        """Layer number ``layer``."""
        hf, attention = self.config.hf_config, self.create_attention(layer, rotary)
        mlp = self.create_mlp() if layer < hf.get("first_k_dense_replace", 1) else self.create_experts()
        return PreNormDecoderLayer(self.create_norm(), attention, self.create_norm(), mlp)

    def create_experts(self) -> FusedMoE:
        """The experts of one layer."""
        hf, hidden = self.config.hf_config, self.config.hidden_size
        act, inner, shared = hf.get("hidden_act", "silu"), hf["moe_intermediate_size"], hf.get("n_shared_experts", 1)
        groups = hf.get("n_group") or 1, hf.get("topk_group") or 1
        routing = Routing(
            hf["num_experts_per_tok"],
            "sigmoid",
            hf.get("norm_topk_prob", True),
            hf.get("routed_scaling_factor", 1.0),
            None if groups == (1, 1) else groups,
            correction=True,
        )
        shared_expert = GatedMLP(hidden, inner * shared, False, act, self.tp) if shared else None
        return FusedMoE(expert_settings(hf["num_experts"], hidden, inner, act), routing, self.tp, shared_expert)
