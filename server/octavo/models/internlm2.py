"""InternLM 2, 2.5 and 3."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from octavo.interface.model_config.internlm2 import InternLM2Config, InternLM3Config
from octavo.layers.attention import SelfAttention
from octavo.layers.linear import QKVRows
from octavo.layers.mlp import GatedMLP
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.base import CausalLM
from octavo.models.llama import LlamaForCausalLM


class InternLM2ForCausalLM(LlamaForCausalLM):
    """Llama by other names; q, k and v are one tensor, with the heads that share a key and value together."""

    text: InternLM2Config

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        **LlamaForCausalLM.packed_modules_mapping,
        "qkv_proj": ["qkv_proj"] * 3,
    }
    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [
        (r"\.tok_embeddings\.", ".embed_tokens."),
        (r"\.attention\.wqkv\.", ".self_attn.qkv_proj."),
        (r"\.attention\.wo\.", ".self_attn.o_proj."),
        (r"\.feed_forward\.w1\.", ".mlp.gate_proj."),
        (r"\.feed_forward\.w2\.", ".mlp.down_proj."),
        (r"\.feed_forward\.w3\.", ".mlp.up_proj."),
        (r"\.attention_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"^output\.", "lm_head."),
        *CausalLM.checkpoint_names,
    ]

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """The attention of layer number ``layer``."""
        bias, rows = self.text.bias, QKVRows(fused=True, by_group=True)
        return SelfAttention(self.config, layer, self.tp, rotary, qkv_bias=bias, out_bias=bias, rows=rows)


class InternLM3ForCausalLM(LlamaForCausalLM):
    """Llama with its own names for the biases."""

    text: InternLM3Config

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """The attention of layer number ``layer``."""
        text = self.text
        bias, out_bias = text.qkv_bias, text.bias
        return SelfAttention(self.config, layer, self.tp, rotary, qkv_bias=bias, out_bias=out_bias)

    def create_mlp(self) -> nn.Module:
        """The MLP of one layer."""
        text = self.text
        bias, act = text.bias, text.hidden_act
        return GatedMLP(self.config.hidden_size, text.intermediate_size, bias, act, self.tp)
