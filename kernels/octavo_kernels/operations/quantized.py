"""Weights in groups of 32 with int8 activations, see `octavo_kernels.quant` for packing and accuracy."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels.dispatch import backend_for
from octavo_kernels.quant import PackedLinear, QuantizedRows


def quantize_rows(x: Tensor, terms: int = 1) -> QuantizedRows:
    """Rows ``x [T, K]`` as int8 in groups of 32 with a scale each; with two ``terms`` as 15-bit numbers; with
    `octavo_kernels.quant.BY_ROW` instead of terms as 8 to 16 bits with one scale a row."""
    return backend_for(x).quantize_rows(x, terms)


def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, terms: int = 1, plain: Tensor | None = None
) -> tuple[QuantizedRows, Tensor]:
    """`rms_norm` or, with ``residual``, `fused_add_rms_norm`, then `quantize_rows`, in one pass.

    Returns the rows and the new residual (``x`` itself without one). They are bit-equal to the separate steps, except
    for second ``terms``: only groups with a value of at least a third of the row's largest have them. The error of 8
    bits grows with a group's largest value, so nearly all of it is in these few, and the others cost no arithmetic.
    ``plain``, like x and contiguous, is filled with the rows as they are.
    """
    return backend_for(x).rms_norm_quantize(x, weight, eps, residual, terms, plain)


def silu_and_mul_quantize(x: Tensor, terms: int = 1, plain: Tensor | None = None) -> QuantizedRows:
    """`silu_and_mul`, then `quantize_rows`, in one pass; bit-equal to the separate steps. ``plain``, contiguous, is
    filled with the rows as they are."""
    return backend_for(x).silu_and_mul_quantize(x, terms, plain)


def quantized_linear(x: Tensor | QuantizedRows, packed: PackedLinear, bias: Tensor | None = None) -> Tensor:
    """``x [T, K]`` times a packed weight ``[N, K]`` plus ``bias [N]``: ``[T, N]`` in x.dtype (float32 or bfloat16), or
    in float32 if the weight has a margin.

    The result of a row does not depend on T. Raises ValueError if widths or terms do not match.
    """
    return backend_for(x.pairs if isinstance(x, QuantizedRows) else x).quantized_linear(x, packed, bias)


def gated_linear_quantize(x: QuantizedRows, packed: PackedLinear, terms: int = 1) -> QuantizedRows:
    """`silu_and_mul_quantize` of `quantized_linear` with gates and ups ``[2 I, K]``, bit-equal to the separate steps.

    Returns rows of I values. Raises ValueError if widths or terms do not match.
    """
    return backend_for(x.pairs).gated_linear_quantize(x, packed, terms)


def quantized_embedding(ids: Tensor, packed: PackedLinear, dtype: torch.dtype, first: int | None = None) -> Tensor:
    """Rows ``ids`` int64 [T] of a packed table, dequantised: ``[T, K]`` in ``dtype``; ``first`` as in `embedding`."""
    return backend_for(ids).quantized_embedding(ids, packed, dtype, first)
