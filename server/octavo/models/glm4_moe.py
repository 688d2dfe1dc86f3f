"""GLM-4.5 and 4.6: experts chosen by sigmoids, shared ones beside them, and dense first layers."""

from __future__ import annotations

from typing import ClassVar

from octavo.interface.model_config.glm4_moe import Glm4MoeConfig
from octavo.layers.attention import SelfAttention
from octavo.layers.decoder import DecoderLayer, PreNormDecoderLayer
from octavo.layers.mlp import GatedMLP
from octavo.layers.moe import FusedMoE, Routing, expert_settings
from octavo.layers.rotary import RotaryEmbedding, rotary_size
from octavo.models.llama import LlamaForCausalLM


class Glm4MoeForCausalLM(LlamaForCausalLM):
    """Llama that turns half of each head, with experts from layer first_k_dense_replace on."""

    text: Glm4MoeConfig

    leaves_out_mtp_layers: ClassVar[bool] = True
    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [
        (r"\.shared_experts\.", ".shared_expert."),
        *LlamaForCausalLM.checkpoint_names,
    ]

    def create_rotary(self) -> RotaryEmbedding:
        """The rotary embedding that layers share."""
        return RotaryEmbedding(self.config, rotary_size(self.config))

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """The attention of layer number ``layer``."""
        text = self.text
        bias, norms = text.attention_bias, text.use_qk_norm
        return SelfAttention(self.config, layer, self.tp, rotary, qkv_bias=bias, qk_norm=norms)

    def create_layer(self, layer: int, rotary: RotaryEmbedding | None) -> DecoderLayer:
        """Layer number ``layer``."""
        attention = self.create_attention(layer, rotary)
        mlp = self.create_mlp() if layer < self.text.first_k_dense_replace else self.create_experts()
        return PreNormDecoderLayer(self.create_norm(), attention, self.create_norm(), mlp)

    def create_experts(self) -> FusedMoE:
        """The experts of one layer."""
        text, hidden = self.text, self.config.hidden_size
        act, inner, shared = text.hidden_act, text.expert_size, text.n_shared_experts
        routing = Routing(
            text.num_experts_per_tok,
            "sigmoid",
            text.norm_topk_prob,
            text.routed_scaling_factor,
            text.groups,
            correction=True,
        )
        shared_expert = GatedMLP(hidden, inner * shared, False, act, self.tp) if shared else None
        return FusedMoE(expert_settings(text.num_experts, hidden, inner, act), routing, self.tp, shared_expert)
