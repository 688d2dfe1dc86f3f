"""Weights of 16 or 32 bits on a CPU, in the order in which the C kernels read them (see octavo_kernels.dense)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

import octavo_kernels
from octavo.interface.engine_config import ModelConfig
from octavo.layers.quantization.base import ExpertsBase, LinearBase, MoEMethod, QuantizationConfig, Shard
from octavo.layers.quantization.experts import PackedMoEMethod
from octavo.layers.quantization.packed_method import PackedMethod
from octavo.layers.weights import WeightSlot, WeightSource, fill_tensor
from octavo_kernels.dense import DenseWeight, empty_dense
from octavo_kernels.packing import fill_dense

FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def has_kernels() -> bool:
    """True if the CPU's backend is that of the C kernels."""
    from octavo_kernels import cpu

    return octavo_kernels.backend_name(torch.device("cpu")) == "cpu" and cpu.unavailable_reason() is None


def has_dense_kernels(device: torch.device | str, dtype: torch.dtype) -> bool:
    """True if these take activations of ``dtype`` and weights of 16 and 32 bits on ``device``."""
    return torch.device(device).type == "cpu" and dtype in (torch.float32, torch.bfloat16) and has_kernels()


@dataclass(frozen=True)
class WeightTypes:
    """The dtype of a tensor in memory: its own unless ``dtype`` is shorter. ``rounds_float16``: float16 becomes
    bfloat16, too, which is as long and has three bits less. Tensors stored in other types are held in ``dtype``."""

    dtype: torch.dtype
    rounds_float16: bool

    @classmethod
    def of(cls, config: ModelConfig) -> WeightTypes:
        """Types by the model's configuration: that of activations, unless --dtype asks for another."""
        asked = config.dtype_is_asked
        return cls(getattr(torch, (config.weight_dtype if asked else None) or config.dtype), asked)

    def held(self, qtype: str | None) -> torch.dtype:
        """The dtype of a tensor that is stored as ``qtype`` (None: that is not known)."""
        stored = FLOAT_TYPES.get(qtype or "", self.dtype)
        if stored.itemsize > self.dtype.itemsize or (
            self.dtype == torch.bfloat16 and stored == torch.float16 and self.rounds_float16
        ):
            return self.dtype
        return stored


class DenseLinearMethod(PackedMethod):
    """One layer's weight as a `DenseWeight`, each part in the 16 or 32 bits that ``types`` has it held in.

    Results are in ``out_dtype`` (None: the activations').
    """

    def __init__(self, types: WeightTypes, out_dtype: torch.dtype | None = None) -> None:
        self.types, self.out_dtype = types, out_dtype
        self.weight: DenseWeight | None = None

    def create_weights(self, layer: LinearBase, dtype: torch.dtype) -> None:
        """See `LinearMethod`."""
        counts = [shard.num_rows for shard in layer.shards]
        counts[-1] += layer.output_size - sum(counts)  # rows of a vocabulary without a token
        dtypes = [self.types.held(qtype) for qtype in layer.stored_types]
        self.weight = empty_dense(counts, layer.input_size, dtypes)
        for number, part in enumerate(self.weight.parts):
            layer.register_buffer(f"packed_{number}", part.data, persistent=False)
        if layer.has_bias:
            # What the kernels add: a bias converted while a step is recorded would be gone when it is replayed.
            layer.bias = nn.Parameter(torch.empty(layer.output_size, dtype=torch.float32), requires_grad=False)

    def weight_slots(self, layer: LinearBase, part: int, shard: Shard) -> Iterator[WeightSlot]:
        """See `LinearMethod`."""
        dtype = self.types.held(layer.stored_types[part])
        yield WeightSlot(part, "weight", shard.shape, partial(self._load, shard, dtype))
        if layer.bias is not None:
            rows = layer.bias[shard.offset : shard.offset + shard.num_rows]
            yield WeightSlot(part, "bias", shard.shape[:1], lambda source: fill_tensor(rows, source, shard.rows))

    def _load(self, shard: Shard, dtype: torch.dtype, source: WeightSource) -> None:
        self.fill(shard, (rows[:, shard.columns] for rows in source.pieces(dtype, shard.rows)))

    def fill(self, shard: Shard, pieces: Iterable[Tensor]) -> None:
        """Take the rows of one part, in the dtype that it is held in, some at a time and in order."""
        assert self.weight is not None
        first = shard.offset
        for rows in pieces:
            fill_dense(self.weight, first, rows)
            first += len(rows)

    def apply(self, layer: LinearBase, x: Tensor, bias: Tensor | None) -> Tensor:
        """See `LinearMethod`."""
        assert self.weight is not None
        return octavo_kernels.dense_linear(x, self.weight, bias, self.out_dtype)

    def keeps_values(self, qtype: str) -> bool:
        """See `PackedMethod`: a table of its own would be rounded in the same way, or more."""
        return True

    @property
    def held(self) -> DenseWeight:
        """See `PackedMethod`."""
        assert self.weight is not None
        return self.weight

    def embed(self, ids: Tensor, dtype: torch.dtype, first: int | None = None) -> Tensor:
        """See `PackedMethod`."""
        assert self.weight is not None
        return octavo_kernels.dense_embedding(ids, self.weight, dtype, first)


class DenseConfig(QuantizationConfig):
    """Every layer in the 16 or 32 bits of its tensors; logits in float32."""

    name = "none"

    def __init__(self, types: WeightTypes) -> None:
        self._types = types

    def linear_method(self, name: str, layer: LinearBase) -> DenseLinearMethod:
        """See `QuantizationConfig`."""
        return DenseLinearMethod(self._types, torch.float32 if name.endswith("lm_head") else None)

    def moe_method(self, name: str, layer: ExpertsBase) -> MoEMethod:
        """See `QuantizationConfig`."""
        return PackedMoEMethod(self, name)
