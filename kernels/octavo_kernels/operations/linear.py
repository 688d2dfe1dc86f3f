"""Products with plain and packed weights, and embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels.dense import DenseWeight
from octavo_kernels.dispatch import backend_for
from octavo_kernels.group_weight import GroupWeight
from octavo_kernels.scaled_weight import ScaledWeight


def embedding(ids: Tensor, weight: Tensor, first: int | None = None) -> Tensor:
    """Rows ``ids`` int64 [T] of a table ``weight [rows, H]``: ``[T, H]``.

    ``first``: the table holds those of ids from that one on, and rows of ids that it does not hold are 0 (None: it
    holds all of them)."""
    return backend_for(weight).embedding(ids, weight, first)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x [T, K] @ weight [N, K]^T (+ bias [N])``, all in one floating-point dtype. Returns ``[T, N]``."""
    return backend_for(x).linear(x, weight, bias)


def dense_linear(
    x: Tensor, weight: DenseWeight, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """``x [T, K]`` (float32 or bfloat16) times a packed weight ``[N, K]`` plus ``bias [N]``: ``[T, N]``, in x.dtype or
    ``out_dtype``.

    Products are exact in float32 and added up in float32. The result of a row does not depend on T. Raises ValueError
    if widths do not match.
    """
    return backend_for(x).dense_linear(x, weight, bias, out_dtype)


def dense_embedding(ids: Tensor, weight: DenseWeight, dtype: torch.dtype, first: int | None = None) -> Tensor:
    """Rows ``ids`` int64 [T] of a packed table of 16 or 32 bits: ``[T, K]`` in ``dtype``; ``first`` as in
    `embedding`."""
    return backend_for(ids).dense_embedding(ids, weight, dtype, first)


def group_linear(x: Tensor, weight: GroupWeight, bias: Tensor | None = None) -> Tensor:
    """``x [T, K]`` times a weight ``[N, K]`` in groups plus ``bias [N]``: ``[T, N]`` in x.dtype, sums in float32."""
    return backend_for(x).group_linear(x, weight, bias)


def group_dequantize(weight: GroupWeight, dtype: torch.dtype) -> Tensor:
    """The weight ``[N, K]`` in ``dtype``: each element computed in float32, then rounded."""
    return backend_for(weight.codes).group_dequantize(weight, dtype)


def group_row_counts(weight: GroupWeight) -> list[int]:
    """Numbers of rows which, together, have `group_linear` launch every kernel that it has for this weight."""
    return backend_for(weight.codes).group_row_counts(weight)


def quantize_tokens(x: Tensor, dtype: torch.dtype, blocks: int = 1) -> tuple[Tensor, Tensor]:
    """Rows ``x [T, K]`` as int8 or float8_e4m3fn ``[T, K]``, and their scales float32 ``[T, blocks]``.

    One scale for a row, or with several ``blocks`` one for each of its blocks of 128 columns. A row, or block, with NaN
    has an infinite scale.
    """
    return backend_for(x).quantize_tokens(x, dtype, blocks)


def scaled_linear(x: Tensor, weight: ScaledWeight, bias: Tensor | None = None) -> Tensor:
    """`quantize_tokens` of ``x [T, K]``, then their product with an 8-bit weight ``[N, K]``: ``[T, N]`` in x.dtype."""
    return backend_for(x).scaled_linear(x, weight, bias)


def scaled_row_counts(weight: ScaledWeight) -> list[int]:
    """Numbers of rows which, together, have `scaled_linear` launch every kernel that it has for this weight."""
    return backend_for(weight.values).scaled_row_counts(weight)
