"""Tensor-parallel linear layers; several of a checkpoint's tensors may be merged into one weight.

The partitioning is Megatron-LM's (Shoeybi et al., 2019): column-parallel layers hold rows of the weight (outputs),
row-parallel ones hold columns (inputs) and sum their results over the ranks.
"""

from __future__ import annotations

from torch import Tensor

from octavo.errors import ModelError
from octavo.layers.parallel import TensorParallel
from octavo.layers.quantization.base import LinearBase, Shard


class MergedColumnParallelLinear(LinearBase):
    """Several column-parallel weights in one product; the result has this rank's part of each, one after the other."""

    def __init__(self, input_size: int, output_sizes: list[int], bias: bool, tp: TensorParallel) -> None:
        shards, offset = [], 0
        for total in output_sizes:
            size = tp.divide(total, "the layer's output size")
            shards.append(_rows(total, input_size, tp.rank * size, size, offset))
            offset += size
        super().__init__(shards, bias, tp)

    def forward(self, x: Tensor) -> Tensor:
        """``x [T, input_size]``, whole; returns ``[T, output_size of this rank]``."""
        return self.method.apply(self, x, self.bias)


class ColumnParallelLinear(MergedColumnParallelLinear):
    """One weight whose outputs are spread over the ranks."""

    def __init__(self, input_size: int, output_size: int, bias: bool, tp: TensorParallel) -> None:
        super().__init__(input_size, [output_size], bias, tp)


class QKVParallelLinear(LinearBase):
    """Query, key and value projections in one product: ``[T, (Hq + 2 Hkv) D]`` with this rank's heads.

    With fewer key/value heads than ranks, each of those heads is held by several ranks.
    """

    def __init__(
        self, hidden_size: int, head_size: int, num_heads: int, num_kv_heads: int, bias: bool, tp: TensorParallel
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
        shards = [
            _rows(q_total, hidden_size, tp.rank * q_size, q_size, 0),
            _rows(kv_total, hidden_size, kv_start, kv_size, q_size),
            _rows(kv_total, hidden_size, kv_start, kv_size, q_size + kv_size),
        ]
        super().__init__(shards, bias, tp)
        self.num_heads, self.num_kv_heads = q_size // head_size, kv_size // head_size

    def forward(self, x: Tensor) -> Tensor:
        """``x [T, hidden_size]``, whole; returns see above."""
        return self.method.apply(self, x, self.bias)


class RowParallelLinear(LinearBase):
    """A weight whose inputs are spread over the ranks, as a column-parallel layer leaves them; the result is whole."""

    def __init__(self, input_size: int, output_size: int, bias: bool, tp: TensorParallel) -> None:
        size = tp.divide(input_size, "the layer's input size")
        columns = slice(tp.rank * size, (tp.rank + 1) * size)
        super().__init__([Shard((output_size, input_size), slice(0, output_size), columns, 0)], bias, tp)

    def forward(self, x: Tensor) -> Tensor:
        """``x [T, input_size of this rank]``; returns ``[T, output_size]``, the same on every rank."""
        # The bias is added by one rank, or the sum would hold it several times.
        return self.tp.all_reduce(self.method.apply(self, x, self.bias if self.tp.rank == 0 else None))


class ReplicatedLinear(LinearBase):
    """A weight that every rank holds whole."""

    def __init__(self, input_size: int, output_size: int, bias: bool, tp: TensorParallel) -> None:
        super().__init__([_rows(output_size, input_size, 0, output_size, 0)], bias, tp)

    def forward(self, x: Tensor) -> Tensor:
        """``x [T, input_size]``; returns ``[T, output_size]``."""
        return self.method.apply(self, x, self.bias)


def _rows(total: int, columns: int, start: int, size: int, offset: int) -> Shard:
    return Shard((total, columns), slice(start, start + size), slice(0, columns), offset)
