"""Mamba 2's mixer: a state space with its projections, convolution, gates and norm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

import octavo_kernels
from octavo.errors import ModelError
from octavo.interface.state_spec import StateSpec
from octavo.layers.attention import ForwardContext
from octavo.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from octavo.layers.parallel import TensorParallel
from octavo.layers.quantization.base import LinearBase
from octavo.layers.recurrent import CausalConv
from octavo.layers.weights import WeightSlot, WeightSource
from octavo_kernels import StateMetadata


@dataclass(frozen=True)
class MixerSettings:
    """Differences between families. ``limits``: of steps of time; ``gates_first``: before the norm, whose weights are
    one a column, for each group of heads apart; ``is_gguf``: the checkpoint holds rates of decay instead of their
    logarithms."""

    eps: float
    limits: tuple[float, float]
    conv_bias: bool = True
    proj_bias: bool = False
    out_bias: bool = False
    has_norm: bool = True
    gates_first: bool = True
    is_gguf: bool = False


class GroupNormWeight(nn.Module):
    """The weight of a norm, one number a column, float32; ``groups``: the rows in which a GGUF file holds it."""

    def __init__(self, size: int, tp: TensorParallel, groups: int | None) -> None:
        super().__init__()
        own = size // tp.size
        self._own = slice(tp.rank * own, (tp.rank + 1) * own)
        self._shape = (size,) if groups is None else (groups, size // groups)
        self.weight = nn.Parameter(torch.empty(own, dtype=torch.float32), requires_grad=False)

    def weight_slots(self) -> Iterator[WeightSlot]:
        """The weight."""
        yield WeightSlot(0, "weight", self._shape, self._load)

    def _load(self, source: WeightSource) -> None:
        self.weight.copy_(source.load(torch.float32).flatten()[self._own])


class Mamba2Mixer(nn.Module):
    """The mixer of Mamba 2 (Dao and Gu, 2024). ``layer`` is its number among the recurrent layers; the states of a step
    are `ForwardContext.states`."""

    def __init__(
        self, hidden_size: int, layer: int, whole: StateSpec, settings: MixerSettings, tp: TensorParallel
    ) -> None:
        """``whole``: with the heads of all ranks."""
        super().__init__()
        if whole.key_heads % tp.size:
            raise ModelError(
                f"config.json: the groups of Mamba 2's heads ({whole.key_heads}) cannot be divided among {tp.size} "
                "ranks; give another --tensor-parallel-size"
            )
        self.layer, self.settings = layer, settings
        heads, keys = whole.value_heads, whole.key_heads * whole.key_size
        inner = heads * whole.value_size
        self._inner, self._channels = inner // tp.size, whole.channels // tp.size
        self._group = inner // whole.key_heads
        own = heads // tp.size
        self._heads, self._shape = slice(tp.rank * own, (tp.rank + 1) * own), (heads,)
        parts = [inner, inner, keys, keys, heads]
        self.in_proj = MergedColumnParallelLinear(hidden_size, parts, settings.proj_bias, tp, fused=True)
        conv_bias, is_gguf = settings.conv_bias, settings.is_gguf
        self.conv1d = CausalConv((inner, keys, keys), whole.taps, tp, bias=conv_bias, is_gguf=is_gguf)
        self.rate, self.dt_bias, self.skip = (
            nn.Parameter(torch.empty(own, dtype=torch.float32), requires_grad=False) for _ in range(3)
        )  # -exp(A_log), dt_bias, D
        self.norm = GroupNormWeight(inner, tp, whole.key_heads if is_gguf else None) if settings.has_norm else None
        self.out_proj = RowParallelLinear(inner, hidden_size, settings.out_bias, tp)

    def forward(self, x: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """Read the states for ``x [T, hidden_size]``: float32 ``[T, inner]``, and the projections that `finish` takes
        beside it."""
        projected, state, conv = self.in_proj(x), ctx.states[self.layer], self.conv1d
        metadata, end = cast(StateMetadata, ctx.state_metadata), self._inner + self._channels
        mixed = octavo_kernels.causal_conv(projected[:, self._inner : end], conv.weight, conv.bias, state, metadata)
        constants, limits = (self.rate, self.dt_bias, self.skip), self.settings.limits
        return octavo_kernels.state_space_scan(
            mixed, projected[:, end:], *constants, limits, state, metadata
        ), projected

    @property
    def input_proj(self) -> LinearBase:
        """See `Mixer`."""
        return self.in_proj

    def finish(self, core: Tensor, projected: Tensor) -> Tensor:
        """``[R, hidden_size]`` from any R rows of what `forward` returned."""
        weight, settings = None if self.norm is None else self.norm.weight, self.settings
        gates = projected[:, : self._inner]
        normed = octavo_kernels.gated_norm(core, gates, weight, settings.eps, self._group, settings.gates_first)
        out: Tensor = self.out_proj(normed)
        return out

    def weight_slots(self) -> Iterator[WeightSlot]:
        """The constants of each head; GGUF files hold two of them as columns."""
        is_gguf = self.settings.is_gguf
        column = (*self._shape, 1) if is_gguf else self._shape
        yield WeightSlot(0, "rate" if is_gguf else "A_log", column, self._load_rate)
        yield WeightSlot(0, "D", column, lambda source: self._load(self.skip, source))
        yield WeightSlot(0, "dt_bias", self._shape, lambda source: self._load(self.dt_bias, source))

    def _load_rate(self, source: WeightSource) -> None:
        self._load(self.rate, source)
        if not self.settings.is_gguf:
            self.rate.exp_().neg_()

    def _load(self, target: Tensor, source: WeightSource) -> None:
        target.copy_(source.load(torch.float32).flatten()[self._heads])
