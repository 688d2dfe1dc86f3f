"""OPT: learned positions, LayerNorm before or after each block, biases, a plain MLP."""

from __future__ import annotations

from typing import ClassVar, cast

from torch import Tensor

import octavo_kernels
from octavo.interface.engine_config import ModelConfig
from octavo.interface.model_config.opt import OPTConfig
from octavo.layers.attention import ForwardContext, SelfAttention
from octavo.layers.decoder import Decoder, DecoderLayer, DeferredHidden, PreNormDecoderLayer
from octavo.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from octavo.layers.linear import ReplicatedLinear
from octavo.layers.mlp import MLP
from octavo.layers.norm import LayerNorm
from octavo.layers.parallel import TensorParallel
from octavo.models.base import CausalLM

_POSITION_OFFSET = 2  # the first rows of the table were those of padding in fairseq


class OPTPostNormDecoderLayer(DecoderLayer):
    """Norms of the sums behind attention and behind the MLP (350m), as in the first Transformer."""

    def __init__(self, self_attn: SelfAttention, attention_norm: LayerNorm, mlp: MLP, mlp_norm: LayerNorm) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = attention_norm, self_attn
        self.post_attention_layernorm, self.mlp = mlp_norm, mlp

    def attend(self, x: Tensor, residual: Tensor | None, positions: Tensor, ctx: ForwardContext) -> DeferredHidden:
        """See `DecoderLayer`; nothing is left to be added between such layers."""
        return self.self_attn(x, positions, ctx), x

    def finish(self, *deferred: Tensor) -> tuple[Tensor, None]:
        """See `DecoderLayer`."""
        attended, x = deferred
        x, _ = self.input_layernorm(self.self_attn.o_proj(attended), x)
        x, _ = self.post_attention_layernorm(self.mlp(x), x)
        return x, None


class OPTDecoder(Decoder):
    """Adds learned positions; the 350m's embeddings are narrower than its hidden states."""

    behind_layers: ClassVar[tuple[str, ...]] = ("norm", "project_out")

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        text, hidden = config.text_of(OPTConfig), config.hidden_size
        bias, affine = text.enable_bias, text.layer_norm_elementwise_affine
        norm_before = text.do_layer_norm_before

        def layer(number: int) -> DecoderLayer:
            attention = SelfAttention(config, number, tp, qkv_bias=bias, out_bias=bias)
            mlp = MLP(hidden, text.intermediate_size, bias, text.hidden_act, tp)
            norm, last_norm = LayerNorm(hidden, affine=affine), LayerNorm(hidden, affine=affine)
            if norm_before:
                return PreNormDecoderLayer(norm, attention, last_norm, mlp)
            return OPTPostNormDecoderLayer(attention, norm, mlp, last_norm)

        self.embed_size = text.word_embed_proj_dim or hidden
        final = norm_before and not text._remove_final_layer_norm
        super().__init__(
            VocabParallelEmbedding(config.vocab_size, self.embed_size, tp),
            [layer(number) for number in range(config.num_layers)],
            LayerNorm(hidden, affine=affine) if final else None,
        )
        positions = text.max_position_embeddings + _POSITION_OFFSET
        # Small, so every rank holds all of it.
        self.embed_positions = VocabParallelEmbedding(positions, hidden, TensorParallel())
        project = self.embed_size != hidden
        self.project_in = ReplicatedLinear(self.embed_size, hidden, False, tp) if project else None
        self.project_out = ReplicatedLinear(hidden, self.embed_size, False, tp) if project else None

    def embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """See `Decoder`."""
        x = super().embed(input_ids, positions)
        if self.project_in is not None:
            x = self.project_in(x)
        return octavo_kernels.add(x, self.embed_positions(positions, _POSITION_OFFSET))

    def finish(self, *deferred: Tensor) -> Tensor:
        """See `Decoder`; ``[R, embed_size]``."""
        x = super().finish(*deferred)
        return x if self.project_out is None else cast(Tensor, self.project_out(x))


class OPTForCausalLM(CausalLM):
    """OPT of every size."""

    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [
        (r"^(model\.)?decoder\.", "model."),
        (r"\.self_attn_layer_norm\.", ".input_layernorm."),
        (r"(layers\.\d+)\.final_layer_norm\.", r"\1.post_attention_layernorm."),
        (r"\.final_layer_norm\.", ".norm."),
        (r"\.out_proj\.", ".o_proj."),
        (r"\.(fc[12])\.", r".mlp.\1."),
        *CausalLM.checkpoint_names,
    ]

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__(config, tp)
        self.model = decoder = OPTDecoder(config, tp)
        tied = config.text.tie_word_embeddings
        self.lm_head = ParallelLMHead(config.vocab_size, decoder.embed_size, tp, decoder.embed_tokens if tied else None)
