"""What the CPU's integer kernels can do beyond a `LinearMethod`; `layers.fusion` and the head look for it."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from octavo.layers.quantization.base import LinearBase, LinearMethod
from octavo_kernels.quant import QuantizedRows


class QuantizedRowsMethod(LinearMethod):
    """A method that computes on activations in int8: ``apply`` takes `octavo_kernels.QuantizedRows`, too.

    A row's result depends on that row alone, bit for bit, for any number of rows.
    """

    # int8 numbers for each activation: rows of so many terms are taken.
    activation_terms: int
    # The order in which `apply` wants its columns, int64 [K]; None: the model's own. Only then rows that something else
    # has quantised are taken.
    column_order: Tensor | None = None

    @abstractmethod
    def apply_gated(self, layer: LinearBase, x: Tensor | QuantizedRows, terms: int) -> QuantizedRows:
        """`apply` of a layer of gates and ups, then ``silu(gate) * up``: rows of ``terms`` int8 a number."""

    @abstractmethod
    def find_best(self, x: Tensor, wants_logits: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """`apply` of a head and the best of each row of ``x [R, H]``; None where this is no head.

        Returns the logits float32 ``[R, vocab]``, undefined if ``wants_logits`` int64 ``[1]`` is 0 when they are
        computed, the lowest index of a largest element int64 ``[R]``, and that element float32 ``[R]``.
        """

    @abstractmethod
    def keeps_values(self, qtype: str) -> bool:
        """Whether `embed` gives the very values of a tensor that is stored as ``qtype``."""

    @abstractmethod
    def embed(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows ``ids`` int64 ``[T]`` of the weight: ``[T, input_size]`` in ``dtype``."""
