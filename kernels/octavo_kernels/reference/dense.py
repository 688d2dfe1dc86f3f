"""Linears with packed weights of 16 or 32 bits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from octavo_kernels.dense import DenseWeight, unpack_dense
from octavo_kernels.reference.elementwise import embedding


def dense_linear(
    x: Tensor, weight: DenseWeight, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """See `octavo_kernels.dense_linear`."""
    out = functional.linear(x.float(), unpack_dense(weight), None if bias is None else bias.float())
    return out.to(out_dtype or x.dtype)


def dense_embedding(ids: Tensor, weight: DenseWeight, dtype: torch.dtype, first: int | None = None) -> Tensor:
    """See `octavo_kernels.dense_embedding`."""
    return embedding(ids, unpack_dense(weight), first).to(dtype)
