"""Falcon 7B, 40B, 180B and Falcon 2 (11B)."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from torch import nn

from octavo.errors import ModelError
from octavo.interface.engine_config import ModelConfig
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

    ties_embeddings: ClassVar[bool] = True
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
        hf = config.hf_config
        if hf.get("alibi"):
            raise ModelError(f"{config.model}: Falcon models with ALiBi positions (falcon-rw) are not supported")
        if hf.get("new_decoder_architecture") and not hf.get("parallel_attn", True):
            raise ModelError(
                f"{config.model}: config.json's parallel_attn must be true with new_decoder_architecture; models where "
                "it is false are not supported"
            )
        if hf.get("multi_query", True) and not hf.get("new_decoder_architecture"):  # whatever num_kv_heads says
            config = replace(config, hf_config=hf | {"num_key_value_heads": 1})
        super().__init__(config, tp)

    def create_norm(self) -> LayerNorm:
        """A norm of hidden states."""
        return LayerNorm(self.config.hidden_size, self.config.hf_config.get("layer_norm_eps", 1e-5))

    def create_layer(self, layer: int, rotary: RotaryEmbedding | None) -> DecoderLayer:
        """Layer number ``layer``."""
        hf = self.config.hf_config
        is_new = hf.get("new_decoder_architecture", False)
        norm, attention, mlp = self.create_norm(), self.create_attention(layer, rotary), self.create_mlp()
        if not is_new and not hf.get("parallel_attn", True):
            return PreNormDecoderLayer(norm, attention, self.create_norm(), mlp)
        two_norms = is_new and hf.get("num_ln_in_parallel_attn", 2) == 2
        return ParallelDecoderLayer(norm, attention, mlp, self.create_norm() if two_norms else None)

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """The attention of layer number ``layer``."""
        bias, by_group = self.config.hf_config.get("bias", False), self.config.files.format != "gguf"
        rows = QKVRows(fused=True, by_group=by_group)  # llama.cpp takes the groups apart
        return SelfAttention(self.config, layer, self.tp, rotary, qkv_bias=bias, out_bias=bias, rows=rows)

    def create_mlp(self) -> nn.Module:
        """The MLP of one layer."""
        hf = self.config.hf_config
        bias, act = hf.get("bias", False), hf.get("hidden_act", "gelu")
        return MLP(self.config.hidden_size, hf["intermediate_size"], bias, act, self.tp)
