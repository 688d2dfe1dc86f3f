"""Steps of a quantised model on a CPU, recorded once for each size and then replayed.

It is to the CPU what a CUDA graph is to a GPU: a step of a small model is hundreds of short operations, and starting
each from Python takes as long as computing it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from octavo import platform
from octavo.layers.attention import ForwardContext
from octavo.models.base import CausalLM
from octavo.worker.input_batch import InputBatch, StepInputs
from octavo_kernels import AttentionMetadata
from octavo_kernels.cpu import Arena, Program, RecordingError, record

logger = logging.getLogger(__name__)


ROW_BUCKET = 16  # rows of steps with prompts are padded to a multiple of this
MAX_ROWS = 1024  # above it starting operations one by one costs little beside what they compute


class RecordedSteps:
    """`decode` runs steps in which each of R sequences computes one token and gets one, `forward` the others."""

    def __init__(self, model: CausalLM, batch: InputBatch, kv_caches: list[Tensor]) -> None:
        self._model, self._batch, self._kv_caches = model, batch, kv_caches
        max_num_reqs, max_blocks = batch.block_table.shape
        self._decode_inputs = _Inputs(max_num_reqs, max_num_reqs, max_blocks, batch.block_size)
        self._decode_inputs.metadata.query_start_loc[:] = torch.arange(max_num_reqs + 1)
        self._mixed_inputs = _Inputs(MAX_ROWS, max_num_reqs, max_blocks, batch.block_size)
        self._arena = Arena()
        self._decodes: dict[int, Program] = {}
        self._forwards: dict[int, Program] = {}
        # Linears that want their rows padded are torch's own, which no recording can hold.
        self._possible = model.row_multiple == 1

    def decode(self, rows: np.ndarray) -> Tensor | None:
        """Logits float32 [R, vocabulary] of the next tokens of ``rows`` int64 [R], valid until the next call.

        None when this model's steps cannot be recorded; nothing has been computed then.
        """
        if not self._possible:
            return None
        self._fill_decode(rows)
        inputs = self._decode_inputs.first(len(rows), len(rows))

        def step() -> Tensor:
            return self._model.compute_logits(self._hidden(inputs))

        return self._run(self._decodes, len(rows), step)

    def forward(self, step_inputs: StepInputs) -> Tensor | None:
        """Hidden states [at least T, H] of a step of T tokens, valid until the next call; None as for `decode`."""
        metadata = step_inputs.metadata
        total = metadata.num_actual_tokens
        size = -(-total // ROW_BUCKET) * ROW_BUCKET
        if not self._possible or size > MAX_ROWS:
            return None
        self._mixed_inputs.fill(step_inputs, size)
        inputs = self._mixed_inputs.first(size)
        return self._run(self._forwards, size, lambda: self._hidden(inputs))

    def _hidden(self, inputs: _Inputs) -> Tensor:
        return self._model(inputs.input_ids, inputs.positions, ForwardContext(inputs.metadata, self._kv_caches))

    def _run(self, programs: dict[int, Program], size: int, step: Callable[[], Tensor]) -> Tensor | None:
        program = programs.get(size)
        if program is not None:
            program.replay()
            result: Tensor = program.outputs
            return result
        try:
            result, programs[size] = record(step, self._arena)
        except RecordingError as error:
            logger.info("steps run one operation at a time: %s", error)
            self._possible = False
            return None
        platform.trim_memory()  # recording keeps every intermediate result until it ends
        return result

    def _fill_decode(self, rows: np.ndarray) -> None:
        batch, count, inputs = self._batch, len(rows), self._decode_inputs
        metadata = inputs.metadata
        positions = batch.num_computed[rows]
        pages = positions // batch.block_size
        num_columns = int(pages.max()) + 1
        table = metadata.block_table.numpy()
        table[:count, :num_columns] = batch.block_table[rows, :num_columns]
        slots = table[np.arange(count), pages].astype(np.int64) * batch.block_size + positions % batch.block_size
        slots[positions < batch.num_kv_tokens[rows]] = -1
        inputs.input_ids.numpy()[:count] = batch.token_ids[rows, positions]
        inputs.positions.numpy()[:count] = positions
        metadata.seq_lens.numpy()[:count] = positions + 1
        metadata.slot_mapping.numpy()[:count] = slots


class _Inputs:
    """A step's inputs at places that stay."""

    def __init__(self, max_rows: int, max_num_reqs: int, max_blocks: int, block_size: int) -> None:
        self.input_ids = torch.zeros(max_rows, dtype=torch.int64)
        self.positions = torch.zeros(max_rows, dtype=torch.int64)
        self.metadata = AttentionMetadata(
            query_start_loc=torch.zeros(max_num_reqs + 1, dtype=torch.int32),
            seq_lens=torch.zeros(max_num_reqs, dtype=torch.int32),
            block_table=torch.zeros(max_num_reqs, max_blocks, dtype=torch.int32),
            slot_mapping=torch.full((max_rows,), -1, dtype=torch.int64),
            max_query_len=max_rows,
            max_seq_len=max_blocks * block_size,
            num_actual_tokens=max_rows,
        )

    def first(self, rows: int, num_reqs: int | None = None) -> _Inputs:
        """Views of the first ``rows`` rows and ``num_reqs`` sequences (None: all, those too many being empty)."""
        whole, part = self.metadata, object.__new__(_Inputs)
        count = whole.seq_lens.shape[0] if num_reqs is None else num_reqs
        part.input_ids, part.positions = self.input_ids[:rows], self.positions[:rows]
        part.metadata = AttentionMetadata(
            query_start_loc=whole.query_start_loc[: count + 1],
            seq_lens=whole.seq_lens[:count],
            block_table=whole.block_table[:count],
            slot_mapping=whole.slot_mapping[:rows],
            max_query_len=1 if num_reqs is not None else rows,
            max_seq_len=whole.max_seq_len,
            num_actual_tokens=rows,
        )
        return part

    def fill(self, step: StepInputs, size: int) -> None:
        """Copy a step of at most ``size`` rows; the rows and sequences that it lacks become padding."""
        total, ours, theirs = step.metadata.num_actual_tokens, self.metadata, step.metadata
        count, columns = theirs.block_table.shape
        self.input_ids[:total], self.positions[:total] = step.input_ids[:total], step.positions[:total]
        self.input_ids[total:size] = self.positions[total:size] = 0
        ours.slot_mapping[:total] = theirs.slot_mapping[:total]
        ours.slot_mapping[total:size] = -1
        ours.query_start_loc[: count + 1] = theirs.query_start_loc
        ours.query_start_loc[count + 1 :] = total
        ours.seq_lens[:count] = theirs.seq_lens
        ours.seq_lens[count:] = 0
        ours.block_table[:count, :columns] = theirs.block_table
