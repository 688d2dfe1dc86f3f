"""Gemma 3n (text): E2B and E4B. Each token has several streams of hidden states; a layer works on one of them."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import NormalDist
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

import octavo_kernels
from octavo.interface.engine_config import ModelConfig
from octavo.interface.model_config.gemma3n import Gemma3nConfig
from octavo.layers.activation import activation_kind
from octavo.layers.attention import ForwardContext, SelfAttention
from octavo.layers.decoder import Decoder, DecoderLayer, DeferredHidden
from octavo.layers.embedding import VocabParallelEmbedding
from octavo.layers.gathered_columns import GatheredColumns, Part
from octavo.layers.linear import ExactLinear, ReplicatedLinear
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import RMSNorm
from octavo.layers.parallel import TensorParallel
from octavo.layers.rotary import RotaryEmbedding
from octavo.layers.weights import WeightSlot, WeightSource, copy_slot
from octavo.models.gemma4 import Gemma4ForCausalLM, PerLayerDecoder, RouterNorm

MAGNITUDE_FLOOR = 1e-5  # of the mean square that a projected stream is divided by


class SparseMLP(GatedMLP):
    """A gated MLP in which only gates count that lie ``deviations`` standard deviations above their mean."""

    def __init__(self, hidden: int, inner: int, act: str, tp: TensorParallel, deviations: float) -> None:
        super().__init__(hidden, inner, False, act, tp)
        self.deviations, self.inner = deviations, inner
        own = tp.divide(inner, "intermediate_size")
        self.gates = GatheredColumns(2 * own, [Part(0, own)], tp)

    def forward(self, x: Tensor) -> Tensor:
        """See `GatedMLP`."""
        gate_up = self.gates.gather(self.gate_up_proj(x))
        octavo_kernels.sparsify_(gate_up[:, : self.inner], self.deviations)
        out: Tensor = self.down_proj(self.act(self.gates.own(gate_up)))
        return out


class ModalityNorm(RouterNorm):
    """A norm whose result is divided by its width."""

    power: ClassVar[float] = -1.0


class StreamFactors(nn.Module):
    """The factors with which streams are summed, see `octavo_kernels.mix_streams`: ``constants [M, S]``, and a matrix
    ``[M, S, n]`` that is multiplied by a token's modalities."""

    constants: Tensor
    matrix: Tensor

    def __init__(self, constants: Tensor) -> None:
        super().__init__()
        made, streams = constants.shape
        self.register_buffer("constants", constants, persistent=False)
        self.register_buffer("matrix", torch.zeros(made, streams, made, dtype=torch.float32), persistent=False)

    def weight_slots(self) -> Iterator[WeightSlot]:
        """The matrix."""
        made = len(self.matrix)
        yield WeightSlot(0, "weight", (made * made, made), self._load)

    def _load(self, source: WeightSource) -> None:
        self.matrix.copy_(source.load(torch.float32).view(self.matrix.shape))


class CorrectionFactors(StreamFactors):
    """The factors of the correction: each stream gets a part of the change of the active one, whose result comes behind
    them."""

    def __init__(self, count: int, active: int) -> None:
        constants = torch.eye(count, count + 1, dtype=torch.float32)
        constants[:, active] -= 1.0
        constants[:, count] = 1.0
        super().__init__(constants)
        self.active = active

    def weight_slots(self) -> Iterator[WeightSlot]:
        """The slot of the matrix of each stream's part."""
        yield WeightSlot(0, "weight", (len(self.matrix), len(self.matrix)), self._load)

    def _load(self, source: WeightSource) -> None:
        parts = source.load(torch.float32)
        self.matrix[:, self.active].copy_(-parts)
        self.matrix[:, -1].copy_(parts)


class AltUp(nn.Module):
    """Alternating updates (Baykal et al., 2023): all streams are predicted before a layer, and corrected by what the
    layer makes of the active one. Streams are ``[T, n H]``."""

    active_columns: Tensor

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        text, hidden = config.text_of(Gemma3nConfig), config.hidden_size
        count, self.active = text.altup_num_inputs, text.altup_active_idx
        self.router_norm = ModalityNorm(hidden, text.rms_norm_eps, 0.0)
        self.modality_router = ExactLinear(hidden, count, False, tp)
        self.prediction_coefs = StreamFactors(torch.eye(count, dtype=torch.float32))
        self.correction_coefs = CorrectionFactors(count, self.active)
        self.correct_output_scale = nn.Parameter(torch.empty(hidden), requires_grad=False)
        self.scales = text.altup_correct_scale
        columns = torch.arange(self.active * hidden, (self.active + 1) * hidden, dtype=torch.int32)
        self.register_buffer("active_columns", columns, persistent=False)

    def weight_slots(self) -> Iterator[WeightSlot]:
        """The scale of the active stream."""
        yield copy_slot("correct_output_scale", self.correct_output_scale)

    def modalities(self, x: Tensor) -> Tensor:
        """The modalities ``[T, n]`` of a stream ``[T, H]``."""
        routed = self.modality_router(cast(Tensor, self.router_norm(x)[0]))
        return octavo_kernels.scale(routed, 1.0, 1.0)  # its tanh

    def predict(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """The streams that enter a layer, and the active one of them, ``[T, H]``."""
        given, how = self.modalities(octavo_kernels.take_columns(streams, self.active_columns)), self.prediction_coefs
        predicted = octavo_kernels.mix_streams(streams, how.constants, matrix=how.matrix, given=given)
        return predicted, octavo_kernels.take_columns(predicted, self.active_columns)

    def correct(self, predicted: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The streams that leave a layer which made ``x [T, H]`` of the active one, and that one, scaled."""
        given, how = self.modalities(x), self.correction_coefs
        corrected = octavo_kernels.mix_streams(predicted, how.constants, x, how.matrix, given)
        if not self.scales:
            return corrected, octavo_kernels.take_columns(corrected, self.active_columns)
        hidden = x.shape[1]
        first = corrected[:, self.active * hidden : (self.active + 1) * hidden]
        return corrected, octavo_kernels.activate(first, "none", up=self.correct_output_scale.expand_as(first))


class Laurel(nn.Module):
    """A residual path of low rank beside attention (Menghani et al., 2025)."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        hidden, rank = config.hidden_size, config.text_of(Gemma3nConfig).laurel_rank
        self.linear_left = ReplicatedLinear(hidden, rank, False, tp)
        self.linear_right = ReplicatedLinear(rank, hidden, False, tp)
        self.post_laurel_norm = RMSNorm(hidden, config.text_of(Gemma3nConfig).rms_norm_eps, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        """``x [T, H]``; returns ``[T, H]``."""
        return octavo_kernels.add(x, cast(Tensor, self.post_laurel_norm(self.linear_right(self.linear_left(x)))[0]))


class Gemma3nDecoderLayer(DecoderLayer):
    """Attention, an MLP and what a row's embedding for this layer adds (``deferred``'s last one), on one of the streams
    ``[T, n H]``, which are all that goes from layer to layer."""

    others: Tensor

    def __init__(self, config: ModelConfig, self_attn: SelfAttention, mlp: GatedMLP, act: str, tp: TensorParallel):
        super().__init__()
        text, hidden = config.text_of(Gemma3nConfig), config.hidden_size
        count, size = text.altup_num_inputs, text.hidden_size_per_layer_input

        def norm() -> RMSNorm:
            return RMSNorm(hidden, text.rms_norm_eps, 0.0)

        self.self_attn, self.mlp, self.act = self_attn, mlp, activation_kind(act)
        self.altup, self.laurel = AltUp(config, tp), Laurel(config, tp)
        self.input_layernorm, self.attention_output_norm = norm(), norm()
        self.post_attention_layernorm, self.mlp_output_norm = norm(), norm()
        self.per_layer_input_gate = ReplicatedLinear(hidden, size, False, tp)
        self.per_layer_projection = ReplicatedLinear(size, hidden, False, tp)
        self.post_per_layer_input_norm = norm()
        others = torch.eye(count, count + 1, dtype=torch.float32)
        others[1:, count] = 1.0  # of all but the first stream, whichever is active
        self.register_buffer("others", others, persistent=False)

    def attend(self, x: Tensor, residual: Tensor | None, positions: Tensor, ctx: ForwardContext) -> DeferredHidden:
        """See `DecoderLayer`."""
        predicted, active = self.altup.predict(x)
        normed = cast(Tensor, self.input_layernorm(active)[0])
        return self.self_attn(normed, positions, ctx), predicted, active, normed

    def finish(self, *deferred: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `DecoderLayer`."""
        attended, predicted, active, normed, embedded = deferred
        x = octavo_kernels.add(active, self.attention_output_norm(self.self_attn.o_proj(attended))[0])
        x = octavo_kernels.scale(octavo_kernels.add(x, self.laurel(normed)), 2**-0.5)
        x = octavo_kernels.add(x, self.mlp_output_norm(self.mlp(self.post_attention_layernorm(x)[0]))[0])
        streams, first = self.altup.correct(predicted, x)
        entering = octavo_kernels.activate(self.per_layer_input_gate(first), self.act, up=embedded)
        added = cast(Tensor, self.post_per_layer_input_norm(self.per_layer_projection(entering))[0])
        return octavo_kernels.mix_streams(streams, self.others, added), None


class Gemma3nDecoder(PerLayerDecoder):
    """Streams are projected from the embedding, and projected back to be averaged; each with the size of the first."""

    first: Tensor
    placed: Tensor
    columns: Tensor
    behind_layers: ClassVar[tuple[str, ...]] = ("norm", "altup_unembed_projections")

    def __init__(self, config: ModelConfig, tp: TensorParallel, *args: Any) -> None:
        super().__init__(config, tp, *args)
        hidden, count = config.hidden_size, config.text_of(Gemma3nConfig).altup_num_inputs

        def projections() -> nn.ModuleList:
            return nn.ModuleList(ReplicatedLinear(hidden, hidden, False, tp) for _ in range(count - 1))

        self.altup_projections, self.altup_unembed_projections = projections(), projections()
        # Streams with one more, behind them, in its place: for each but the first
        placed = torch.eye(count, count + 1, dtype=torch.float32).repeat(count - 1, 1, 1)
        for number in range(1, count):
            placed[number - 1, number, count] = 1.0
        self.register_buffer("placed", placed, persistent=False)
        self.register_buffer("first", torch.eye(count, 1, dtype=torch.float32), persistent=False)
        columns = torch.arange(count * hidden, dtype=torch.int32).view(count, hidden)
        self.register_buffer("columns", columns, persistent=False)

    def enter(self, x: Tensor) -> Tensor:
        """See `PerLayerDecoder`."""
        streams = octavo_kernels.mix_streams(x, self.first)
        for place, projection in zip(self.placed, self.altup_projections, strict=True):
            projected = projection(x)
            octavo_kernels.match_rms_(projected, x, MAGNITUDE_FLOOR)
            streams = octavo_kernels.mix_streams(streams, place, projected)
        return streams

    def finish(self, *deferred: Tensor) -> Tensor:
        """See `Decoder`."""
        streams, _ = cast(DecoderLayer, self.layers[-1]).finish(*deferred)
        first, *others = self.columns
        x = octavo_kernels.take_columns(streams, first)
        total = x
        for columns, projection in zip(others, self.altup_unembed_projections, strict=True):
            projected = projection(octavo_kernels.take_columns(streams, columns))
            octavo_kernels.match_rms_(projected, x, MAGNITUDE_FLOOR)
            total = octavo_kernels.add(total, projected)
        assert self.norm is not None
        return cast(Tensor, self.norm(octavo_kernels.scale(total, 1 / len(self.columns)))[0])


class Gemma3nForCausalLM(Gemma4ForCausalLM):
    """Gemma 3n: as in Gemma 4 the last layers share keys and values, and each has embeddings of its own."""

    text: Gemma3nConfig

    @classmethod
    def experts_apart(cls, name: str, source: WeightSource, config: ModelConfig) -> Iterator[tuple[str, WeightSource]]:
        """See `Gemma4ForCausalLM`. GGUF files hold the projections of all streams in one tensor."""
        stacked = ("model.altup_projections.weight", "model.altup_unembed_projections.weight")
        if name in stacked and len(source.shape) == 3:
            for number in range(source.shape[0]):
                yield name.replace("weight", f"{number}.weight"), source[number]
        else:
            yield from super().experts_apart(name, source, config)

    def create_decoder(
        self, embed_tokens: VocabParallelEmbedding, layers: list[DecoderLayer], embedding_scale: float
    ) -> Decoder:
        """Create a decoder with streams."""
        return Gemma3nDecoder(self.config, self.tp, embed_tokens, layers, self.create_norm(), embedding_scale)

    def create_layer(self, layer: int, rotary: RotaryEmbedding | None) -> DecoderLayer:
        """Layer number ``layer``."""
        text, hidden = self.text, self.config.hidden_size
        act, sparsity = text.act, text.sparsity(layer)
        sizes = (hidden, text.intermediate_size)
        mlp = GatedMLP(*sizes, False, act, self.tp)
        if sparsity > 0.0:
            dtype = getattr(torch, self.config.dtype)
            deviations = torch.tensor(NormalDist().inv_cdf(sparsity), dtype=dtype, device="cpu").item()
            mlp = SparseMLP(*sizes, act, self.tp, deviations)
        return Gemma3nDecoderLayer(self.config, self.create_attention(layer, rotary), mlp, act, self.tp)
