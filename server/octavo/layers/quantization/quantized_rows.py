"""Operations of the CPU's integer kernels beyond a `PackedMethod`; `layers.fusion` and the head look for them."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from octavo.layers.quantization.base import LinearBase
from octavo.layers.quantization.packed_method import PackedMethod
from octavo_kernels.quant import QuantizedRows


class QuantizedRowsMethod(PackedMethod):
    """A method that computes on activations in int8: ``apply`` takes `octavo_kernels.QuantizedRows`, too."""

    # int8 numbers for each activation: rows of so many terms, or `octavo_kernels.quant.BY_ROW`, are taken.
    activation_terms: int
    # The order in which `apply` wants its columns, int32 [K]; None: the model's own. Only then rows that something else
    # has quantised are taken.
    column_order: Tensor | None = None

    @abstractmethod
    def apply_gated(self, layer: LinearBase, x: Tensor | QuantizedRows, terms: int) -> QuantizedRows:
        """`apply` of a layer of gates and ups, then ``silu(gate) * up``: rows of ``terms`` int8 a number."""

    @abstractmethod
    def find_best(self, x: Tensor, wants_logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """`apply` of a head and the best of each row of ``x [R, H]``; None where this is no head.

        Returns the logits float32 ``[R, vocab]``, undefined if ``wants_logits`` int64 ``[1]`` is 0 when they are
        computed, the lowest index of a largest element int64 ``[R]``, that element float32 ``[R]``, and the largest of
        each 32 or more, see `octavo_kernels.cpu.Best`.
        """
