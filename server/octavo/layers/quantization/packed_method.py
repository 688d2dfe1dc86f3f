"""Operations of the CPU's own kernels beyond a `LinearMethod`, for any storage of weights; embeddings and heads use
them."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from octavo.layers.quantization.base import LinearMethod
from octavo_kernels.dense import DenseWeight
from octavo_kernels.quant import PackedLinear


class PackedMethod(LinearMethod):
    """A row's result depends on that row alone, bit for bit, for any number of rows; steps can be recorded."""

    @abstractmethod
    def keeps_values(self, qtype: str) -> bool:
        """True if `embed` returns the values that a table of its own would have, for a tensor stored as ``qtype``."""

    @property
    @abstractmethod
    def held(self) -> DenseWeight | PackedLinear:
        """The weight of a loaded layer."""

    @abstractmethod
    def embed(self, ids: Tensor, dtype: torch.dtype, first: int | None = None) -> Tensor:
        """Rows ``ids`` int64 ``[T]`` of the weight: ``[T, input_size]`` in ``dtype``; ``first`` as in
        `octavo_kernels.embedding`."""
