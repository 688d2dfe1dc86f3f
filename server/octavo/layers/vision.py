"""Parts of vision towers: plain modules in the model's dtype, never quantised, whole on every rank.

A tower runs on one image at a time, so that its result for an image depends on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

import octavo_kernels
from octavo.errors import ModelError
from octavo.layers.quantization.dense import has_dense_kernels
from octavo.layers.weights import WeightSlot, WeightSource, copy_slot
from octavo_kernels.dense import DenseWeight, empty_dense
from octavo_kernels.packing import fill_dense

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: octavo_kernels.activate(x, "gelu"),
    "gelu_pytorch_tanh": lambda x: octavo_kernels.activate(x, "gelu_tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": lambda x: octavo_kernels.activate(x, "silu"),
    "relu": lambda x: octavo_kernels.activate(x, "relu"),
}


def tower_activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function that config.json calls ``name``. Raises ModelError for an unknown one."""
    if name not in _ACTIVATIONS:
        raise ModelError(f"vision_config asks for activation {name!r}; known are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


class Weights(nn.Module):
    """Parameters that a checkpoint stores just as they are used."""

    def weight_slots(self) -> Iterator[WeightSlot]:
        """One for each parameter of its own."""
        for leaf, parameter in self.named_parameters(recurse=False):
            yield copy_slot(leaf, parameter)


def parameter(*shape: int) -> nn.Parameter:
    """One that is not trained, in the default dtype."""
    return nn.Parameter(torch.empty(shape), requires_grad=False)


class TowerLinear(Weights):
    """``x W^T + b``. On a CPU its weight is packed as the kernels read it; a row's result depends on that row alone."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__()
        dtype, device = torch.get_default_dtype(), torch.get_default_device()
        self.shape, self.packed = (outputs, inputs), None
        if device.type == "meta" or has_dense_kernels(device, dtype):
            self.packed = empty_dense([outputs], inputs, [dtype])
            self.weight = nn.Parameter(self.packed.parts[0].data, requires_grad=False)
        else:
            self.weight = parameter(outputs, inputs)
        self.bias = parameter(outputs) if bias else None

    def weight_slots(self) -> Iterator[WeightSlot]:
        """See `Weights`."""
        for slot in super().weight_slots():
            yield WeightSlot(0, "weight", self.shape, self._pack) if self.packed and slot.leaf == "weight" else slot

    def _pack(self, source: WeightSource) -> None:
        assert self.packed is not None
        first = 0
        for rows in source.pieces(self.packed.parts[0].data.dtype, slice(0, self.shape[0])):
            fill_dense(self.packed, first, rows)
            first += len(rows)

    def forward(self, x: Tensor) -> Tensor:
        """``x [T, inputs]``; returns ``[T, outputs]``."""
        if self.packed is not None:
            return octavo_kernels.dense_linear(x, self.packed, self.bias)
        return octavo_kernels.linear(x, self.weight, self.bias)


def side_by_side(x: Tensor, *linears: TowerLinear) -> Tensor:
    """Apply all layers to ``x [T, inputs]``; one tensor ``[T, sum of outputs]``. All have a bias, or none has."""
    packed = [linear.packed for linear in linears if linear.packed is not None]
    if len(packed) < len(linears):
        return torch.cat([linear(x) for linear in linears], dim=-1)
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    weight = DenseWeight(tuple(part for one in packed for part in one.parts), packed[0].width)
    return octavo_kernels.dense_linear(x, weight, torch.cat(biases) if biases else None)


class Table(Weights):
    """Rows that are looked up: positions, most often."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = parameter(rows, width)

    def forward(self, index: Tensor) -> Tensor:
        """``index`` int64 ``[T]``; returns ``[T, width]``."""
        return self.weight[index]


class TowerNorm(Weights):
    """Layer norm over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = parameter(size), parameter(size), eps

    def forward(self, x: Tensor) -> Tensor:
        """``x [T, size]``."""
        return octavo_kernels.layer_norm(x, self.weight, self.bias, self.eps)[0]

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of the sum of both, and the sum."""
        return octavo_kernels.layer_norm(x, self.weight, self.bias, self.eps, residual)


class TowerRMSNorm(Weights):
    """Root-mean-square norm over the last dimension; ``offset`` is what checkpoints leave out of the weight."""

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight, self.eps, self.offset = parameter(size), eps, offset

    def forward(self, x: Tensor) -> Tensor:
        """``x [T, size]``, in float32 before it is rounded."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.offset:
            return (wide * (self.offset + self.weight.float())).to(x.dtype)
        return self.weight * wide.to(x.dtype)


class PatchEmbedding(Weights):
    """A convolution whose steps are as long as its kernel is wide."""

    def __init__(self, channels: int, width: int, patch: int, bias: bool) -> None:
        super().__init__()
        self.patch = patch
        self.weight = parameter(width, channels, patch, patch)
        self.bias = parameter(width) if bias else None

    def forward(self, pixels: Tensor) -> Tensor:
        """``pixels [N, C, H, W]``; returns ``[N, patches, width]``, row by row."""
        patches = functional.unfold(pixels, self.patch, stride=self.patch).transpose(1, 2)
        number, count, size = patches.shape
        flat = patches.reshape(number * count, size).to(self.weight.dtype)
        return octavo_kernels.linear(flat, self.weight.flatten(1), self.bias).view(number, count, -1)


class TowerAttention(nn.Module):
    """Attention of whole sequences, to both sides. ``names``: of the projections in the checkpoint."""

    def __init__(self, width: int, heads: int, bias: bool = True) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.q_proj, self.k_proj, self.v_proj = (TowerLinear(width, width, bias) for _ in range(3))
        self.out_proj = TowerLinear(width, width, bias)

    def forward(self, x: Tensor, starts: Tensor, turn: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """``x [T, width]``, sequences from ``starts`` int32 ``[S + 1]`` on; ``turn``: of queries and keys
        ``[T, heads, size]``."""
        qkv = side_by_side(x, self.q_proj, self.k_proj, self.v_proj)
        if turn is not None:
            q, k, v = qkv.chunk(3, dim=-1)
            q, k = (turn(part.view(len(x), self.heads, self.size)).flatten(1) for part in (q, k))
            qkv = torch.cat((q, k, v), dim=-1)
        out: Tensor = self.out_proj(attend(qkv, starts, self.heads))
        return out


def attend(qkv: Tensor, starts: Tensor, heads: int) -> Tensor:
    """Attend within each sequence of ``qkv [T, 3 width]``: ``[T, width]``."""
    size = qkv.shape[1] // 3 // heads
    return octavo_kernels.varlen_attention(qkv, starts, starts.diff(), heads, heads, size, size**-0.5)


class TowerMLP(nn.Module):
    """``fc2(act(fc1(x)))``."""

    def __init__(self, width: int, inner: int, act: str) -> None:
        super().__init__()
        self.fc1, self.fc2, self.act = TowerLinear(width, inner), TowerLinear(inner, width), tower_activation(act)

    def forward(self, x: Tensor) -> Tensor:
        """``x [T, width]``."""
        out: Tensor = self.fc2(self.act(self.fc1(x)))
        return out


class TowerGatedMLP(nn.Module):
    """``down_proj(act(gate_proj(x)) * up_proj(x))``, without biases."""

    def __init__(self, width: int, inner: int, act: str) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = TowerLinear(width, inner, bias=False), TowerLinear(width, inner, bias=False)
        self.down_proj, self.act = TowerLinear(inner, width, bias=False), tower_activation(act)

    def forward(self, x: Tensor) -> Tensor:
        """``x [T, width]``."""
        out: Tensor = self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
        return out


def equal_starts(count: int, length: int, device: torch.device) -> Tensor:
    """int32 ``[count + 1]``: where ``count`` sequences of ``length`` rows begin."""
    return torch.arange(count + 1, dtype=torch.int32, device=device) * length
