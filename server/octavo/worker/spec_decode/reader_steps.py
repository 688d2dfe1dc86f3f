"""Steps of a `StateReader` on a CPU, replayed from recordings if its operations can be recorded."""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import Tensor

import octavo_kernels
from octavo.layers.attention import ForwardContext
from octavo.models.state_reader import StateReader
from octavo.worker.cpu.recorded_steps import RecordedInputs, obstacle_to_recording
from octavo.worker.input_batch import InputBatch, StepInputs
from octavo.worker.step import Logits, pad_indices
from octavo_kernels.cpu import Arena, Program, RecordingError, record

logger = logging.getLogger(__name__)


class ReaderSteps:
    """Results are valid until the next call."""

    def __init__(
        self, model: StateReader, batch: InputBatch, kv_caches: list[Tensor], max_rows: int, max_guesses: int
    ) -> None:
        """``batch``: the sequences as the reader sees them; ``max_rows``: maximum number of tokens that are read at a
        time, ``max_guesses``: that are guessed."""
        self._model, self._batch, self._kv_caches = model, batch, kv_caches
        self._inputs = RecordedInputs(max(max_rows, max_guesses + 1), batch)
        self._before = torch.empty(
            len(self._inputs.positions), model.config.hidden_size, dtype=getattr(torch, model.config.dtype)
        )
        self._ends = torch.empty(max_guesses, dtype=torch.int64)
        self._wants_logits = torch.ones(1, dtype=torch.int64)
        self._arena = Arena()
        self._programs: dict[int, Program[list[Tensor]]] = {}
        vocabulary = model.draft_vocabulary()
        self._tokens = None if vocabulary is None else vocabulary.tokens.numpy()
        self.obstacle = obstacle_to_recording(model.row_multiple)

    def run(
        self, rows: np.ndarray, counts: np.ndarray, before: Tensor, number: int, ends: np.ndarray, wants_logits: bool
    ) -> tuple[Tensor, Logits]:
        """Read ``counts`` int64 [R] tokens of ``rows`` int64 [R], behind those that the batch has computed, given
        the states ``before`` ``[T, H]``. Returns the states ``[T, H]``, and guess ``number`` for those at ``ends``
        int64 [S]: logits, or the best tokens alone."""
        if self.obstacle is None:
            kind = min(number, self._model.num_kinds - 1)
            program = self._program(kind)
            if program is not None:
                return self._replay(program, rows, counts, before, number, ends, wants_logits)
        state = self._read(rows, counts, before, number) if self._model.num_reads else before
        if not len(ends):
            return state, Logits(state[:0])
        some = torch.from_numpy(pad_indices(ends, self._model.row_multiple))
        return state, Logits(self._model.guess(state[some], number)[: len(ends)])

    def _time(self, number: int) -> int:
        """The time of reading that guess ``number`` follows."""
        return min(number, max(0, self._model.num_reads - 1))

    def _replay(
        self,
        program: Program[list[Tensor]],
        rows: np.ndarray,
        counts: np.ndarray,
        before: Tensor,
        number: int,
        ends: np.ndarray,
        wants_logits: bool,
    ) -> tuple[Tensor, Logits]:
        total, guesses = len(before), max(1, len(ends))
        self._before[:total] = before
        self._ends.numpy()[: len(ends)] = ends
        if not len(ends):
            self._ends.numpy()[0] = 0
        self._wants_logits.numpy()[0] = wants_logits
        if self._model.num_reads:
            self._inputs.fill_rows(rows, counts, self._time(number) + 1)
            program.replay(total, guesses, sequences=len(rows))
        else:
            program.replay(guesses)
        logits, found, values, *states = (tensor[: len(ends)] for tensor in program.outputs)
        state = program.outputs[3][:total] if states else before
        if wants_logits:
            return state, Logits(self._model.of_all_tokens(logits))
        tokens = found.numpy() if self._tokens is None else self._tokens[found.numpy()]
        return state, Logits(logits, None, (tokens.tolist(), values.tolist()))

    def _program(self, kind: int) -> Program[list[Tensor]] | None:
        if kind not in self._programs:
            try:
                self._programs[kind] = record(lambda: self._run_recorded(kind), self._arena)
            except RecordingError as error:
                logger.info("guesses are not recorded, each operation is called from Python: %s", error)
                self.obstacle = str(error)
        return self._programs.get(kind)

    def _run_recorded(self, kind: int) -> list[Tensor]:
        model, inputs, context = self._model, self._inputs, ForwardContext(self._inputs.metadata, self._kv_caches)
        before, made = self._before, list[Tensor]()
        if model.num_reads:
            made = [model.predict(inputs.input_ids, before, inputs.positions, context, self._time(kind))]
        hidden = model.head_input(octavo_kernels.embedding(self._ends, made[0] if made else before), kind)
        logits, best = model.head(kind).find_best(hidden, self._wants_logits)
        return [logits, best.token_ids, best.values, *made]

    def _read(self, rows: np.ndarray, counts: np.ndarray, before: Tensor, number: int) -> Tensor:
        inputs, time = StepInputs(self._batch, rows, counts, self._model.row_multiple), self._time(number)
        total = inputs.num_tokens
        at = np.minimum(inputs.positions[:total].numpy() + time + 1, self._batch.token_ids.shape[1] - 1)
        inputs.input_ids[:total] = torch.from_numpy(self._batch.token_ids[np.repeat(rows, counts), at].astype(np.int64))
        padded = before.new_zeros(len(inputs.input_ids), before.shape[1])
        padded[:total] = before
        context = ForwardContext(inputs.metadata, self._kv_caches)
        return self._model.predict(inputs.input_ids, padded, inputs.positions, context, time)[:total]
