"""Llama 2 and 3, Mistral, SmolLM2 and whatever else says LlamaForCausalLM; Qwen2 and Qwen3 are variations of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from torch import Tensor, nn

import octavo_kernels
from octavo.interface.engine_config import ModelConfig
from octavo.layers.activation import gated_activation
from octavo.layers.attention import Attention, ForwardContext
from octavo.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from octavo.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from octavo.layers.norm import RMSNorm
from octavo.layers.parallel import TensorParallel
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.base import CausalLM


@dataclass(frozen=True)
class AttentionOptions:
    """How a family's attention differs from the others'."""

    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    window: int | None = None


class LlamaAttention(nn.Module):
    def __init__(
        self, config: ModelConfig, layer: int, rotary: RotaryEmbedding, options: AttentionOptions, tp: TensorParallel
    ) -> None:
        super().__init__()
        hidden, heads, kv_heads, size = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_size
        eps = config.hf_config.get("rms_norm_eps", 1e-6)
        self.qkv_proj = QKVParallelLinear(hidden, size, heads, kv_heads, options.qkv_bias, tp)
        self.o_proj = RowParallelLinear(heads * size, hidden, options.out_bias, tp)
        self.q_norm = RMSNorm(size, eps) if options.qk_norm else None
        self.k_norm = RMSNorm(size, eps) if options.qk_norm else None
        heads, kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.attn = Attention(layer, heads, kv_heads, size, rotary, options.window, self.q_norm, self.k_norm)

    def forward(self, x: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """What each head makes of ``x [T, H]``, for ``o_proj``."""
        return self.attn(self.qkv_proj(x), positions, ctx)


class LlamaMLP(nn.Module):
    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        hf = config.hf_config
        hidden, inner, bias = config.hidden_size, hf["intermediate_size"], hf.get("mlp_bias", False)
        self.gate_up_proj = MergedColumnParallelLinear(hidden, [inner, inner], bias, tp)
        self.down_proj = RowParallelLinear(inner, hidden, bias, tp)
        self.act: Callable[[Tensor], Any] = gated_activation(hf.get("hidden_act", "silu"))

        self.fused_terms = 0

    def fuse(self) -> None:
        """After loading: let gates and ups leave quantised rows where the layer after them takes those."""
        if self.act is octavo_kernels.silu_and_mul:
            self.fused_terms = self.down_proj.method.terms

    def forward(self, x: Tensor) -> Tensor:
        if self.fused_terms:
            return self.down_proj(self.gate_up_proj.method.apply_gated(self.gate_up_proj, x, self.fused_terms))
        return self.down_proj(self.act(self.gate_up_proj(x)))


class LlamaDecoderLayer(nn.Module):
    def __init__(
        self, config: ModelConfig, layer: int, rotary: RotaryEmbedding, options: AttentionOptions, tp: TensorParallel
    ) -> None:
        super().__init__()
        eps = config.hf_config.get("rms_norm_eps", 1e-6)
        self.input_layernorm = RMSNorm(config.hidden_size, eps)
        self.self_attn = LlamaAttention(config, layer, rotary, options, tp)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps)
        self.mlp = LlamaMLP(config, tp)

    def fuse(self) -> None:
        """After loading: let the norms quantise for layers that take quantised rows."""
        self.input_layernorm.terms = self.self_attn.qkv_proj.method.terms
        self.post_attention_layernorm.terms = self.mlp.gate_up_proj.method.terms

    def attend(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.input_layernorm(x, residual)
        return self.self_attn(x, positions, ctx), residual

    def finish(self, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = self.post_attention_layernorm(self.self_attn.o_proj(attended), residual)
        return self.mlp(x), residual


class LlamaModel(nn.Module):
    def __init__(self, config: ModelConfig, options: list[AttentionOptions], tp: TensorParallel) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp)
        self.rotary = RotaryEmbedding(config)
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(config, i, self.rotary, option, tp) for i, option in enumerate(options)
        )
        self.norm = RMSNorm(config.hidden_size, config.hf_config.get("rms_norm_eps", 1e-6))

    def begin(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        x, residual = self.embed_tokens(input_ids), None
        *layers, last = cast(Iterable[LlamaDecoderLayer], self.layers)
        for layer in layers:
            x, residual = layer.finish(*layer.attend(x, residual, positions, ctx))
        return last.attend(x, residual, positions, ctx)

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        x, residual = cast(LlamaDecoderLayer, self.layers[-1]).finish(attended, residual)
        return self.norm(x, residual)[0]


class LlamaForCausalLM(CausalLM):
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__(config, tp)
        options = [self.attention_options(config, layer) for layer in range(config.num_layers)]
        self.model = LlamaModel(config, options, tp)
        embedding = self.model.embed_tokens if config.hf_config.get("tie_word_embeddings", False) else None
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, tp, embedding)

    @staticmethod
    def attention_options(config: ModelConfig, layer: int) -> AttentionOptions:
        bias = config.hf_config.get("attention_bias", False)
        return AttentionOptions(qkv_bias=bias, out_bias=bias)

    def begin(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> tuple[Tensor, ...]:
        return self.model.begin(input_ids, positions, ctx)

    def finish(self, *states: Tensor) -> Tensor:
        return self.model.finish(*states)


class MistralForCausalLM(LlamaForCausalLM):
    @staticmethod
    def attention_options(config: ModelConfig, layer: int) -> AttentionOptions:
        # Every layer has the window; a config that does not speak of it means the first Mistral's, null means none.
        return AttentionOptions(window=config.hf_config.get("sliding_window", 4096))
