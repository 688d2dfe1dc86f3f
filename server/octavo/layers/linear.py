"""Tensor-parallel linear layers; several of a checkpoint's tensors may be merged into one weight.

The partitioning is Megatron-LM's (Shoeybi et al., 2019): column-parallel layers hold rows of the weight (outputs),
row-parallel ones hold columns (inputs) and sum their results over the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.errors import ModelError
from octavo.layers.parallel import TensorParallel
from octavo.layers.quantization.base import LinearBase, LinearMethod, Shard
from octavo.layers.quantization.dense import DenseLinearMethod
from octavo.layers.quantization.quantized_rows import QuantizedRowsMethod


class MergedColumnParallelLinear(LinearBase):
    """Several column-parallel weights in one product; the result has this rank's part of each, one after the other.

    ``fused``: the checkpoint holds them as one tensor, in that order.
    """

    def __init__(
        self, input_size: int, output_sizes: list[int], bias: bool, tp: TensorParallel, fused: bool = False
    ) -> None:
        shards, offset, before = [], 0, 0
        for total in output_sizes:
            size = tp.divide(total, "the layer's output size")
            stored, first = (sum(output_sizes), before) if fused else (total, 0)
            shards.append(_rows(stored, input_size, first + tp.rank * size, size, offset))
            offset, before = offset + size, before + total
        super().__init__(shards, bias, tp)

    def forward(self, x: Tensor) -> Tensor:
        """``x [T, input_size]``, whole; returns ``[T, output_size of this rank]``."""
        return self.product(x, self.bias)


class ColumnParallelLinear(MergedColumnParallelLinear):
    """One weight whose outputs are spread over the ranks."""

    def __init__(self, input_size: int, output_size: int, bias: bool, tp: TensorParallel) -> None:
        super().__init__(input_size, [output_size], bias, tp)


@dataclass(frozen=True)
class QKVRows:
    """The storage of queries, keys and values in a checkpoint.

    ``fused``: as one tensor (the checkpoint's module then stands for all three in ``packed_modules_mapping``): queries,
    keys, values or, ``by_group``, for each key/value head the queries that share it, its key and its value.
    ``interleaved``: so many leading elements of each query and key are rotated in pairs of neighbours; they are brought
    into the kernels' order, halves paired, which changes no score.
    """

    fused: bool = False
    by_group: bool = False
    interleaved: int = 0
    gated: bool = False  # the queries of each head are followed by as many gates, which `QueryGateLinear` takes

    def orders(self, head_size: int, num_heads: int, num_kv_heads: int) -> list[Tensor | None]:
        """The row orders of queries, keys and values (of the fused tensor, three times): see `Shard`."""
        if self.gated:
            return [gated_order(head_size, num_heads), None, None]
        counts = (num_heads, num_kv_heads, num_kv_heads)
        heads = torch.arange(sum(counts), device="cpu")
        if self.by_group:
            groups = heads.view(num_kv_heads, -1)
            heads = torch.cat([groups[:, :-2].flatten(), groups[:, -2], groups[:, -1]])
        plain = torch.arange(head_size, device="cpu")
        turned = torch.cat([plain[: self.interleaved].view(-1, 2).T.flatten(), plain[self.interleaved :]])
        parts = [
            (part[:, None] * head_size + within).flatten()
            for part, within in zip(heads.split(counts), (turned, turned, plain), strict=True)
        ]
        if self.fused:
            return [torch.cat(parts) if self.by_group or self.interleaved else None] * 3
        queries, keys, _ = parts
        return [queries, keys - len(queries), None] if self.interleaved else [None] * 3


class QKVParallelLinear(LinearBase):
    """Query, key and value projections in one product: ``[T, (Hq + 2 Hkv) D]`` with this rank's heads.

    With fewer key/value heads than ranks, each of those heads is held by several ranks. ``rows``: see `QKVRows`.
    """

    def __init__(
        self,
        hidden_size: int,
        head_size: int,
        num_heads: int,
        num_kv_heads: int,
        bias: bool,
        tp: TensorParallel,
        rows: QKVRows = QKVRows(),
    ) -> None:
        if num_heads % num_kv_heads:
            raise ModelError(
                f"config.json: num_key_value_heads ({num_kv_heads}) does not divide num_attention_heads ({num_heads})"
            )
        q_size = tp.divide(num_heads, "num_attention_heads") * head_size
        copies = max(1, tp.size // num_kv_heads)
        kv_size = num_kv_heads * copies // tp.size * head_size
        if num_kv_heads * copies % tp.size:
            tp.divide(num_kv_heads, "num_key_value_heads")
        kv_start = tp.rank // copies * kv_size
        q_total, kv_total = num_heads * head_size, num_kv_heads * head_size
        sizes, firsts = [q_total, kv_total, kv_total], [0, 0, 0]
        if rows.fused:
            sizes, firsts = [q_total + 2 * kv_total] * 3, [0, q_total, q_total + kv_total]
        elif rows.gated:
            sizes[0] = 2 * q_total
        q_order, k_order, v_order = rows.orders(head_size, num_heads, num_kv_heads)
        shards = [
            _rows(sizes[0], hidden_size, firsts[0] + tp.rank * q_size, q_size, 0, q_order),
            _rows(sizes[1], hidden_size, firsts[1] + kv_start, kv_size, q_size, k_order),
            _rows(sizes[2], hidden_size, firsts[2] + kv_start, kv_size, q_size + kv_size, v_order),
        ]
        super().__init__(shards, bias, tp)
        self.num_heads, self.num_kv_heads = q_size // head_size, kv_size // head_size

    def forward(self, x: Tensor) -> Tensor:
        """``x [T, hidden_size]``, whole; returns see above."""
        return self.product(x, self.bias)


def gated_order(head_size: int, num_heads: int) -> Tensor:
    """The rows of a weight that holds queries and gates of each head in turns: all queries, then all gates."""
    return torch.arange(2 * num_heads * head_size, device="cpu").view(num_heads, 2, head_size).transpose(0, 1).flatten()


class QueryGateLinear(LinearBase):
    """The gates that a checkpoint holds with the queries (`QKVRows.gated`): ``[T, Hq D]`` of this rank's heads."""

    def __init__(self, hidden_size: int, head_size: int, num_heads: int, bias: bool, tp: TensorParallel) -> None:
        total, size = num_heads * head_size, tp.divide(num_heads, "num_attention_heads") * head_size
        order = gated_order(head_size, num_heads)
        super().__init__([_rows(2 * total, hidden_size, total + tp.rank * size, size, 0, order)], bias, tp)

    def forward(self, x: Tensor) -> Tensor:
        """``x [T, hidden_size]``, whole; returns see above."""
        return self.product(x, self.bias)


class RowParallelLinear(LinearBase):
    """A weight whose inputs are spread over the ranks, as a column-parallel layer leaves them; the result is whole.

    Where activations are rounded to integers, parts of a sum would be rounded otherwise than the whole of it. Then the
    ranks gather inputs, have some of the outputs each, and gather these: in the very bits of one rank.
    """

    def __init__(self, input_size: int, output_size: int, bias: bool, tp: TensorParallel) -> None:
        size = tp.divide(input_size, "the layer's input size")
        columns = slice(tp.rank * size, (tp.rank + 1) * size)
        self.gathers = False
        super().__init__([Shard((output_size, input_size), slice(0, output_size), columns, 0)], bias, tp)

    def create_weights(self, method: LinearMethod, dtype: torch.dtype) -> None:
        """See `LinearBase`."""
        self.dtype = dtype
        (shard,) = self.shards
        outputs, inputs = shard.shape
        if self.tp.size > 1 and isinstance(method, QuantizedRowsMethod):
            self.gathers = True
            self.shards = [replace(shard, rows=slice(*self.tp.shares(outputs)), columns=slice(0, inputs))]
            self.input_size, self.output_size = inputs, self.shards[0].num_rows
        elif self.tp.size > 1 and isinstance(method, DenseLinearMethod):
            method.out_dtype = torch.float32  # as `TensorParallel.part_dtype` has it: rounded once, after the sum
        super().create_weights(method, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """``x [T, input_size of this rank]``; returns ``[T, output_size]``, the same on every rank."""
        if self.gathers:
            outputs, inputs = self.shards[0].shape
            return self.tp.all_gather(self.product(self.tp.all_gather(x, inputs), self.bias), outputs)
        # The bias is added by one rank, or the sum would hold it several times.
        return self.tp.all_reduce(self.product(x, self.bias if self.tp.rank == 0 else None), self.dtype)


class ReplicatedLinear(LinearBase):
    """A weight that every rank holds whole."""

    def __init__(self, input_size: int, output_size: int, bias: bool, tp: TensorParallel) -> None:
        super().__init__([_rows(output_size, input_size, 0, output_size, 0)], bias, tp)

    def forward(self, x: Tensor) -> Tensor:
        """``x [T, input_size]``; returns ``[T, output_size]``."""
        return self.product(x, self.bias)


class ExactLinear(ReplicatedLinear):
    """A weight that decides something: in the numbers that the checkpoint has, whatever the others are held in, with a
    result in float32 (in the model's dtype on other devices than a CPU)."""


def _rows(total: int, columns: int, start: int, size: int, offset: int, order: Tensor | None = None) -> Shard:
    return Shard((total, columns), slice(start, start + size), slice(0, columns), offset, order)
