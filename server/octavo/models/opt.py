"""OPT: learned positions, LayerNorm before or after each block, biases, a plain MLP."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, cast

from torch import Tensor, nn

from octavo.interface.engine_config import ModelConfig
from octavo.layers.activation import activation
from octavo.layers.attention import Attention, ForwardContext
from octavo.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from octavo.layers.linear import ColumnParallelLinear, QKVParallelLinear, ReplicatedLinear, RowParallelLinear
from octavo.layers.norm import LayerNorm
from octavo.layers.parallel import TensorParallel
from octavo.models.base import CausalLM

_POSITION_OFFSET = 2  # the first rows of the table were those of padding in fairseq


class OPTAttention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, bias: bool, tp: TensorParallel) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.head_size
        self.qkv_proj = QKVParallelLinear(hidden, size, config.num_heads, config.num_heads, bias, tp)
        self.out_proj = RowParallelLinear(hidden, hidden, bias, tp)
        self.attn = Attention(layer, self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads, size)

    def forward(self, x: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """What each head makes of ``x [T, H]``, for ``out_proj``."""
        return self.attn(self.qkv_proj(x), positions, ctx)


class OPTDecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel) -> None:
        super().__init__()
        hf, hidden = config.hf_config, config.hidden_size
        inner, bias = hf["ffn_dim"], hf.get("enable_bias", True)
        affine = hf.get("layer_norm_elementwise_affine", True)
        self.norm_before = hf.get("do_layer_norm_before", True)
        self.self_attn = OPTAttention(config, layer, bias, tp)
        self.self_attn_layer_norm = LayerNorm(hidden, affine=affine)
        self.fc1 = ColumnParallelLinear(hidden, inner, bias, tp)
        self.fc2 = RowParallelLinear(inner, hidden, bias, tp)
        self.final_layer_norm = LayerNorm(hidden, affine=affine)
        self.act = activation(hf.get("activation_function", "relu"))

    def attend(self, x: Tensor, positions: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        normed = self.self_attn_layer_norm(x) if self.norm_before else x
        return self.self_attn(normed, positions, ctx), x

    def finish(self, attended: Tensor, x: Tensor) -> Tensor:
        x = x + self.self_attn.out_proj(attended)
        if self.norm_before:
            return x + self.fc2(self.act(self.fc1(self.final_layer_norm(x))))
        x = self.self_attn_layer_norm(x)
        return self.final_layer_norm(x + self.fc2(self.act(self.fc1(x))))


class OPTDecoder(nn.Module):
    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        hf, hidden = config.hf_config, config.hidden_size
        self.embed_size = hf.get("word_embed_proj_dim") or hidden
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, self.embed_size, tp)
        positions = hf["max_position_embeddings"] + _POSITION_OFFSET
        # Small, so every rank holds all of it.
        self.embed_positions = VocabParallelEmbedding(positions, hidden, TensorParallel())
        project = self.embed_size != hidden  # 350m
        self.project_in = ReplicatedLinear(self.embed_size, hidden, False, tp) if project else None
        self.project_out = ReplicatedLinear(hidden, self.embed_size, False, tp) if project else None
        self.layers = nn.ModuleList(OPTDecoderLayer(config, i, tp) for i in range(config.num_layers))
        final = hf.get("do_layer_norm_before", True) and not hf.get("_remove_final_layer_norm", False)
        affine = hf.get("layer_norm_elementwise_affine", True)
        self.final_layer_norm = LayerNorm(hidden, affine=affine) if final else None

    def begin(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        x = self.embed_tokens(input_ids)
        if self.project_in is not None:
            x = self.project_in(x)
        x = x + self.embed_positions(positions + _POSITION_OFFSET)
        *layers, last = cast(Iterable[OPTDecoderLayer], self.layers)
        for layer in layers:
            x = layer.finish(*layer.attend(x, positions, ctx))
        return last.attend(x, positions, ctx)

    def finish(self, attended: Tensor, x: Tensor) -> Tensor:
        x = cast(OPTDecoderLayer, self.layers[-1]).finish(attended, x)
        if self.final_layer_norm is not None:
            x = self.final_layer_norm(x)
        return x if self.project_out is None else self.project_out(x)


class OPTModel(nn.Module):
    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.decoder = OPTDecoder(config, tp)


class OPTForCausalLM(CausalLM):
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__(config, tp)
        self.model = OPTModel(config, tp)
        decoder = self.model.decoder
        tied = config.hf_config.get("tie_word_embeddings", True)
        self.lm_head = ParallelLMHead(config.vocab_size, decoder.embed_size, tp, decoder.embed_tokens if tied else None)

    def begin(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> tuple[Tensor, ...]:
        return self.model.decoder.begin(input_ids, positions, ctx)

    def finish(self, *states: Tensor) -> Tensor:
        return self.model.decoder.finish(*states)
