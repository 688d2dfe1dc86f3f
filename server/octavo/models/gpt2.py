"""GPT-2, and what has its architecture (DistilGPT2, DialoGPT)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

import octavo_kernels
from octavo.interface.engine_config import ModelConfig
from octavo.interface.model_config.gpt2 import GPT2Config
from octavo.layers.attention import SelfAttention
from octavo.layers.decoder import Decoder, DecoderLayer, PreNormDecoderLayer
from octavo.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from octavo.layers.linear import QKVRows
from octavo.layers.mlp import MLP
from octavo.layers.norm import LayerNorm
from octavo.layers.parallel import TensorParallel
from octavo.models.base import CausalLM
from octavo_kernels import AttentionOptions


class GPT2Decoder(Decoder):
    """Adds learned positions."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        text, hidden = config.text_of(GPT2Config), config.hidden_size
        eps, act = text.layer_norm_eps, text.hidden_act

        def layer(number: int) -> DecoderLayer:
            scale = config.head_size**-0.5 if text.scale_attn_weights else 1.0
            if text.scale_attn_by_inverse_layer_idx:
                scale /= number + 1
            rows = QKVRows(fused=True)
            attention = SelfAttention(
                config, number, tp, qkv_bias=True, out_bias=True, options=AttentionOptions(scale), rows=rows
            )
            mlp = MLP(hidden, text.intermediate_size, True, act, tp)
            return PreNormDecoderLayer(LayerNorm(hidden, eps), attention, LayerNorm(hidden, eps), mlp)

        layers = [layer(number) for number in range(config.num_layers)]
        super().__init__(VocabParallelEmbedding(config.vocab_size, hidden, tp), layers, LayerNorm(hidden, eps))
        # Small, so every rank holds all of it.
        self.embed_positions = VocabParallelEmbedding(text.max_position_embeddings, hidden, TensorParallel())

    def embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """See `Decoder`."""
        return octavo_kernels.add(super().embed(input_ids, positions), self.embed_positions(positions))


class GPT2LMHeadModel(CausalLM):
    """Learned positions, layer norms, biases; q, k and v are one tensor; weights are stored transposed."""

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {"qkv_proj": ["qkv_proj"] * 3}
    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [
        (r"\.attn\.(masked_)?bias$", None),
        (r"^(transformer\.)?wte\.", "model.embed_tokens."),
        (r"^(transformer\.)?wpe\.", "model.embed_positions."),
        (r"^(transformer\.)?ln_f\.", "model.norm."),
        (r"^(transformer\.)?h\.", "model.layers."),
        (r"\.ln_1\.", ".input_layernorm."),
        (r"\.ln_2\.", ".post_attention_layernorm."),
        (r"\.attn\.c_attn\.", ".self_attn.qkv_proj."),
        (r"\.attn\.c_proj\.", ".self_attn.o_proj."),
        (r"\.mlp\.c_fc\.", ".mlp.fc1."),
        (r"\.mlp\.c_proj\.", ".mlp.fc2."),
        *CausalLM.checkpoint_names,
    ]
    transposed_weights: ClassVar[str | None] = r"\.(qkv_proj|o_proj|fc1|fc2)\.weight$"

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__(config, tp)
        self.model = decoder = GPT2Decoder(config, tp)
        tied = decoder.embed_tokens if config.text.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, tp, tied)
