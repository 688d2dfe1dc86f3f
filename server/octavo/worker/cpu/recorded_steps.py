"""Steps of a quantised model on a CPU, recorded once and then replayed.

It is to the CPU what CUDA graphs are to a GPU: a step of a small model is hundreds of short operations, and starting
each from Python takes as long as computing it. One program does for steps of all sizes: the layers for all rows, the
head for those that get a token, and the best token of each. Where what the layers leave is wanted for more than that,
there is one for the layers up to the last attention and one for what follows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

import octavo_kernels
from octavo.layers.attention import ForwardContext
from octavo.models.base import CausalLM
from octavo.worker.input_batch import InputBatch, StepInputs
from octavo_kernels import AttentionMetadata
from octavo_kernels.cpu import Arena, DecodeInputs, Program, RecordingError, record, unavailable_reason

logger = logging.getLogger(__name__)

T = TypeVar("T")
States = tuple[Tensor, ...]


class Logits(NamedTuple):
    values: Tensor  # float32 [R, vocabulary], undefined if they were not wanted
    best: tuple[Tensor, Tensor]  # of each row, see `cpu.argmax`


class RecordedSteps:
    """What is returned is valid until the next call, and None when this model's steps cannot be recorded."""

    def __init__(self, model: CausalLM, batch: InputBatch, kv_caches: list[Tensor], max_rows: int) -> None:
        """``max_rows``: tokens of a step at most."""
        self._model, self._batch, self._kv_caches = model, batch, kv_caches
        self._max_logits, max_blocks = batch.block_table.shape
        # More rows than there are logits, by which a program tells apart what depends on which.
        self._inputs = _Inputs(max(max_rows, self._max_logits + 1), self._max_logits, max_blocks, batch.block_size)
        self._wanted = torch.empty(self._max_logits, dtype=torch.int64)
        self._wants_logits = torch.ones(1, dtype=torch.int64)
        self._arena = Arena()
        self._step: Program[list[Tensor]] | None = None
        self._layers: Program[list[Tensor]] | None = None
        self._head: Program[Tensor] | None = None
        self._head_rows: list[Tensor] = []
        # Linears that want their rows padded are torch's own, which no recording can hold.
        self._possible = model.row_multiple == 1 and unavailable_reason() is None
        self._decode_inputs: DecodeInputs | None = None

    def decode(self, rows: np.ndarray, wants_logits: bool) -> Logits | None:
        """A step in which each of the sequences ``rows`` int64 [R] computes one token and gets one."""
        if not self._possible:
            return None
        if self._decode_inputs is None:
            batch, inputs = self._batch, self._inputs
            self._decode_inputs = DecodeInputs(
                batch.num_computed, batch.num_kv_tokens, batch.token_ids, batch.block_table, batch.block_size,
                inputs.input_ids, inputs.positions, inputs.metadata,
            )  # fmt: skip
        self._decode_inputs.fill(rows)
        return self._whole(len(rows), len(rows), np.arange(len(rows)), wants_logits)

    def run(self, step: StepInputs, wanted: np.ndarray, wants_logits: bool) -> Logits | None:
        """Any step, and logits or the best tokens alone of its rows ``wanted`` int64 [R], one at least."""
        total, sequences = step.metadata.num_actual_tokens, len(step.metadata.seq_lens)
        if total > len(self._inputs.positions) or len(wanted) > self._max_logits:
            return None
        self._inputs.fill(step)
        return self._whole(total, sequences, wanted, wants_logits)

    def begin(self, step: StepInputs) -> States | None:
        """`CausalLM.begin` of any step."""
        total, sequences = step.metadata.num_actual_tokens, len(step.metadata.seq_lens)
        if total > len(self._inputs.positions):
            return None
        self._inputs.fill(step)
        if self._layers is None:
            self._layers = self._record(lambda: [*self._begin()])
            if self._layers is None:
                return None
        self._layers.replay(total, sequences=sequences)
        return tuple(state[:total] for state in self._layers.outputs)

    def logits(self, states: States) -> Tensor | None:
        """Logits float32 [R, vocabulary] from R rows of what `begin` returned."""
        rows = len(states[0])
        if not self._possible or rows > self._max_logits:
            return None
        if self._head is None:
            self._head_rows = [state.new_empty(self._max_logits, state.shape[1]) for state in states]
            self._head = self._record(lambda: self._model.compute_logits(self._model.finish(*self._head_rows)))
            if self._head is None:
                return None
        for ours, theirs in zip(self._head_rows, states, strict=True):
            ours[:rows] = theirs
        self._head.replay(rows)
        return self._head.outputs[:rows]

    def _whole(self, rows: int, sequences: int, wanted: np.ndarray, wants_logits: bool) -> Logits | None:
        if self._step is None:
            self._step = self._record(self._whole_step)
            if self._step is None:
                return None
        self._wanted.numpy()[: len(wanted)] = wanted
        self._wants_logits.numpy()[0] = wants_logits
        self._step.replay(rows, len(wanted), sequences=sequences)
        logits, *best = (output[: len(wanted)] for output in self._step.outputs)
        return Logits(logits, (best[0], best[1]))

    def _whole_step(self) -> list[Tensor]:
        states = (octavo_kernels.embedding(self._wanted, state) for state in self._begin())
        return [*self._model.lm_head.find_best(self._model.finish(*states), self._wants_logits)]

    def _begin(self) -> States:
        context = ForwardContext(self._inputs.metadata, self._kv_caches)
        return self._model.begin(self._inputs.input_ids, self._inputs.positions, context)

    def _record(self, step: Callable[[], T]) -> Program[T] | None:
        if self._possible:
            try:
                return record(step, self._arena)
            except RecordingError as error:
                logger.info("steps run one operation at a time: %s", error)
                self._possible = False
        return None


class _Inputs:
    """A step's inputs at places that stay, for as many rows as a step may have."""

    def __init__(self, max_rows: int, max_num_reqs: int, max_blocks: int, block_size: int) -> None:
        self.input_ids = torch.empty(max_rows, dtype=torch.int64)
        self.positions = torch.empty(max_rows, dtype=torch.int64)
        self.metadata = AttentionMetadata(
            query_start_loc=torch.empty(max_num_reqs + 1, dtype=torch.int32),
            seq_lens=torch.empty(max_num_reqs, dtype=torch.int32),
            block_table=torch.empty(max_num_reqs, max_blocks, dtype=torch.int32),
            slot_mapping=torch.empty(max_rows, dtype=torch.int64),
            max_query_len=max_rows,
            max_seq_len=max_blocks * block_size,
            num_actual_tokens=max_rows,
        )

    def fill(self, step: StepInputs) -> None:
        total, ours, theirs = step.metadata.num_actual_tokens, self.metadata, step.metadata
        count, columns = theirs.block_table.shape
        self.input_ids[:total], self.positions[:total] = step.input_ids[:total], step.positions[:total]
        ours.slot_mapping[:total] = theirs.slot_mapping[:total]
        ours.query_start_loc[: count + 1] = theirs.query_start_loc
        ours.seq_lens[:count] = theirs.seq_lens
        ours.block_table[:count, :columns] = theirs.block_table
