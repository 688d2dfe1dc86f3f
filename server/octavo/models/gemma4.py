"""Gemma 4 (text): dense models, with embeddings of each layer's own (E2B, E4B), and one with experts (26B-A4B)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

import octavo_kernels
from octavo.interface.engine_config import ModelConfig
from octavo.interface.model_config.gemma4 import Gemma4Config, PerLayerGemmaConfig
from octavo.interface.ranks import Stage
from octavo.layers.activation import activation_kind
from octavo.layers.attention import Attention, ForwardContext, SelfAttention
from octavo.layers.decoder import Decoder, DecoderLayer, DeferredHidden, PreNormDecoderLayer
from octavo.layers.embedding import PackedTable, VocabParallelEmbedding
from octavo.layers.linear import ReplicatedLinear
from octavo.layers.mlp import GatedMLP
from octavo.layers.moe import FusedMoE, Routing, expert_settings
from octavo.layers.norm import RMSNorm, UnitNorm
from octavo.layers.parallel import TensorParallel
from octavo.layers.quantization import LinearMethod
from octavo.layers.rotary import RotaryEmbedding
from octavo.layers.weights import WeightSlot, WeightSource, fill_tensor
from octavo.models.gemma import Gemma2ForCausalLM
from octavo_kernels import AttentionOptions

_KEYS_AND_VALUES = re.compile(r"(.*\.layers\.(\d+)\.self_attn\.)([kv])(_(?:proj|norm)\..*)")


class Gemma4Attention(SelfAttention):
    """Attention whose values are normed too, without a weight."""

    def __init__(self, config: ModelConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        norm = UnitNorm(config.head_size, config.text.rms_norm_eps, 0.0)
        self.v_norm = norm if self.attn.has_cache else None

    def forward(self, x: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """See `SelfAttention`."""
        qkv = self.input_proj(x)
        if self.v_norm is not None:
            values = self.attn.num_kv_heads * self.attn.head_size
            octavo_kernels.rms_norm_(qkv[:, -values:], self.v_norm.weight, self.v_norm.eps)
        attended: Tensor = self.attn(qkv, positions, ctx)
        return attended


class RouterNorm(RMSNorm):
    """A norm whose result is divided by the square root of its width."""

    power: ClassVar[float] = -0.5

    def _load(self, source: WeightSource) -> None:
        super()._load(source)
        self.weight.mul_(self.weight.numel() ** self.power)


class Gemma4Experts(FusedMoE):
    """Experts beside an MLP: they are chosen by one norm of what enters the block, and read another one."""

    def __init__(self, config: ModelConfig, act: str, tp: TensorParallel) -> None:
        text, hidden = config.text_of(Gemma4Config), config.hidden_size
        eps = text.rms_norm_eps
        settings = expert_settings(text.num_experts, hidden, text.expert_size, act)
        super().__init__(settings, Routing(text.num_experts_per_tok, expert_scale=True), tp)
        self.router_norm = RouterNorm(hidden, eps, 0.0)
        self.input_norm, self.output_norm = RMSNorm(hidden, eps, 0.0), RMSNorm(hidden, eps, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        """``x [T, H]``, not normed; returns ``[T, H]``."""
        ids, weights = self.route(cast(Tensor, self.router_norm(x)[0]))
        rows = cast(Tensor, self.input_norm(x)[0])
        return cast(Tensor, self.output_norm(self.experts(rows, ids, weights))[0])


class Gemma4DecoderLayer(PreNormDecoderLayer):
    """A layer of Gemma 3 with what its kind of Gemma 4 has more: experts beside the MLP; a last block that a row enters
    with an embedding of its token for this layer (``deferred``'s third one); a factor of the result."""

    def __init__(
        self, config: ModelConfig, self_attn: SelfAttention, mlp: GatedMLP, act: str, tp: TensorParallel
    ) -> None:
        text, hidden = config.text_of(Gemma4Config), config.hidden_size

        def norm() -> RMSNorm:
            return RMSNorm(hidden, text.rms_norm_eps, 0.0)

        super().__init__(norm(), self_attn, norm(), mlp, attention_output_norm=norm(), mlp_output_norm=norm())
        self.layer_scalar = 1.0
        sparse = text.enable_moe_block
        self.moe = Gemma4Experts(config, act, tp) if sparse else None
        self.mlp_norm = norm() if sparse else None
        if size := text.hidden_size_per_layer_input:
            self.act = activation_kind(act)
            self.per_layer_input_gate = ReplicatedLinear(hidden, size, False, tp)
            self.per_layer_projection = ReplicatedLinear(size, hidden, False, tp)
            self.post_per_layer_input_norm = norm()

    def finish(self, *deferred: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `DecoderLayer`."""
        attended, residual, *embedded = deferred
        x = self._output(self.self_attn.o_proj(attended), self.attention_output_norm)
        x, residual = self.post_attention_layernorm(x, residual)
        x = self.mlp(x)
        if self.moe is not None:
            x = octavo_kernels.add(self._output(x, self.mlp_norm), self.moe(residual))
        x = octavo_kernels.add(residual, self._output(x, self.mlp_output_norm))
        if embedded:
            entering = octavo_kernels.activate(self.per_layer_input_gate(x), self.act, up=embedded[0])
            x = octavo_kernels.add(x, self._output(self.per_layer_projection(entering), self.post_per_layer_input_norm))
        return (x if self.layer_scalar == 1.0 else octavo_kernels.scale(x, self.layer_scalar)), None

    def weight_slots(self) -> Iterator[WeightSlot]:
        """The factor."""
        yield WeightSlot(0, "layer_scalar", None, self._set_scalar, optional=True, shapes=((1,),))

    def _set_scalar(self, source: WeightSource) -> None:
        self.layer_scalar = source.load(torch.float32).item()


class PerLayerEmbedding(VocabParallelEmbedding):
    """A table with fewer rows than there are tokens: the others have the first row. It is held as it is stored."""

    def __init__(self, rows: int, vocab_size: int, hidden_size: int, tp: TensorParallel) -> None:
        super().__init__(vocab_size, hidden_size, tp)
        self.stored_rows, self.shard = rows, replace(self.shard, shape=(rows, hidden_size))

    def pack(self, method: LinearMethod, table: PackedTable) -> None:
        """See `VocabParallelEmbedding`."""

    def _load(self, source: WeightSource) -> None:
        assert self.weight is not None
        own = self.shard.rows
        stored = slice(min(own.start, self.stored_rows), min(own.stop, self.stored_rows))
        count = stored.stop - stored.start
        fill_tensor(self.weight[:count], source, stored)
        if count < len(self.weight):
            self.weight[count:] = source[0].load(self.weight.dtype)


class PerLayerDecoder(Decoder):
    """A decoder in which each layer has embeddings of the tokens of its own: of a second table, which holds those of
    all layers, and of the usual embedding, projected."""

    def __init__(
        self,
        config: ModelConfig,
        tp: TensorParallel,
        embed_tokens: VocabParallelEmbedding,
        layers: list[DecoderLayer],
        norm: RMSNorm,
        embedding_scale: float,
    ) -> None:
        super().__init__(embed_tokens, layers, norm, embedding_scale)
        text, hidden, count = config.text_of(PerLayerGemmaConfig), config.hidden_size, config.num_layers
        self.size = text.hidden_size_per_layer_input or 0
        self.table_scale = torch.tensor(self.size**0.5, dtype=getattr(torch, config.dtype), device="cpu").item()
        rows, width = text.vocab_size_per_layer_input, count * self.size
        if rows < config.vocab_size:
            self.embed_tokens_per_layer: VocabParallelEmbedding = PerLayerEmbedding(rows, config.vocab_size, width, tp)
        else:
            self.embed_tokens_per_layer = VocabParallelEmbedding(rows, width, tp)
        self.per_layer_model_projection = ReplicatedLinear(hidden, count * self.size, False, tp)
        self.per_layer_projection_norm = RMSNorm(self.size, text.rms_norm_eps, 0.0)
        last = torch.arange((count - 1) * self.size, count * self.size, dtype=torch.int32)
        self.register_buffer("last_columns", last, persistent=False)

    def keep(self, stage: Stage, layers: range) -> None:
        """See `Decoder`. A stage receives the embeddings of its own layers and those behind them."""
        super().keep(stage, layers)
        first = (len(layers) - 1) * self.size
        self.last_columns = torch.arange(first, first + self.size, dtype=torch.int32)

    def token_tables(self) -> list[VocabParallelEmbedding]:
        """See `Decoder`."""
        return [self.embed_tokens, self.embed_tokens_per_layer]

    def embed_per_layer(self, input_ids: Tensor, x: Tensor) -> Tensor:
        """Embeddings of all layers, one beside the other: ``[T, layers * size]``, of ``x [T, H]``, the usual ones."""
        projected = octavo_kernels.scale(self.per_layer_model_projection(x), x.shape[1] ** -0.5)
        norm = self.per_layer_projection_norm
        octavo_kernels.rms_norm_(projected, norm.weight, norm.eps)
        table = octavo_kernels.scale(self.embed_tokens_per_layer(input_ids), self.table_scale)
        return octavo_kernels.scale(octavo_kernels.add(projected, table), 2**-0.5)

    def enter(self, x: Tensor) -> Tensor:
        """The input of the first layer, from the usual embeddings ``[T, H]``."""
        return x

    def begin(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext, *received: Tensor) -> DeferredHidden:
        """See `Decoder`. What goes from stage to stage are ``x`` and the embeddings of the layers that follow."""
        residual: Tensor | None = None
        if received:
            x, embedded = received
        else:
            x = self.embed(input_ids, positions)
            embedded = self.embed_per_layer(input_ids, x)
            x = self.enter(x)
        layers, last = self.own_layers(), None
        if self.stage.is_last:
            last = layers.pop()
        for number, layer in enumerate(layers):
            own = embedded[:, number * self.size : (number + 1) * self.size]
            x, residual = layer.finish(*layer.attend(x, residual, positions, ctx), own)
        if last is None:
            return x, embedded[:, len(layers) * self.size :]
        own = octavo_kernels.take_columns(embedded, self.last_columns)
        return (*last.attend(x, residual, positions, ctx), own)


class Gemma4ForCausalLM(Gemma2ForCausalLM):
    """Layers without a window have heads of another size, and may take their keys for values; the last layers attend to
    the keys and values of the last one of their kind that has some."""

    text: PerLayerGemmaConfig

    checkpoint_names: ClassVar[list[tuple[str, str | None]]] = [
        (r"(?<!\.moe)\.experts\.", ".moe.experts."),
        (r"\.router\.proj\.", ".moe.gate."),
        (r"\.router\.per_expert_scale$", ".moe.gate.per_expert_scale"),
        (r"\.router\.scale$", ".moe.router_norm.weight"),
        (r"\.pre_feedforward_layernorm_2\.", ".moe.input_norm."),
        (r"\.post_feedforward_layernorm_2\.", ".moe.output_norm."),
        (r"\.post_feedforward_layernorm_1\.", ".mlp_norm."),
        *Gemma2ForCausalLM.checkpoint_names,
    ]

    @classmethod
    def experts_apart(cls, name: str, source: WeightSource, config: ModelConfig) -> Iterator[tuple[str, WeightSource]]:
        """See `Model`. Keys that are values as well come a second time, as values; those that a layer has no use for,
        since it shares another one's, are left out."""
        for found, part in super().experts_apart(name, source, config):
            match, text = _KEYS_AND_VALUES.fullmatch(found), config.text_of(PerLayerGemmaConfig)
            if match is None or cls.weight_name(found) is None:
                yield found, part
                continue
            layer = int(match[2])
            if layer >= text.first_shared_layer:
                continue
            is_both = text.keys_are_values(layer)
            if match[3] == "k" or not is_both:
                yield found, part
            if match[3] == "k" and is_both and match[4].startswith("_proj."):
                yield f"{match[1]}v{match[4]}", part

    @property
    def norm_offset(self) -> float:
        """0: checkpoints leave nothing out of a norm's weight."""
        return 0.0

    @cached_property
    def owners(self) -> dict[str, Attention]:
        """The last layer so far of each kind that has keys and values of its own."""
        return {}

    def create_rotaries(self) -> list[RotaryEmbedding | None]:
        """One for each kind of layer."""
        text = self.text
        found: dict[str, RotaryEmbedding] = {}
        for layer, kind in enumerate(text.kinds):
            if kind not in found:
                found[kind] = RotaryEmbedding(self.config.of_layer(layer), parameters=text.rope(kind))
        return [found[kind] for kind in text.kinds]

    def create_decoder(
        self, embed_tokens: VocabParallelEmbedding, layers: list[DecoderLayer], embedding_scale: float
    ) -> Decoder:
        """Create a decoder, with embeddings for each layer if there are any."""
        if self.text.hidden_size_per_layer_input:
            return PerLayerDecoder(self.config, self.tp, embed_tokens, layers, self.create_norm(), embedding_scale)
        return super().create_decoder(embed_tokens, layers, embedding_scale)

    def create_layer(self, layer: int, rotary: RotaryEmbedding | None) -> DecoderLayer:
        """Layer number ``layer``."""
        text, hidden = self.text, self.config.hidden_size
        act, attention = text.act, self.create_attention(layer, rotary)
        wide = self.config.text_of(Gemma4Config).use_double_wide_mlp and not attention.attn.has_cache
        mlp = GatedMLP(hidden, text.intermediate_size * (2 if wide else 1), False, act, self.tp)
        return Gemma4DecoderLayer(self.config, attention, mlp, act, self.tp)

    def create_attention(self, layer: int, rotary: RotaryEmbedding | None) -> SelfAttention:
        """The attention of layer number ``layer``."""
        text = self.text
        kind, bias = text.kinds[layer], text.attention_bias
        shares = layer >= text.first_shared_layer
        attention = Gemma4Attention(
            self.config.of_layer(layer),
            layer,
            self.tp,
            rotary,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=True,
            options=AttentionOptions(1.0, text.window(layer)),
            norm_offset=self.norm_offset,
            shares_kv_with=self.owners[kind] if shares else None,
        )
        if not shares:
            self.owners[kind] = attention.attn
        return attention


class Gemma4UnifiedForCausalLM(Gemma4ForCausalLM):
    """The text of the 12B, which has neither embeddings of each layer's own nor experts."""
