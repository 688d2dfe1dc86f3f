"""Qwen3.5 (text): gated delta nets, and attention with gated results every few layers."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from octavo.interface.model_config.qwen3_5 import Qwen3_5Config, Qwen3_5MoeConfig
from octavo.layers.gated_attention import GatedSelfAttention
from octavo.layers.mlp import GatedMLP
from octavo.layers.moe import FusedMoE, Routing, expert_settings
from octavo.layers.norm import RMSNorm
from octavo.layers.recurrent import GatedDeltaNet
from octavo.layers.rotary import RotaryEmbedding, rotary_size
from octavo.models.hybrid import HybridForCausalLM


class Qwen3_5ForCausalLM(HybridForCausalLM):  # noqa: N801
    """Llama with norms that multiply by 1 + weight, in which most layers are recurrent."""

    text: Qwen3_5Config

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        **HybridForCausalLM.packed_modules_mapping,
        "q_gate": ["q_proj"],
        "in_proj_qkvz": [*["in_proj_qkv"] * 3, "in_proj_z"],
    }
    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [
        (r"^mtp\.", None),  # the layer that guesses tokens
        *HybridForCausalLM.checkpoint_names,
    ]

    @property
    def norm_offset(self) -> float:
        """The part of a norm's weight that checkpoints leave out; GGUF files hold all of it."""
        return 0.0 if self.config.files.format == "gguf" else 1.0

    def create_rotary(self) -> RotaryEmbedding:
        """The rotary embedding that layers share."""
        return RotaryEmbedding(self.config, rotary_size(self.config))

    def create_norm(self) -> RMSNorm:
        """A norm of hidden states."""
        return RMSNorm(self.config.hidden_size, self.text.rms_norm_eps, self.norm_offset)

    def create_mixer(self, number: int) -> nn.Module:
        """The gated delta net of recurrent layer number ``number`` of those."""
        text, is_gguf = self.text, self.config.files.format == "gguf"
        return GatedDeltaNet(text.hidden_size, number, text.state_of(1), text.rms_norm_eps, self.tp, is_gguf)

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> GatedSelfAttention:
        """The attention of layer number ``layer`` of those that have some."""
        bias = self.text.attention_bias
        return GatedSelfAttention(self.config, layer, self.tp, rotary, bias=bias, norm_offset=self.norm_offset)


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):  # noqa: N801
    """Qwen3.5 with experts, and a shared one with a gate, in place of each MLP."""

    text: Qwen3_5MoeConfig

    def create_mlp(self) -> nn.Module:
        """The experts of one layer."""
        text, hidden = self.text, self.config.hidden_size
        settings = expert_settings(text.num_experts, hidden, text.expert_size, text.hidden_act)
        routing = Routing(text.num_experts_per_tok, renormalise=text.norm_topk_prob)
        shared = GatedMLP(hidden, text.shared_expert_intermediate_size, False, text.hidden_act, self.tp)
        return FusedMoE(settings, routing, self.tp, shared, gates_shared=True)
