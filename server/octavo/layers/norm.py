"""Normalisation of rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import octavo_kernels
from octavo.layers.lora import RowsTwice
from octavo.layers.weights import WeightSlot, WeightSource, copy_slot, fill_tensor
from octavo_kernels.quant import QuantizedRows


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension (Zhang and Sennrich, 2019).

    ``offset`` None: the weight is in the model's dtype and applied to the rounded row. A number: checkpoints store the
    weight less this; it is kept in float32 and applied before the row is rounded (Gemma, whose weights are around 0).
    """

    def __init__(self, size: int, eps: float, offset: float | None = None) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.activation_terms = 0  # not 0: return rows quantised to so many terms (`layers.fusion`)
        self.keeps_rows = False  # return both, for adapters
        dtype = torch.get_default_dtype() if offset is None else torch.float32
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor | QuantizedRows | RowsTwice, Tensor]:
        """The norm of ``residual + x`` (of ``x`` without one), ``[T, size]``, and that sum, the new residual."""
        if self.activation_terms:
            plain = torch.empty_like(x, memory_format=torch.contiguous_format) if self.keeps_rows else None
            rows, total = octavo_kernels.rms_norm_quantize(
                x, self.weight, self.eps, residual, self.activation_terms, plain
            )
            return rows if plain is None else RowsTwice(rows, plain), total
        if residual is None:
            return octavo_kernels.rms_norm(x, self.weight, self.eps), x
        return octavo_kernels.fused_add_rms_norm(x, residual, self.weight, self.eps)

    def weight_slots(self) -> Iterator[WeightSlot]:
        """The weight."""
        yield WeightSlot(0, "weight", tuple(self.weight.shape), self._load)

    def _load(self, source: WeightSource) -> None:
        fill_tensor(self.weight, source)
        if self.offset:
            self.weight.add_(self.offset)


class UnitNorm(RMSNorm):
    """An RMS norm without a weight of its own: it is 1."""

    def __init__(self, size: int, eps: float, offset: float | None = None) -> None:
        super().__init__(size, eps, offset)
        self.weight.fill_(1.0)

    def weight_slots(self) -> Iterator[WeightSlot]:
        """None."""
        return iter(())


class LayerNorm(nn.Module):
    """Layer norm (Ba et al., 2016) with weight and bias, without the ``bias``, or plain when ``affine`` is False."""

    def __init__(self, size: int, eps: float = 1e-5, affine: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False) if affine else None
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False) if affine and bias else None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `RMSNorm.forward`."""
        return octavo_kernels.layer_norm(x, self.weight, self.bias, self.eps, residual)

    def weight_slots(self) -> Iterator[WeightSlot]:
        """The weight and the bias, as they are stored."""
        for leaf, param in self.named_parameters():
            yield copy_slot(leaf, param)
