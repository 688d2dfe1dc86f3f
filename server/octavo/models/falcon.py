"""Falcon 7B, 40B, 180B and Falcon 2 (11B)."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from octavo.errors import ModelError
from octavo.interface.engine_config import ModelConfig
from octavo.interface.model_config.falcon import FalconConfig
from octavo.layers.attention import SelfAttention
from octavo.layers.decoder import DecoderLayer, ParallelDecoderLayer, PreNormDecoderLayer
from octavo.layers.linear import QKVRows
from octavo.layers.mlp import MLP
from octavo.layers.norm import LayerNorm
from octavo.layers.parallel import TensorParallel
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.base import CausalLM
from octavo.models.llama import LlamaForCausalLM


class FalconForCausalLM(LlamaForCausalLM):
    """Attention and MLP side by side, by one norm or two; q, k and v are one tensor, by key/value head."""

    text: FalconConfig

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {"qkv_proj": ["qkv_proj"] * 3}
    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [
        (r"^(transformer\.)?word_embeddings\.", "model.embed_tokens."),
        (r"^(transformer\.)?ln_f\.", "model.norm."),
        (r"^(transformer\.)?h\.", "model.layers."),
        (r"\.ln_attn\.", ".input_layernorm."),
        (r"\.ln_mlp\.", ".post_attention_layernorm."),
        (r"\.self_attention\.query_key_value\.", ".self_attn.qkv_proj."),
        (r"\.self_attention\.dense\.", ".self_attn.o_proj."),
        (r"\.dense_h_to_4h\.", ".fc1."),
        (r"\.dense_4h_to_h\.", ".fc2."),
        *CausalLM.checkpoint_names,
    ]

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        text = config.text_of(FalconConfig)
        if text.alibi:
            raise ModelError(f"{config.model}: Falcon models with ALiBi positions (falcon-rw) are not supported")
        if text.new_decoder_architecture and not text.parallel_attn:
            raise ModelError(
                f"{config.model}: config.json's parallel_attn must be true with new_decoder_architecture; models where "
                "it is false are not supported"
            )
        super().__init__(config, tp)

    def create_norm(self) -> LayerNorm:
        """A norm of hidden states."""
        return LayerNorm(self.config.hidden_size, self.text.layer_norm_eps)

    def create_layer(self, layer: int, rotary: RotaryEmbedding | None) -> DecoderLayer:
        """Layer number ``layer``."""
        text = self.text
        is_new = text.new_decoder_architecture
        norm, attention, mlp = self.create_norm(), self.create_attention(layer, rotary), self.create_mlp()
        if not is_new and not text.parallel_attn:
            return PreNormDecoderLayer(norm, attention, self.create_norm(), mlp)
        two_norms = is_new and text.num_ln_in_parallel_attn == 2
        return ParallelDecoderLayer(norm, attention, mlp, self.create_norm() if two_norms else None)

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """The attention of layer number ``layer``."""
        bias, by_group = self.text.bias, self.config.files.format != "gguf"
        rows = QKVRows(fused=True, by_group=by_group)  # llama.cpp takes the groups apart
        return SelfAttention(self.config, layer, self.tp, rotary, qkv_bias=bias, out_bias=bias, rows=rows)

    def create_mlp(self) -> nn.Module:
        """The MLP of one layer."""
        text = self.text
        bias, act = text.bias, text.hidden_act
        return MLP(self.config.hidden_size, text.intermediate_size, bias, act, self.tp)
