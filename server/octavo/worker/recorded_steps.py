"""Decode steps of a quantised model on a CPU, recorded once for each number of sequences and then replayed.

It is to the CPU what a CUDA graph is to a GPU: a step of a small model is hundreds of short operations, and starting
each from Python takes as long as computing it.
"""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import Tensor

from octavo.layers.attention import ForwardContext
from octavo.models.base import CausalLM
from octavo.worker.input_batch import InputBatch
from octavo_kernels import AttentionMetadata
from octavo_kernels.cpu import Arena, Program, RecordingError, record

logger = logging.getLogger(__name__)


class RecordedSteps:
    """Runs steps in which each of R sequences computes one token and gets one."""

    def __init__(self, model: CausalLM, batch: InputBatch, kv_caches: list[Tensor]) -> None:
        self._model, self._batch = model, batch
        max_num_reqs, max_blocks = batch.block_table.shape
        self._input_ids = torch.zeros(max_num_reqs, dtype=torch.int64)
        self._positions = torch.zeros(max_num_reqs, dtype=torch.int64)
        self._metadata = AttentionMetadata(
            query_start_loc=torch.arange(max_num_reqs + 1, dtype=torch.int32),
            seq_lens=torch.zeros(max_num_reqs, dtype=torch.int32),
            block_table=torch.zeros(max_num_reqs, max_blocks, dtype=torch.int32),
            slot_mapping=torch.full((max_num_reqs,), -1, dtype=torch.int64),
            max_query_len=1,
            max_seq_len=max_blocks * batch.block_size,
            num_actual_tokens=max_num_reqs,
        )
        self._kv_caches = kv_caches
        self._arena = Arena()
        self._programs: dict[int, Program] = {}
        # Linears that want their rows padded are torch's own, which no recording can hold.
        self._possible = model.row_multiple == 1

    def run(self, rows: np.ndarray) -> Tensor | None:
        """Logits float32 [R, vocabulary] of the next tokens of ``rows`` int64 [R], valid until the next call.

        None when this model's steps cannot be recorded; nothing has been computed then.
        """
        if not self._possible:
            return None
        self._fill(rows)
        program = self._programs.get(len(rows))
        if program is None:
            return self._record(len(rows))
        program.replay()
        logits: Tensor = program.outputs
        return logits

    def _fill(self, rows: np.ndarray) -> None:
        batch, count, metadata = self._batch, len(rows), self._metadata
        positions = batch.num_computed[rows]
        pages = positions // batch.block_size
        num_columns = int(pages.max()) + 1
        table = metadata.block_table.numpy()
        table[:count, :num_columns] = batch.block_table[rows, :num_columns]
        slots = table[np.arange(count), pages].astype(np.int64) * batch.block_size + positions % batch.block_size
        slots[positions < batch.num_kv_tokens[rows]] = -1
        self._input_ids.numpy()[:count] = batch.token_ids[rows, positions]
        self._positions.numpy()[:count] = positions
        metadata.seq_lens.numpy()[:count] = positions + 1
        metadata.slot_mapping.numpy()[:count] = slots

    def _record(self, count: int) -> Tensor | None:
        everything = self._metadata
        metadata = AttentionMetadata(
            query_start_loc=everything.query_start_loc[: count + 1],
            seq_lens=everything.seq_lens[:count],
            block_table=everything.block_table[:count],
            slot_mapping=everything.slot_mapping[:count],
            max_query_len=1,
            max_seq_len=everything.max_seq_len,
            num_actual_tokens=count,
        )
        ids, positions = self._input_ids[:count], self._positions[:count]

        def step() -> Tensor:
            hidden = self._model(ids, positions, ForwardContext(metadata, self._kv_caches))
            return self._model.compute_logits(hidden)

        try:
            logits, self._programs[count] = record(step, self._arena)
        except RecordingError as error:
            logger.info("decode steps run one operation at a time: %s", error)
            self._possible = False
            return None
        return logits
