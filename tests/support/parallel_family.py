"""A family whose blocks are wired in another way: GPT-NeoX's attention and MLP side by side."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from octavo.interface.engine_config import ModelConfig
from octavo.interface.model_config.gpt_neox import GPTNeoXConfig
from octavo.layers.attention import ForwardContext, SelfAttention
from octavo.layers.decoder import Decoder, DecoderLayer, DeferredHidden
from octavo.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from octavo.layers.mlp import MLP
from octavo.layers.norm import LayerNorm
from octavo.layers.parallel import TensorParallel
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.base import CausalLM


class ParallelDecoderLayer(DecoderLayer):
    """``x + attention(norm(x)) + mlp(norm(x))``, each with a norm of its own."""

    def __init__(self, config: ModelConfig, layer: int, rotary: RotaryEmbedding, tp: TensorParallel) -> None:
        super().__init__()
        text = config.text_of(GPTNeoXConfig)
        hidden, eps = text.hidden_size, text.layer_norm_eps
        self.input_layernorm = LayerNorm(hidden, eps)
        self.self_attn = SelfAttention(config, layer, tp, rotary, qkv_bias=True, out_bias=True)
        self.post_attention_layernorm = LayerNorm(hidden, eps)
        self.mlp = MLP(hidden, text.intermediate_size, True, text.hidden_act, tp)

    def attend(self, x: Tensor, residual: Tensor | None, positions: Tensor, ctx: ForwardContext) -> DeferredHidden:
        """See `DecoderLayer`."""
        return self.self_attn(self.input_layernorm(x)[0], positions, ctx), x

    def finish(self, *deferred: Tensor) -> tuple[Any, None]:
        """See `DecoderLayer`."""
        attended, x = deferred
        return self.mlp(self.post_attention_layernorm(x)[0]) + self.self_attn.o_proj(attended) + x, None


class ParallelConfig(GPTNeoXConfig):
    """GPT-NeoX's fields."""


class ParallelForCausalLM(CausalLM):
    """GPT-NeoX whose rotary embedding turns whole heads."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__(config, tp)
        rotary = RotaryEmbedding(config)
        self.model = Decoder(
            VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp),
            [ParallelDecoderLayer(config, layer, rotary, tp) for layer in range(config.num_layers)],
            LayerNorm(config.hidden_size, config.text_of(GPTNeoXConfig).layer_norm_eps),
        )
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, tp)
