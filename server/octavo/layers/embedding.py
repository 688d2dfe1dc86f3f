"""Token embeddings and the head that turns hidden states back into logits; both split the vocabulary over the ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import octavo_kernels
from octavo.layers.lora import LayerAdapters
from octavo.layers.parallel import TensorParallel
from octavo.layers.quantization import LinearMethod, UnquantizedLinearMethod
from octavo.layers.quantization.base import LinearBase, Shard
from octavo.layers.quantization.packed_method import PackedMethod
from octavo.layers.quantization.quantized_rows import QuantizedRowsMethod
from octavo.layers.unregistered import set_unregistered
from octavo.layers.weights import WeightSlot, WeightSource, fill_tensor, unread_slot
from octavo_kernels import SampledRows, SamplingRows
from octavo_kernels.cpu import Best, argmax


def _vocab_shard(vocab_size: int, hidden_size: int, tp: TensorParallel) -> Shard:
    """The shard of this rank's rows. Every rank has equally many; the last ones may have rows without a token."""
    return Shard((vocab_size, hidden_size), slice(*tp.shares(vocab_size)), slice(0, hidden_size), 0)


class VocabParallelEmbedding(nn.Module):
    """Rows of an embedding table ``[vocab_size, hidden_size]`` by token id."""

    _packed: LinearBase | None  # filled from the same tensor

    def __init__(self, vocab_size: int, hidden_size: int, tp: TensorParallel) -> None:
        super().__init__()
        self.tp, self.shard = tp, _vocab_shard(vocab_size, hidden_size, tp)
        rows = -(-vocab_size // tp.size)
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(rows, hidden_size), requires_grad=False)
        self.dtype = torch.get_default_dtype()
        self.is_for_head = False  # alone: on the last stage of a pipeline, which embeds no tokens
        self.adapters: LayerAdapters | None = None  # that rows may have
        set_unregistered(self, _packed=None)

    def tie(self, head: LinearBase) -> None:
        """Fill a packed head from this table's tensor; leave the table to it, if it keeps the very same values."""
        set_unregistered(self, _packed=head)
        if self.is_for_head:
            self.weight = None

    def pack(self, method: LinearMethod, table: PackedTable) -> None:
        """Let ``method`` hold the table, of which ``table`` says how it is stored, if it keeps its values."""
        qtype = table.stored_types[0]
        if qtype is not None and isinstance(method, PackedMethod) and method.keeps_values(qtype):
            table.create_weights(method, self.dtype)
            self.table = table
            self.tie(table)

    def forward(self, input_ids: Tensor, skip: int = 0) -> Tensor:
        """Rows ``[T, hidden_size]`` of ``input_ids`` int64 ``[T]``, whole on every rank; ``skip`` more before the first
        (on one rank, of a table of its own)."""
        first = None if self.tp.size == 1 else self.shard.rows.start
        if self.weight is not None:
            rows = octavo_kernels.embedding(input_ids, self.weight[skip:], first)
        else:
            assert self._packed is not None
            method = self._packed.method
            assert isinstance(method, PackedMethod)
            rows = method.embed(input_ids, self.dtype, first)
        if self.adapters is not None and self.adapters.are_in_use and not skip:
            self.adapters.add_rows_(rows, input_ids, self.shard.rows)
        return self.tp.all_reduce(rows)

    def weight_slots(self) -> Iterator[WeightSlot]:
        """The table, and what a tied head makes of the same tensor for itself."""
        yield WeightSlot(0, "weight", self.shard.shape, self._load, self._left_out)
        if self._packed is not None:
            yield from self._packed.method.weight_slots(self._packed, 0, self._packed.shards[0])

    def _left_out(self, qtype: str) -> int:
        """Bytes of the table, less than 0, where the head's own is used instead; else 0."""
        if self.weight is None or self._packed is None:
            return 0
        method = self._packed.method
        return -self.weight.nbytes if isinstance(method, PackedMethod) and method.keeps_values(qtype) else 0

    def _load(self, source: WeightSource) -> None:
        if self._left_out(source.qtype):
            self.weight = None  # never touched, so it has cost no memory
        elif self.weight is not None:
            fill_tensor(self.weight[: self.shard.num_rows], source, self.shard.rows)


class PackedTable(LinearBase):
    """An embedding's table in a form of its `LinearMethod`'s, filled with the embedding."""

    def weight_slots(self) -> Iterator[WeightSlot]:
        """None: they are the embedding's."""
        return iter(())


class ParallelLMHead(LinearBase):
    """Logits float32 ``[R, vocab_size]`` of hidden states ``[R, hidden_size]``, times ``scale``.

    A head that is ``tied_to`` an embedding uses its table, whatever the checkpoint stores as the head's. ``softcap`` c
    replaces logits by ``c * tanh(logit / c)``.
    """

    tied_to: VocabParallelEmbedding | None

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        tp: TensorParallel,
        tied_to: VocabParallelEmbedding | None = None,
        scale: float = 1.0,
        bias: bool = False,
        softcap: float | None = None,
    ) -> None:
        super().__init__([_vocab_shard(vocab_size, hidden_size, tp)], bias, tp)
        self.scale = scale
        self.vocab_size = vocab_size
        self.output_size = -(-vocab_size // tp.size)
        self.softcap = softcap
        set_unregistered(self, tied_to=tied_to)

    @property
    def is_tied(self) -> bool:
        """True if the head uses an embedding's table."""
        return self.tied_to is not None

    def create_weights(self, method: LinearMethod, dtype: torch.dtype) -> None:
        """The embedding's own table where that can be; a packed head is made of the same tensor."""
        self.method = method
        if self.tied_to is not None and isinstance(method, UnquantizedLinearMethod):
            assert self.tied_to.weight is not None
            self.weight = self.tied_to.weight
            return
        method.create_weights(self, dtype)
        if self.tied_to is not None:
            self.tied_to.tie(self)

    def weight_slots(self) -> Iterator[WeightSlot]:
        """A tied head reads no weight, but accepts one, as it is often stored all the same."""
        return iter([unread_slot("weight")]) if self.is_tied else super().weight_slots()

    def find_best(self, hidden: Tensor, wants_logits: Tensor) -> tuple[Tensor, Best]:
        """The logits, undefined unless ``wants_logits`` int64 [1] is set when they are computed, and the best ones."""
        is_plain = self.scale == 1.0 and self.bias is None and not (self.adapters and self.adapters.are_in_use)
        if is_plain and isinstance(self.method, QuantizedRowsMethod):
            found = self.method.find_best(hidden, wants_logits) if self.shards[0].num_rows else None
            if found is not None:
                logits, index, best, maxima = found
                if self.tp.size == 1 and self.softcap is None:
                    return logits, Best(index, best, maxima)
                if self.tp.size > 1:
                    logits = self.tp.all_gather(logits, self.vocab_size, wants_logits)
                    index, best = self.tp.best_of_ranks(index, best, self.shards[0].rows.start, len(index))
                return self._capped(logits), Best(index, self._capped(best[:, None])[:, 0])
        if self.tp.size == 1 or hidden.device.type != "cpu":
            logits = self(hidden)
            return logits, Best(*argmax(logits))
        part = self._part(hidden).float()
        logits = self.tp.all_gather(part, self.vocab_size, wants_logits)
        index, best = self.tp.find_best(part, self.vocab_size)
        return self._capped(logits), Best(index, self._capped(best[:, None])[:, 0])

    def sample(self, hidden: Tensor, rows: SamplingRows) -> SampledRows:
        """`octavo_kernels.sample` of the logits, which are not gathered where each rank can draw from its own."""
        if self.tp.size == 1 or rows.truncated or rows.constraints is not None:
            return octavo_kernels.sample(self(hidden), rows)
        first, end = self.tp.shares(self.vocab_size)
        tokens, values = None, None
        part = self._part(hidden)
        if end > first:
            tokens, values = octavo_kernels.sample_part(self._capped(part[:, : end - first]), rows, first)
        tokens, values = self.tp.best_of_ranks(tokens, values, 0, len(part))
        invalid = ~values.isfinite()
        return SampledRows(tokens.masked_fill(invalid, 0), invalid)

    def forward(self, hidden: Tensor) -> Tensor:
        """See the class; in the model's dtype on other devices than a CPU."""
        logits = self._capped(self.tp.all_gather(self._part(hidden), self.vocab_size))
        # The sampling kernels of other devices read any dtype: no copy of twice the size.
        return logits.float() if logits.device.type == "cpu" else logits

    def _part(self, hidden: Tensor) -> Tensor:
        """This rank's logits, before they are capped."""
        if self.scale != 1.0:
            hidden = octavo_kernels.scale(hidden, self.scale)
        return self.product(hidden, self.bias)

    def _capped(self, logits: Tensor) -> Tensor:
        return logits if self.softcap is None else octavo_kernels.scale(logits, 1.0, self.softcap)
