"""The interface between linear layers and the ways to store their weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor, nn

from octavo.errors import ConfigError
from octavo.layers.lora import LayerAdapters, RowsTwice
from octavo.layers.parallel import TensorParallel
from octavo.layers.weights import WeightSlot


def kind_of(tensor: Tensor) -> str:
    """The name of a tensor's dtype: "bfloat16"."""
    return str(tensor.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Shard:
    """One checkpoint weight ``[rows, columns]`` within a layer: this rank takes ``rows x columns`` of it, as rows
    ``offset ...`` of the layer's own weight.

    ``order`` int64 [rows]: row i is the stored tensor's row ``order[i]`` (None: its row i). Several shards may take
    rows of one tensor. What is stored is multiplied by ``factor``, biases by ``bias_factor``."""

    shape: tuple[int, int]
    rows: slice
    columns: slice
    offset: int
    order: Tensor | None = None
    factor: float = 1.0
    bias_factor: float = 1.0

    @property
    def num_rows(self) -> int:
        """Rows of this rank."""
        count: int = self.rows.stop - self.rows.start
        return count

    @property
    def has_whole_rows(self) -> bool:
        """True if this rank takes all columns."""
        return self.columns == slice(0, self.shape[1])


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
        # The type of each part's weight in the checkpoint ("BF16", "Q4_1"; None: unknown), set before `create_weights`.
        self.stored_types: list[str | None] = [None] * len(shards)
        # True if its kernels take weights with one scale for each row.
        self.takes_row_scales = True
        # True if it has many rows in every step, as an encoder's: arithmetic decides its speed, not memory.
        self.has_many_rows = False
        self.adapters: LayerAdapters | None = None  # that rows may have
        self.register_parameter("bias", None)

    def create_weights(self, method: LinearMethod, dtype: torch.dtype) -> None:
        """Let ``method`` hold the weights, see `LinearMethod.create_weights`."""
        self.method = method
        method.create_weights(self, dtype)

    def product(self, x: Tensor | RowsTwice, bias: Tensor | None) -> Tensor:
        """`LinearMethod.apply`, and what the rows' adapters add."""
        rows, plain = x if isinstance(x, RowsTwice) else (x, x)
        y = self.method.apply(self, rows, bias)  # type: ignore[arg-type]  # that one takes what its fused norm makes
        if self.adapters is not None and self.adapters.are_in_use:
            self.adapters.add_(y, plain)
        return y

    def weight_slots(self) -> Iterator[WeightSlot]:
        """The slots of every part of the layer, see `LinearMethod.weight_slots`."""
        for part, shard in enumerate(self.shards):
            for slot in self.method.weight_slots(self, part, shard):
                factor = shard.bias_factor if slot.leaf == "bias" else shard.factor
                slot = slot if factor == 1.0 else slot.multiplied(factor)
                yield slot if shard.order is None else slot.reordered(shard.order)

    def multiply_parts(self, *factors: tuple[float, float]) -> None:
        """Have the weight and the bias of each part multiplied as they are read: before there are weights."""
        self.shards = [
            replace(shard, factor=factor, bias_factor=of_bias)
            for shard, (factor, of_bias) in zip(self.shards, factors, strict=True)
        ]

    def extra_repr(self) -> str:
        """The layer's description in `repr`."""
        return f"{self.input_size} -> {self.output_size}, bias={self.has_bias}"


class LinearMethod(ABC):
    """One way to hold and apply a linear layer's weights. Called in the order of the functions here."""

    @abstractmethod
    def create_weights(self, layer: LinearBase, dtype: torch.dtype) -> None:
        """Register empty parameters on ``layer``, on the current default device; ``dtype`` is that of activations."""

    @abstractmethod
    def weight_slots(self, layer: LinearBase, part: int, shard: Shard) -> Iterator[WeightSlot]:
        """The checkpoint tensors that part ``part`` of the layer is filled from.

        A slot is handed the tensor's `WeightSource`, not its values: a method may take the stored bytes
        (``source.raw_pieces()`` of a GGUF tensor, ``source.qtype`` says which type) where it can compute on them.
        """

    def process_weights_after_loading(self, layer: LinearBase) -> None:
        """Repack what was loaded, once every slot is filled; what is kept is a parameter or a buffer of ``layer``."""
        return None

    def weight_kinds(self, layer: LinearBase) -> list[tuple[Tensor, str]]:
        """Every tensor that ``layer`` holds and how its numbers are stored ("int4"), for the memory ledger. A method
        whose tensors are bytes of another format says of which."""
        return [(tensor, kind_of(tensor)) for tensor in chain(layer.parameters(), layer.buffers())]

    @abstractmethod
    def apply(self, layer: LinearBase, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x [T, input_size]`` times the layer's weight: ``[T, output_size]`` in x.dtype."""

    def warm_up(self, layer: LinearBase, max_rows: int) -> None:
        """Run `apply` for so many rows, up to ``max_rows``, that every kernel which it may launch is compiled."""
        return None


@dataclass(frozen=True)
class ExpertSettings:
    """The function of a layer's experts, see `octavo_kernels.Experts`; sizes are those of all ranks together. Ups of
    experts that are not ``gated`` stand for gates too: with "relu" these are squared rectifiers."""

    num_experts: int
    hidden_size: int
    inner_size: int
    activation: str = "silu"
    bias: bool = False
    limit: float = 7.0
    weighs_input: bool = False
    gated: bool = True


class ExpertsBase(nn.Module):
    """The experts of a layer. Their weights come with `create_weights`, once it is known how they are stored.

    The checkpoint's tensors are called ``E.gate_proj.weight``, ``E.up_proj.weight`` and ``E.down_proj.weight`` of
    expert number E, whether it holds them one by one or all in one (`octavo.layers.weights.experts_apart`).
    """

    method: MoEMethod

    def __init__(self, settings: ExpertSettings, tp: TensorParallel) -> None:
        super().__init__()
        self.settings, self.tp = settings, tp
        self.projections = (*(["gate_proj"] if settings.gated else []), "up_proj", "down_proj")
        self.numbers = tp.experts(settings.num_experts)  # of which this rank has `columns` of the inner size
        self.columns = slice(0, settings.inner_size)
        if not tp.expert_parallel:
            size = tp.divide(settings.inner_size, "the experts' inner size")
            self.columns = slice(tp.rank * size, (tp.rank + 1) * size)
        self.stands_for = 1  # experts that each of ``numbers`` stands for, where memory is measured alone
        # The types of each expert's weights in the checkpoint, by projection, set before `create_weights`.
        self.stored_types: list[dict[str, str | None]] = [
            dict.fromkeys(self.projections) for _ in range(settings.num_experts)
        ]

    def create_weights(self, method: MoEMethod, dtype: torch.dtype) -> None:
        """Let ``method`` hold the weights, see `MoEMethod.create_weights`."""
        self.method = method
        method.create_weights(self, dtype)

    def weight_slots(self) -> Iterator[WeightSlot]:
        """See `MoEMethod.weight_slots`."""
        return self.method.weight_slots(self)

    @property
    def inner_size(self) -> int:
        """The inner size of an expert on this rank."""
        size: int = self.columns.stop - self.columns.start
        return size

    @property
    def first(self) -> int:
        """The number from which chosen experts are counted: this rank's first, but where rows go to other replicas."""
        return self.numbers.start if self.tp.replicas is None else 0

    @property
    def adds_bias(self) -> bool:
        """True if this rank adds the biases of results: only one rank does if experts are split among ranks."""
        return self.tp.rank == 0 or self.tp.expert_parallel

    def forward(
        self, x: Tensor, ids: Tensor, weights: Tensor, shared: Tensor | None = None, gate: Tensor | None = None
    ) -> Tensor:
        """See `octavo_kernels.fused_moe`; the sum of all ranks' parts. ``ids`` are counted from `first`."""
        replicas = self.tp.replicas
        if replicas is not None:
            part = self.method.apply(self, *replicas.gather(x, ids, weights, self.numbers.start), None, None)
            return replicas.sum(part, x, shared, gate)
        part = self.method.apply(self, x, ids, weights, shared, gate)
        return self.tp.all_reduce(part, x.dtype)


class MoEMethod(ABC):
    """One way to hold and apply the weights of experts. Called in the order of the functions here."""

    @abstractmethod
    def create_weights(self, layer: ExpertsBase, dtype: torch.dtype) -> None:
        """Register empty parameters, or linear layers, on ``layer``; ``dtype`` is that of activations."""

    def weight_slots(self, layer: ExpertsBase) -> Iterator[WeightSlot]:
        """The checkpoint tensors that the layer is filled from, but for those of linear layers within it."""
        return iter(())

    def extra_bytes(self, layer: ExpertsBase) -> int:
        """The bytes that the loaded layer takes beside its linear layers, for the memory ledger."""
        return 0

    def process_weights_after_loading(self, layer: ExpertsBase) -> None:
        """Repack what was loaded, once every slot is filled and linear layers have seen to theirs."""
        return None

    @abstractmethod
    def apply(
        self, layer: ExpertsBase, x: Tensor, ids: Tensor, weights: Tensor, shared: Tensor | None, gate: Tensor | None
    ) -> Tensor:
        """See `octavo_kernels.fused_moe`; this rank's part of the sum, in `TensorParallel.part_dtype`."""

    def weight_kinds(self, layer: ExpertsBase) -> list[tuple[Tensor, str]]:
        """See `LinearMethod.weight_kinds`; of linear layers within ``layer``, these say."""
        held = chain(layer.parameters(recurse=False), layer.buffers(recurse=False))
        return [(tensor, kind_of(tensor)) for tensor in held]

    def row_counts(self, layer: ExpertsBase, k: int) -> list[int]:
        """Numbers of rows for which `apply`, of ``k`` experts a row, launches every kernel that it may launch."""
        return []


class QuantizationConfig(ABC):
    """A choice of methods for a whole model."""

    name: str

    def moe_method(self, name: str, layer: ExpertsBase) -> MoEMethod:
        """The method of the experts at module path ``name`` ("model.layers.0.mlp.experts"). Raises ConfigError where
        there is none."""
        raise ConfigError(f"experts cannot be held as {self.name} on this device; use --quantization none, or a CPU")

    @abstractmethod
    def linear_method(self, name: str, layer: LinearBase) -> LinearMethod:
        """The method of the layer at module path ``name`` ("model.layers.0.mlp.down_proj", "lm_head")."""
