"""The weights of experts as GPUs take them: one after the other in one weight, as codes or as values."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

import octavo_kernels
from octavo.layers.quantization.base import ExpertsBase, LinearBase
from octavo.layers.quantization.experts import PackedMoEMethod
from octavo.layers.quantization.gpu_weights import GPUWeightMethod, Piece, are_alike, joined_groups
from octavo_kernels import GroupWeight, ScaledWeight, StackedWeight
from octavo_kernels.scaled_weight import BLOCK


class StackedMoEMethod(PackedMoEMethod):
    """Each expert is read as linear layers are, in all formats of these; then they become one weight.

    Codes stay codes where those of all experts are alike and fill whole tiles; else the layer is kept as values.
    """

    _dtype = torch.bfloat16

    def create_weights(self, layer: ExpertsBase, dtype: torch.dtype) -> None:
        """See `MoEMethod`."""
        super().create_weights(layer, dtype)
        self._dtype = dtype
        for linear in _linears(layer):
            if isinstance(linear.method, GPUWeightMethod):
                linear.method.is_expert = True

    def extra_bytes(self, layer: ExpertsBase) -> int:
        """See `MoEMethod`: biases become float32."""
        biases = [linear.bias for linear in _linears(layer) if linear.bias is not None]
        return sum(bias.numel() * (4 - bias.element_size()) for bias in biases)

    def process_weights_after_loading(self, layer: ExpertsBase) -> None:
        """See `MoEMethod`."""
        names = [str(number) for number in layer.numbers]
        linears = [layer.get_submodule(name).layers() for name in names]  # type: ignore[operator]
        biases: tuple[Tensor | None, Tensor | None] = (None, None)
        if layer.settings.bias:
            gate_up_bias = torch.stack([torch.cat([gate.bias, up.bias]) for gate, up, _ in linears])
            biases = gate_up_bias.float(), torch.stack([down.bias for *_, down in linears]).float()
        gate_up = stacked([part for gate, up, _ in linears for part in (gate, up)], len(linears), self._dtype)
        down = stacked([expert[2] for expert in linears], len(linears), self._dtype)
        for name in names:
            delattr(layer, name)
        for name, held in (("w13", gate_up), ("w2", down), ("w13_bias", biases[0]), ("w2_bias", biases[1])):
            tensors = held.tensors if isinstance(held, StackedWeight) else {"": held}
            for leaf, tensor in tensors.items():
                layer.register_buffer(f"{name}_{leaf}".rstrip("_"), tensor, persistent=False)
        self.hold(layer, gate_up, down, *biases)

    def weight_kinds(self, layer: ExpertsBase) -> list[tuple[Tensor, str]]:
        """See `MoEMethod`."""
        kinds: dict[int, str] = {}
        for held in (self.held.gate_up, self.held.down) if self.held else ():
            if isinstance(held, StackedWeight) and isinstance(held.weight, GroupWeight):
                kinds |= {id(tensor): held.weight.form for tensor in held.tensors.values()}
        return [(tensor, kinds.get(id(tensor), kind)) for tensor, kind in super().weight_kinds(layer)]


def _linears(layer: ExpertsBase) -> list[LinearBase]:
    return [linear for linear in layer.modules() if isinstance(linear, LinearBase)]


def stacked(linears: Sequence[LinearBase], experts: int, dtype: torch.dtype) -> StackedWeight | Tensor:
    """The weights of ``linears``, as many of each expert, one after the other; values [experts, N, K] in ``dtype``."""
    pieces = [piece for linear in linears for piece in _pieces(linear)]
    scaled = [piece for piece in pieces if isinstance(piece, ScaledWeight)]
    if len(scaled) == len(pieces) and len({(piece.values.dtype, piece.blocks) for piece in scaled}) == 1:
        values, scales = torch.cat([p.values for p in scaled]), torch.cat([p.scales for p in scaled], dim=1)
        return StackedWeight(ScaledWeight(values, scales), experts)
    groups = [piece for piece in pieces if isinstance(piece, GroupWeight) and piece.order is None]
    if len(groups) == len(pieces) and all(are_alike(a, b) for a, b in pairwise(groups)):
        return StackedWeight(joined_groups(groups), experts)
    return torch.cat([_values(piece, dtype) for piece in pieces]).view(experts, -1, linears[0].input_size)


def _pieces(linear: LinearBase) -> list[Piece]:
    return linear.method.weights if isinstance(linear.method, GPUWeightMethod) else [linear.weight]


def _values(piece: Piece, dtype: torch.dtype) -> Tensor:
    if isinstance(piece, GroupWeight):
        return octavo_kernels.group_dequantize(piece, dtype)
    if isinstance(piece, ScaledWeight):
        scales = piece.scales if piece.blocks == 1 else piece.scales.repeat_interleave(BLOCK, dim=0)
        return (piece.values.float() * scales[: piece.values.shape[1]].t()).to(dtype)
    return piece.to(dtype)
