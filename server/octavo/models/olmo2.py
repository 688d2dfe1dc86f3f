"""OLMo 2 and OLMo 3 (dense)."""

from __future__ import annotations

from torch import Tensor

import octavo_kernels
from octavo.interface.engine_config import ModelConfig
from octavo.interface.model_config.olmo2 import Olmo3Config
from octavo.layers.attention import ForwardContext, SelfAttention
from octavo.layers.decoder import DecoderLayer, DeferredHidden
from octavo.layers.gathered_columns import GatheredColumns, Part
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import RMSNorm
from octavo.layers.parallel import TensorParallel
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.llama import LlamaForCausalLM
from octavo_kernels import AttentionOptions


class OlmoSelfAttention(SelfAttention):
    """Norms of all queries of a token as one row, and of all its keys, before they are cut into heads."""

    def __init__(
        self, config: ModelConfig, layer: int, tp: TensorParallel, rotary: RotaryEmbedding | None, window: int | None
    ) -> None:
        bias, eps = config.text.attention_bias, config.text.rms_norm_eps
        super().__init__(
            config, layer, tp, rotary, qkv_bias=bias, out_bias=bias, options=AttentionOptions(window=window)
        )
        queries, keys = (shard.num_rows for shard in self.qkv_proj.shards[:2])
        copies = max(1, tp.size // config.num_kv_heads)
        parts = [Part(0, queries), Part(queries, keys, copies)]
        self.heads = GatheredColumns(self.qkv_proj.output_size, parts, tp)
        self.q_norm = RMSNorm(config.num_heads * config.head_size, eps)
        self.k_norm = RMSNorm(config.num_kv_heads * config.head_size, eps)

    def forward(self, x: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """See `SelfAttention`."""
        qkv, start = self.heads.gather(self.qkv_proj(x)), 0
        for norm in (self.q_norm, self.k_norm):
            assert norm is not None
            end = start + norm.weight.numel()
            octavo_kernels.rms_norm_(qkv[:, start:end], norm.weight, norm.eps)
            start = end
        attended: Tensor = self.attn(self.heads.own(qkv), positions, ctx)
        return attended


class OlmoDecoderLayer(DecoderLayer):
    """Norms of what attention and MLP add to the residual, none of what they read."""

    def __init__(self, self_attn: SelfAttention, attention_norm: RMSNorm, mlp: GatedMLP, mlp_norm: RMSNorm) -> None:
        super().__init__()
        self.self_attn, self.post_attention_layernorm = self_attn, attention_norm
        self.mlp, self.post_feedforward_layernorm = mlp, mlp_norm

    def attend(self, x: Tensor, residual: Tensor | None, positions: Tensor, ctx: ForwardContext) -> DeferredHidden:
        """See `DecoderLayer`."""
        x = x if residual is None else octavo_kernels.add(residual, x)
        return self.self_attn(x, positions, ctx), x

    def finish(self, *deferred: Tensor) -> tuple[Tensor, Tensor]:
        """See `DecoderLayer`."""
        attended, x = deferred
        x = octavo_kernels.add(x, self.post_attention_layernorm(self.self_attn.o_proj(attended))[0])
        return self.post_feedforward_layernorm(self.mlp(x))[0], x


class Olmo2ForCausalLM(LlamaForCausalLM):
    """Llama with norms behind blocks, and of all queries and keys."""

    def create_layer(self, layer: int, rotary: RotaryEmbedding | None) -> DecoderLayer:
        """Layer number ``layer``."""
        text, hidden = self.text, self.config.hidden_size
        attention = OlmoSelfAttention(self.config, layer, self.tp, rotary, self.text.window(layer))
        norm, last_norm = (RMSNorm(hidden, text.rms_norm_eps) for _ in range(2))
        mlp = GatedMLP(hidden, text.intermediate_size, False, text.hidden_act, self.tp)
        return OlmoDecoderLayer(attention, norm, mlp, last_norm)


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    """OLMo 2 with a window in three of four layers, whose positions are not stretched to longer contexts."""

    text: Olmo3Config

    def create_rotaries(self) -> list[RotaryEmbedding | None]:
        """One for layers with a window, another for those without."""
        sliding, full = (
            RotaryEmbedding(self.config, parameters=self.text.rope(kind))
            for kind in ("sliding_attention", "full_attention")
        )
        return [full if self.text.window(layer) is None else sliding for layer in range(self.config.num_layers)]
