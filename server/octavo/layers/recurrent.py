"""Recurrent layers: what stands beside attention in hybrid models, with a state instead of keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol, cast

import torch
from torch import Tensor, nn

import octavo_kernels
from octavo.errors import ModelError
from octavo.interface.state_spec import StateSpec
from octavo.layers.attention import ForwardContext, SelfAttention
from octavo.layers.decoder import DecoderLayer, DeferredHidden
from octavo.layers.linear import ExactLinear, MergedColumnParallelLinear, RowParallelLinear
from octavo.layers.norm import LayerNorm, RMSNorm
from octavo.layers.parallel import TensorParallel
from octavo.layers.quantization.base import LinearBase, Shard
from octavo.layers.weights import WeightSlot, WeightSource
from octavo_kernels import StateMetadata


def tiled_heads(whole: StateSpec) -> Tensor | None:
    """Return the place of each value head in a GGUF file, where the first ones of all key heads come before the second
    ones. None: as they are counted here, those of a key head one after the other."""
    if whole.value_heads == whole.key_heads:
        return None
    return torch.arange(whole.value_heads, device="cpu").view(-1, whole.key_heads).T.flatten()


def _rows_of(heads: Tensor, size: int) -> Tensor:
    return (heads[:, None] * size + torch.arange(size, device="cpu")).flatten()


class QKVZLinear(LinearBase):
    """Queries, keys, values and gates in one product. The checkpoint holds the first three as one tensor."""

    def __init__(self, hidden_size: int, whole: StateSpec, tp: TensorParallel, heads: Tensor | None) -> None:
        """``whole``: with the heads of all ranks. ``heads``: see `tiled_heads`."""
        keys, values = whole.key_heads * whole.key_size, whole.value_heads * whole.value_size
        shards, offset, before = [], 0, 0
        for stored, size in ((2 * keys + values, keys), (2 * keys + values, keys), (2 * keys + values, values)):
            shards.append(_rows(stored, hidden_size, before, size, offset, tp))
            offset, before = offset + size // tp.size, before + size
        shards.append(_rows(values, hidden_size, 0, values, offset, tp))
        if heads is not None:
            order = _rows_of(heads, whole.value_size)
            behind = torch.cat([torch.arange(2 * keys, device="cpu"), 2 * keys + order])
            shards[2:] = [replace(shards[2], order=behind), replace(shards[3], order=order)]
        super().__init__(shards, False, tp)

    def forward(self, x: Tensor) -> Tensor:
        """``x [T, hidden_size]``, whole; returns ``[T, channels + value_heads * value_size]`` of this rank's heads."""
        return self.product(x, self.bias)


def _rows(stored: int, columns: int, before: int, size: int, offset: int, tp: TensorParallel) -> Shard:
    own = size // tp.size
    start = before + tp.rank * own
    return Shard((stored, columns), slice(start, start + own), slice(0, columns), offset)


class CausalConv(nn.Module):
    """The weight of a convolution of each channel with its last inputs, float32 ``[taps, channels]``, and its bias,
    ``[channels]`` or None: this rank's channels."""

    bias: nn.Parameter | None

    def __init__(
        self,
        parts: Sequence[int],
        taps: int,
        tp: TensorParallel,
        order: Tensor | None = None,
        *,
        bias: bool = False,
        is_gguf: bool = False,
    ) -> None:
        """``parts``: channels one after the other, each of which is dealt to all ranks. ``order`` int64: where in the
        checkpoint each channel is (None: in its place)."""
        super().__init__()
        total, places, before = sum(parts), [], 0
        order = torch.arange(total, device="cpu") if order is None else order
        for size in parts:
            own = size // tp.size
            start = before + tp.rank * own
            places.append(order[start : start + own])
            before += size
        self._places = torch.cat(places)
        self._shape = (total, taps) if is_gguf else (total, 1, taps)
        weight = torch.empty(taps, len(self._places), dtype=torch.float32)
        self.weight = nn.Parameter(weight, requires_grad=False)
        own_bias = torch.empty(len(self._places), dtype=torch.float32)
        self.bias = nn.Parameter(own_bias, requires_grad=False) if bias else None

    def weight_slots(self) -> Iterator[WeightSlot]:
        """The weight, which checkpoints hold as ``[channels, 1, taps]``, GGUF files as ``[channels, taps]``, and the
        bias."""
        yield WeightSlot(0, "weight", self._shape, lambda source: self._load(self.weight.T, source))
        if self.bias is not None:
            bias = self.bias
            yield WeightSlot(0, "bias", self._shape[:1], lambda source: self._load(bias, source))

    def _load(self, target: Tensor, source: WeightSource) -> None:
        stored = source.load(torch.float32).cpu()
        target.copy_(stored.view(len(stored), *target.shape[1:])[self._places])


class GatedDeltaNet(nn.Module):
    """The gated delta rule (Yang et al., 2024) as in Qwen3.5, with its projections, convolution, gates and norm.

    ``layer`` is its number among the recurrent layers. The states of a step are `ForwardContext.states`.
    """

    def __init__(
        self, hidden_size: int, layer: int, whole: StateSpec, eps: float, tp: TensorParallel, is_gguf: bool = False
    ) -> None:
        """``whole``: with the heads of all ranks. ``is_gguf``: the checkpoint holds value heads in `tiled_heads` order
        and rates of decay instead of their logarithms."""
        super().__init__()
        if whole.key_heads % tp.size:
            raise ModelError(
                f"config.json: linear_num_key_heads ({whole.key_heads}) cannot be divided among {tp.size} ranks; give "
                "another --tensor-parallel-size"
            )
        self.layer, self.eps = layer, eps
        self.channels = whole.channels // tp.size
        heads = whole.value_heads // tp.size
        self._heads = slice(tp.rank * heads, (tp.rank + 1) * heads)
        self._tp, self._is_gguf, stored = tp, is_gguf, tiled_heads(whole) if is_gguf else None
        self._stored = torch.arange(whole.value_heads, device="cpu") if stored is None else stored
        self.in_proj_qkvz = QKVZLinear(hidden_size, whole, tp, stored)
        self.in_proj_b = ExactLinear(hidden_size, whole.value_heads, False, tp)
        self.in_proj_a = ExactLinear(hidden_size, whole.value_heads, False, tp)
        for projection in (self.in_proj_b, self.in_proj_a):
            projection.shards = [replace(shard, order=stored) for shard in projection.shards]
        keys, values = whole.key_heads * whole.key_size, whole.value_heads * whole.value_size
        order = None
        if stored is not None:
            order = torch.cat([torch.arange(2 * keys, device="cpu"), 2 * keys + _rows_of(stored, whole.value_size)])
        self.conv1d = CausalConv((keys, keys, values), whole.taps, tp, order, is_gguf=is_gguf)
        self.rate = nn.Parameter(torch.empty(heads, dtype=torch.float32), requires_grad=False)  # -exp(A_log)
        self.dt_bias = nn.Parameter(torch.empty(heads, dtype=torch.float32), requires_grad=False)
        self.norm = RMSNorm(whole.value_size, eps, offset=0.0)  # only its weight, in float32
        self.out_proj = RowParallelLinear(whole.value_heads * whole.value_size, hidden_size, False, tp)
        self._inner = whole.value_heads * whole.value_size
        # A few kilobytes, not among the weights that are counted: quantised blocks of a file span heads, so its columns
        # stay where they are, and what is multiplied with them is brought there.
        self.columns: Tensor | None = None
        if stored is not None:
            own = slice(tp.rank * heads * whole.value_size, (tp.rank + 1) * heads * whole.value_size)
            places = _rows_of(stored.argsort(), whole.value_size)[own]
            self.columns = torch.tensor(places.tolist(), dtype=torch.int32)

    def forward(self, x: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """Read the states for ``x [T, hidden_size]``: float32 ``[T, value_heads * value_size]``, and the projections
        that `finish` takes beside it."""
        qkvz, state = self.in_proj_qkvz(x), ctx.states[self.layer]
        metadata = cast(StateMetadata, ctx.state_metadata)
        b, a = (projection(x)[:, self._heads] for projection in (self.in_proj_b, self.in_proj_a))
        mixed = octavo_kernels.causal_conv(qkvz[:, : self.channels], self.conv1d.weight, None, state, metadata)
        return octavo_kernels.gated_delta_rule(mixed, a, b, self.rate, self.dt_bias, state, metadata), qkvz

    @property
    def input_proj(self) -> None:
        """See `Mixer`."""
        return None

    def finish(self, core: Tensor, qkvz: Tensor) -> Tensor:
        """``[R, hidden_size]`` from any R rows of what `forward` returned."""
        normed = octavo_kernels.gated_norm(
            core, qkvz[:, self.channels :], self.norm.weight, self.eps, len(self.norm.weight)
        )
        if self.columns is not None:
            normed = octavo_kernels.take_columns(self._tp.all_gather(normed, self._inner), self.columns)
        out: Tensor = self.out_proj(normed)
        return out

    def weight_slots(self) -> Iterator[WeightSlot]:
        """The constants of each head."""
        shape = (len(self._stored),)
        yield WeightSlot(0, "rate" if self._is_gguf else "A_log", shape, self._load_rate)
        yield WeightSlot(0, "dt_bias", shape, lambda source: self._load_heads(self.dt_bias, source))

    def _load_rate(self, source: WeightSource) -> None:
        self._load_heads(self.rate, source)
        if not self._is_gguf:
            self.rate.exp_().neg_()

    def _load_heads(self, target: Tensor, source: WeightSource) -> None:
        target.copy_(source.load(torch.float32).cpu()[self._stored][self._heads])


class ShortConv(nn.Module):
    """The short convolution of LFM2 with its projections: ``out_proj(c * conv(b * x))`` of the thirds of ``in_proj``.

    ``layer`` is its number among the recurrent layers. The states of a step are `ForwardContext.states`.
    """

    def __init__(
        self, hidden_size: int, layer: int, taps: int, bias: bool, tp: TensorParallel, is_gguf: bool = False
    ) -> None:
        super().__init__()
        self.layer = layer
        self.in_proj = MergedColumnParallelLinear(hidden_size, [hidden_size] * 3, bias, tp, fused=True)
        self.conv = CausalConv((hidden_size,), taps, tp, bias=bias, is_gguf=is_gguf)
        self.out_proj = RowParallelLinear(hidden_size, hidden_size, bias, tp)

    def forward(self, x: Tensor, ctx: ForwardContext) -> tuple[Tensor]:
        """Read the states for ``x [T, hidden_size]``: ``[T, hidden_size]``, this rank's channels."""
        metadata = cast(StateMetadata, ctx.state_metadata)
        state, conv = ctx.states[self.layer], self.conv
        return (octavo_kernels.gated_conv(self.in_proj(x), conv.weight, conv.bias, state, metadata),)

    @property
    def input_proj(self) -> LinearBase:
        """See `Mixer`."""
        return self.in_proj

    def finish(self, mixed: Tensor) -> Tensor:
        """``[R, hidden_size]`` from any R rows of what `forward` returned."""
        out: Tensor = self.out_proj(mixed)
        return out


class Mixer(Protocol):
    """The part of a recurrent layer that stands in the place of attention, in two halves: see `DecoderLayer`."""

    @property
    def input_proj(self) -> LinearBase | None:
        """The one product of the layer's input; None: there are several."""

    def forward(self, x: Tensor, ctx: ForwardContext) -> tuple[Tensor, ...]:
        """Read and write the states for ``x [T, hidden_size]``."""

    def finish(self, *deferred: Tensor) -> Tensor:
        """``[R, hidden_size]`` from any R rows of what `forward` returned."""


class RecurrentDecoderLayer(DecoderLayer):
    """A recurrent layer and an MLP, with a norm before each, as `PreNormDecoderLayer` has attention and an MLP.

    ``name``: the mixer's in checkpoints. What is added to the residual is multiplied by ``residual_scale``.
    """

    def __init__(
        self,
        input_layernorm: RMSNorm | LayerNorm,
        mixer: nn.Module,
        post_attention_layernorm: RMSNorm | LayerNorm,
        mlp: nn.Module,
        *,
        name: str = "linear_attn",
        residual_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.input_layernorm = input_layernorm
        self.add_module(name, mixer)
        self.post_attention_layernorm, self.mlp = post_attention_layernorm, mlp
        self._name, self._residual_scale = name, residual_scale

    @property
    def mixer(self) -> Mixer:
        """The part in the place of attention."""
        return cast(Mixer, getattr(self, self._name))

    @property
    def input_projs(self) -> list[LinearBase]:
        """The products of the layer's input, if it goes through nothing else."""
        return [] if self.mixer.input_proj is None else [self.mixer.input_proj]

    def attend(self, x: Tensor, residual: Tensor | None, positions: Tensor, ctx: ForwardContext) -> DeferredHidden:
        """See `DecoderLayer`."""
        x, residual = self.input_layernorm(x, residual)
        return *self.mixer.forward(x, ctx), cast(Tensor, residual)

    def finish(self, *deferred: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `DecoderLayer`."""
        *mixed, residual = deferred
        x, residual = self.post_attention_layernorm(self._scaled(self.mixer.finish(*mixed)), residual)
        return self._scaled(self.mlp(x)), residual

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self._residual_scale == 1.0 else octavo_kernels.scale(x, self._residual_scale)


class ParallelMixerDecoderLayer(RecurrentDecoderLayer):
    """The same with attention beside the mixer: both read the layer's input by one norm, and their sum goes on."""

    def __init__(
        self,
        input_layernorm: RMSNorm | LayerNorm,
        self_attn: SelfAttention,
        mixer: nn.Module,
        post_attention_layernorm: RMSNorm | LayerNorm,
        mlp: nn.Module,
        *,
        name: str,
    ) -> None:
        super().__init__(input_layernorm, mixer, post_attention_layernorm, mlp, name=name)
        self.self_attn = self_attn

    @property
    def input_projs(self) -> list[LinearBase]:
        """See `RecurrentDecoderLayer`."""
        return [*super().input_projs, *self.self_attn.input_projs]

    def attend(self, x: Tensor, residual: Tensor | None, positions: Tensor, ctx: ForwardContext) -> DeferredHidden:
        """See `DecoderLayer`."""
        x, residual = self.input_layernorm(x, residual)
        return self.self_attn(x, positions, ctx), *self.mixer.forward(x, ctx), cast(Tensor, residual)

    def finish(self, *deferred: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `DecoderLayer`."""
        attended, *mixed, residual = deferred
        total = octavo_kernels.add(self.self_attn.o_proj(attended), self.mixer.finish(*mixed))
        x, residual = self.post_attention_layernorm(total, residual)
        return self.mlp(x), residual
