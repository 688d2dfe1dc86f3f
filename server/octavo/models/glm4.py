"""GLM-4 (dense): the 9B of 2024, and the models of 2025 (0414), which have more norms."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from octavo.interface.model_config.glm4 import GlmConfig
from octavo.layers.attention import SelfAttention
from octavo.layers.decoder import DecoderLayer, PreNormDecoderLayer
from octavo.layers.linear import QKVRows
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import RMSNorm
from octavo.layers.rotary import RotaryEmbedding, rotary_size
from octavo.models.base import CausalLM
from octavo.models.llama import LlamaForCausalLM


class GlmForCausalLM(LlamaForCausalLM):
    """Llama that turns neighbours in the first half of each head; gate and up are one tensor in the checkpoint."""

    text: GlmConfig

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        **LlamaForCausalLM.packed_modules_mapping,
        "gate_up_proj": ["gate_up_proj"] * 2,
    }

    def create_rotary(self) -> RotaryEmbedding:
        """The rotary embedding that layers share."""
        return RotaryEmbedding(self.config, rotary_size(self.config))

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """The attention of layer number ``layer``."""
        bias, rows = (
            self.text.attention_bias,
            QKVRows(interleaved=rotary_size(self.config)),
        )
        return SelfAttention(self.config, layer, self.tp, rotary, qkv_bias=bias, rows=rows)

    def create_mlp(self) -> nn.Module:
        """The MLP of one layer."""
        text = self.text
        act = text.hidden_act
        return GatedMLP(self.config.hidden_size, text.intermediate_size, False, act, self.tp, fused_weights=True)


class Glm4ForCausalLM(GlmForCausalLM):
    """GLM-4 with norms of what attention and MLP add to the residual."""

    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [
        (r"\.post_self_attn_layernorm\.", ".attention_output_norm."),
        (r"\.post_mlp_layernorm\.", ".mlp_output_norm."),
        *CausalLM.checkpoint_names,
    ]

    def create_layer(self, layer: int, rotary: RotaryEmbedding | None) -> DecoderLayer:
        """Layer number ``layer``."""
        eps = self.text.rms_norm_eps
        norms = [RMSNorm(self.config.hidden_size, eps) for _ in range(4)]
        return PreNormDecoderLayer(
            norms[0],
            self.create_attention(layer, rotary),
            norms[1],
            self.create_mlp(),
            attention_output_norm=norms[2],
            mlp_output_norm=norms[3],
        )
