"""The interface between linear layers and the ways to store their weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import octavo_kernels
from octavo.layers.parallel import TensorParallel
from octavo.layers.weights import WeightSlot
from octavo_kernels.quant import QuantizedRows


@dataclass(frozen=True)
class Shard:
    """One checkpoint weight ``[rows, columns]`` within a layer: this rank takes ``rows x columns`` of it, as rows
    ``offset ...`` of the layer's own weight."""

    shape: tuple[int, int]
    rows: slice
    columns: slice
    offset: int

    @property
    def num_rows(self) -> int:
        return self.rows.stop - self.rows.start


class LinearBase(nn.Module):
    """``y = x W^T + b``. Its weights come with `create_weights`, once it is known how they are stored."""

    method: LinearMethod
    weight: Tensor  # [output_size, input_size] of an unquantised layer
    bias: Tensor | None

    def __init__(self, shards: list[Shard], bias: bool, tp: TensorParallel) -> None:
        super().__init__()
        self.shards, self.has_bias, self.tp = shards, bias, tp
        self.input_size = shards[0].columns.stop - shards[0].columns.start  # of this rank
        self.output_size = sum(shard.num_rows for shard in shards)  # of this rank
        self.register_parameter("bias", None)

    def create_weights(self, method: LinearMethod, dtype: torch.dtype) -> None:
        self.method = method
        method.create_weights(self, dtype)

    def weight_slots(self) -> Iterator[WeightSlot]:
        for part, shard in enumerate(self.shards):
            yield from self.method.weight_slots(self, part, shard)

    def extra_repr(self) -> str:
        return f"{self.input_size} -> {self.output_size}, bias={self.has_bias}"


class LinearMethod(ABC):
    """One way to hold and apply a linear layer's weights. Called in the order of the functions here."""

    # Rows of ``x`` must come in multiples of this for a row's result, on a CPU, not to depend on how many there are.
    row_multiple = 1
    # `apply` takes `octavo_kernels.QuantizedRows` of so many terms too, so that the kernel before it can quantise as it
    # writes; 0: tensors only.
    terms = 0
    quantized = False

    @abstractmethod
    def create_weights(self, layer: LinearBase, dtype: torch.dtype) -> None:
        """Register empty parameters on ``layer``, on the current default device; ``dtype`` is that of activations."""

    @abstractmethod
    def weight_slots(self, layer: LinearBase, part: int, shard: Shard) -> Iterator[WeightSlot]:
        """The checkpoint tensors that part ``part`` of the layer is filled from.

        A slot is handed the tensor's `WeightSource`, not its values: a method may take the stored bytes
        (``source.raw()`` of a GGUF tensor, ``source.qtype`` says which type) where it can compute on them.
        """

    def process_weights_after_loading(self, layer: LinearBase) -> None:
        """Repack what was loaded, once every slot is filled."""
        return None

    def num_bytes(self) -> int:
        """Of weights that are not parameters of the layer."""
        return 0

    def keeps_values(self, qtype: str) -> bool:
        """Whether `embed` gives the very values of a tensor that is stored as ``qtype``."""
        return False

    def embed(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows ``ids`` int64 [T] of the weight: ``[T, input_size]`` in ``dtype``."""
        raise NotImplementedError

    @abstractmethod
    def apply(self, layer: LinearBase, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x [T, input_size]`` times the layer's weight: ``[T, output_size]`` in x.dtype."""

    def find_best(self, x: Tensor, wants_logits: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Of a head: `apply`, undefined if ``wants_logits`` int64 [1] is 0 when it is computed, and of each row the
        lowest index of a largest element, int64 [R], with that element. None: the method has no way of its own.
        """
        return None

    def apply_gated(self, layer: LinearBase, x: Tensor, terms: int) -> QuantizedRows:
        """`apply` of a layer of gates and ups, then ``silu(gate) * up`` in rows of ``terms`` int8."""
        return octavo_kernels.silu_and_mul_quantize(self.apply(layer, x, layer.bias), terms)


class QuantizationConfig(ABC):
    """A choice of methods for a whole model."""

    name: str

    @abstractmethod
    def linear_method(self, name: str, layer: LinearBase) -> LinearMethod:
        """The method of the layer at module path ``name`` ("model.layers.0.mlp.down_proj", "lm_head")."""
