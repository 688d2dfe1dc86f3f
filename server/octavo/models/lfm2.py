"""LFM2: short convolutions, and attention every few layers; dense and with experts."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from octavo.interface.model_config.lfm2 import Lfm2Config, Lfm2MoeConfig
from octavo.layers.attention import SelfAttention
from octavo.layers.mlp import GatedMLP
from octavo.layers.moe import FusedMoE, Routing, expert_settings
from octavo.layers.recurrent import ShortConv
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.hybrid import HybridForCausalLM


class Lfm2ForCausalLM(HybridForCausalLM):
    """Llama with norms of queries and keys, in which most layers are short convolutions, under names of its own."""

    text: Lfm2Config | Lfm2MoeConfig
    mixer_name: ClassVar[str] = "conv"

    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [
        (r"^model\.embedding_norm\.", "model.norm."),
        (r"\.operator_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
        (r"\.self_attn\.([qk])_layernorm\.", r".self_attn.\1_norm."),
        (r"\.feed_forward\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
        (r"\.feed_forward\.", ".mlp."),
        (r"\.w1\.", ".gate_proj."),
        (r"\.w2\.", ".down_proj."),
        (r"\.w3\.", ".up_proj."),
        *HybridForCausalLM.checkpoint_names,
    ]
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        **HybridForCausalLM.packed_modules_mapping,
        "in_proj": ["in_proj"] * 3,
    }

    def create_mixer(self, number: int) -> nn.Module:
        """The convolution of recurrent layer number ``number`` of those."""
        text, is_gguf = self.text, self.config.files.format == "gguf"
        return ShortConv(text.hidden_size, number, text.conv_L_cache, text.conv_bias, self.tp, is_gguf)

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """The attention of layer number ``layer`` of those that have some."""
        return SelfAttention(self.config, layer, self.tp, rotary, qk_norm=True)

    def create_mlp(self) -> nn.Module:
        """The MLP of one layer."""
        return GatedMLP(self.config.hidden_size, self.text.inner_size, False, "silu", self.tp)


class Lfm2MoeForCausalLM(Lfm2ForCausalLM):
    """LFM2 with experts, chosen by sigmoids, behind some dense layers."""

    text: Lfm2MoeConfig

    def create_mlp_of(self, layer: int) -> nn.Module:
        """The MLP or the experts of layer number ``layer``."""
        text, hidden = self.text, self.config.hidden_size
        if layer < text.num_dense_layers:
            return GatedMLP(hidden, text.intermediate_size, False, "silu", self.tp)
        routing = Routing(
            text.num_experts_per_tok,
            "sigmoid",
            text.norm_topk_prob,
            text.routed_scaling_factor,
            correction=text.use_expert_bias,
        )
        return FusedMoE(expert_settings(text.num_experts, hidden, text.expert_size, "silu"), routing, self.tp)
