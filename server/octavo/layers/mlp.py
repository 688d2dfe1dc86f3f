"""Feed-forward blocks."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

import octavo_kernels
from octavo.layers.activation import activation, gated_activation
from octavo.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from octavo.layers.lora import RowsTwice
from octavo.layers.parallel import TensorParallel
from octavo_kernels.quant import QuantizedRows


class GatedMLP(nn.Module):
    """``down(act(gate(x)) * up(x))`` (Shazeer, 2020), with gate and up as one product. ``act`` is config.json's name.

    ``fused_weights``: the checkpoint holds gate and up as one tensor. ``fused`` computes the rows that ``down_proj``
    takes in one operation, where there is one (`layers.fusion`).
    """

    fused: Callable[[Tensor], QuantizedRows | RowsTwice] | None = None

    def __init__(
        self, hidden_size: int, inner_size: int, bias: bool, act: str, tp: TensorParallel, fused_weights: bool = False
    ) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, [inner_size, inner_size], bias, tp, fused_weights)
        self.down_proj = RowParallelLinear(inner_size, hidden_size, bias, tp)
        self.act = gated_activation(act)

    def forward(self, x: Tensor) -> Tensor:
        """``x [T, H]``; returns ``[T, H]``."""
        out: Tensor = self.down_proj(self.fused(x) if self.fused else self.act(self.gate_up_proj(x)))
        return out


class SharedMLP(nn.Module):
    """An MLP by the name of those beside experts, in families some of whose models have no experts."""

    def __init__(self, shared_expert: GatedMLP) -> None:
        super().__init__()
        self.shared_expert = shared_expert

    def forward(self, x: Tensor) -> Tensor:
        """``x [T, H]``; returns ``[T, H]``."""
        out: Tensor = self.shared_expert(x)
        return out


class SquaredMLP(nn.Module):
    """``down(relu(up(x)) ** 2)`` (So et al., 2021)."""

    def __init__(self, hidden_size: int, inner_size: int, bias: bool, tp: TensorParallel) -> None:
        super().__init__()
        self.up_proj = ColumnParallelLinear(hidden_size, inner_size, bias, tp)
        self.down_proj = RowParallelLinear(inner_size, hidden_size, bias, tp)

    def forward(self, x: Tensor) -> Tensor:
        """``x [T, H]``; returns ``[T, H]``."""
        up = self.up_proj(x)
        out: Tensor = self.down_proj(octavo_kernels.activate(up, "relu", up=up))
        return out


class MLP(nn.Module):
    """``fc2(act(fc1(x)))``. ``act`` is config.json's name."""

    def __init__(self, hidden_size: int, inner_size: int, bias: bool, act: str, tp: TensorParallel) -> None:
        super().__init__()
        self.fc1 = ColumnParallelLinear(hidden_size, inner_size, bias, tp)
        self.fc2 = RowParallelLinear(inner_size, hidden_size, bias, tp)
        self.act = activation(act)

    def forward(self, x: Tensor) -> Tensor:
        """``x [T, H]``; returns ``[T, H]``."""
        out: Tensor = self.fc2(self.act(self.fc1(x)))
        return out
