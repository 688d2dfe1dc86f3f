"""GPT-NeoX, Pythia and Dolly."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from octavo.interface.model_config.gpt_neox import GPTNeoXConfig
from octavo.layers.attention import SelfAttention
from octavo.layers.decoder import DecoderLayer, ParallelDecoderLayer, PreNormDecoderLayer
from octavo.layers.linear import QKVRows
from octavo.layers.mlp import MLP
from octavo.layers.norm import LayerNorm
from octavo.layers.rotary import RotaryEmbedding, rotary_size
from octavo.models.base import CausalLM
from octavo.models.llama import LlamaForCausalLM


class GPTNeoXForCausalLM(LlamaForCausalLM):
    """Attention and MLP side by side, a norm for each; part of each head is turned; q, k, v are one tensor by head."""

    text: GPTNeoXConfig

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {"qkv_proj": ["qkv_proj"] * 3}
    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [
        (r"\.attention\.(masked_)?bias$|\.rotary_emb\.inv_freq$", None),
        (r"^gpt_neox\.", "model."),
        (r"^embed_out\.", "lm_head."),
        (r"\.embed_in\.", ".embed_tokens."),
        (r"\.final_layer_norm\.", ".norm."),
        (r"\.attention\.query_key_value\.", ".self_attn.qkv_proj."),
        (r"\.attention\.dense\.", ".self_attn.o_proj."),
        (r"\.dense_h_to_4h\.", ".fc1."),
        (r"\.dense_4h_to_h\.", ".fc2."),
        *CausalLM.checkpoint_names,
    ]

    def create_rotary(self) -> RotaryEmbedding:
        """The rotary embedding that layers share."""
        return RotaryEmbedding(self.config, rotary_size(self.config))

    def create_norm(self) -> LayerNorm:
        """A norm of hidden states."""
        return LayerNorm(self.config.hidden_size, self.text.layer_norm_eps)

    def create_layer(self, layer: int, rotary: RotaryEmbedding | None) -> DecoderLayer:
        """Layer number ``layer``."""
        norm, mlp_norm = self.create_norm(), self.create_norm()
        attention, mlp = self.create_attention(layer, rotary), self.create_mlp()
        if self.text.use_parallel_residual:
            return ParallelDecoderLayer(norm, attention, mlp, mlp_norm)
        return PreNormDecoderLayer(norm, attention, mlp_norm, mlp)

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """The attention of layer number ``layer``."""
        bias, by_group = self.text.attention_bias, self.config.files.format != "gguf"
        rows = QKVRows(fused=True, by_group=by_group)  # llama.cpp takes the groups apart
        return SelfAttention(self.config, layer, self.tp, rotary, qkv_bias=bias, out_bias=bias, rows=rows)

    def create_mlp(self) -> nn.Module:
        """The MLP of one layer."""
        text = self.text
        return MLP(self.config.hidden_size, text.intermediate_size, True, text.hidden_act, self.tp)
