"""Token embeddings and the head that turns hidden states back into logits; both split the vocabulary over the ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import octavo_kernels
from octavo.layers.parallel import TensorParallel
from octavo.layers.quantization import LinearMethod, UnquantizedLinearMethod
from octavo.layers.quantization.base import LinearBase, Shard
from octavo.layers.weights import WeightSlot, WeightSource, fill_tensor
from octavo_kernels.cpu import argmax


def _vocab_shard(vocab_size: int, hidden_size: int, tp: TensorParallel) -> Shard:
    """This rank's rows. Every rank has equally many; the last ones may have rows that stay without a token."""
    size = -(-vocab_size // tp.size)
    start = min(tp.rank * size, vocab_size)
    return Shard((vocab_size, hidden_size), slice(start, min(start + size, vocab_size)), slice(0, hidden_size), 0)


class VocabParallelEmbedding(nn.Module):
    """Rows of an embedding table ``[vocab_size, hidden_size]`` by token id."""

    def __init__(self, vocab_size: int, hidden_size: int, tp: TensorParallel) -> None:
        super().__init__()
        self.tp, self.shard = tp, _vocab_shard(vocab_size, hidden_size, tp)
        rows = -(-vocab_size // tp.size)
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(rows, hidden_size), requires_grad=False)
        self.dtype = torch.get_default_dtype()
        self._head: list[ParallelLMHead] = []  # one with the same table; in a list it is not registered here

    def share(self, head: ParallelLMHead) -> None:
        """Leave the table to a tied head that is quantised, if that one keeps the checkpoint's very values."""
        self._head = [head]

    def forward(self, input_ids: Tensor) -> Tensor:
        if self.weight is None:
            return self._head[0].method.embed(input_ids, self.dtype)
        if self.tp.size == 1:
            return octavo_kernels.embedding(input_ids, self.weight)
        local = input_ids - self.shard.rows.start
        elsewhere = (local < 0) | (local >= self.shard.num_rows)
        rows = octavo_kernels.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.tp.all_reduce(rows.masked_fill(elsewhere[:, None], 0))

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield WeightSlot(0, "weight", self.shard.shape, self._load, self._left_out)

    def _left_out(self, qtype: str) -> int:
        """Bytes of the table, less than 0, where the head's own is used instead; else 0."""
        if self.weight is None or not (self._head and self._head[0].method.keeps_values(qtype)):
            return 0
        return -self.weight.nbytes

    def _load(self, source: WeightSource) -> None:
        if self._left_out(source.qtype):
            self.weight = None  # never touched, so it has cost no memory
        else:
            assert self.weight is not None
            fill_tensor(self.weight[: self.shard.num_rows], source, self.shard.rows)


class ParallelLMHead(LinearBase):
    """Logits float32 ``[R, vocab_size]`` of hidden states ``[R, hidden_size]``.

    A head that is ``tied_to`` an embedding uses its table.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, tp: TensorParallel, tied_to: VocabParallelEmbedding | None = None
    ) -> None:
        super().__init__([_vocab_shard(vocab_size, hidden_size, tp)], False, tp)
        self.vocab_size = vocab_size
        self.output_size = -(-vocab_size // tp.size)
        # Lists, so that nothing is registered twice.
        self.tied_weight = [tied_to.weight] if tied_to is not None and tied_to.weight is not None else []
        self._tied_to = [tied_to] if tied_to is not None else []

    def create_weights(self, method: LinearMethod, dtype: torch.dtype) -> None:
        self.method = method
        if self.shares_weight:
            self.weight = self.tied_weight[0]
        else:
            method.create_weights(self, dtype)
            if self._tied_to and self.tp.size == 1:
                self._tied_to[0].share(self)

    @property
    def shares_weight(self) -> bool:
        """A tied head that is quantised keeps a copy of its own, filled from the embedding's tensor."""
        return bool(self.tied_weight) and isinstance(self.method, UnquantizedLinearMethod)

    def weight_slots(self) -> Iterator[WeightSlot]:
        return iter(()) if self.shares_weight else super().weight_slots()

    def find_best(self, hidden: Tensor, wants_logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The logits, undefined unless ``wants_logits`` int64 [1] is set when they are computed, and their `argmax`."""
        found = self.method.find_best(hidden, wants_logits) if self.tp.size == 1 else None
        if found is None:
            logits = self(hidden)
            found = (logits, *argmax(logits))
        return found

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self.tp.all_gather(self.method.apply(self, hidden, None))
        logits = logits[:, : self.vocab_size]
        # The sampling kernels of other devices read any dtype: no copy of twice the size.
        return logits.float() if logits.device.type == "cpu" else logits
