"""Weights as floating-point matrices in the dtype of the activations."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import octavo_kernels
from octavo.layers.quantization.base import ExpertsBase, LinearBase, LinearMethod, MoEMethod, QuantizationConfig, Shard
from octavo.layers.quantization.experts import UnquantizedMoEMethod
from octavo.layers.weights import WeightSlot, fill_tensor


class UnquantizedLinearMethod(LinearMethod):
    """``layer.weight [output_size, input_size]`` and ``layer.bias``, as parameters."""

    def create_weights(self, layer: LinearBase, dtype: torch.dtype) -> None:
        """See `LinearMethod`."""
        weight = torch.empty(layer.output_size, layer.input_size, dtype=dtype)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        if layer.has_bias:
            layer.bias = nn.Parameter(torch.empty(layer.output_size, dtype=dtype), requires_grad=False)

    def weight_slots(self, layer: LinearBase, part: int, shard: Shard) -> Iterator[WeightSlot]:
        """See `LinearMethod`."""
        end = shard.offset + shard.num_rows
        weight, bias = layer.weight[shard.offset : end], layer.bias
        yield WeightSlot(part, "weight", shard.shape, lambda s: fill_tensor(weight, s, shard.rows, shard.columns))
        if bias is not None:
            rows = bias[shard.offset : end]
            yield WeightSlot(part, "bias", shard.shape[:1], lambda s: fill_tensor(rows, s, shard.rows))

    def apply(self, layer: LinearBase, x: Tensor, bias: Tensor | None) -> Tensor:
        """See `LinearMethod`."""
        return octavo_kernels.linear(x, layer.weight, bias)


class UnquantizedConfig(QuantizationConfig):
    """Choose the same method for every layer."""

    name = "none"

    def linear_method(self, name: str, layer: LinearBase) -> LinearMethod:
        """See `QuantizationConfig`."""
        return UnquantizedLinearMethod()

    def moe_method(self, name: str, layer: ExpertsBase) -> MoEMethod:
        """See `QuantizationConfig`."""
        return UnquantizedMoEMethod()
