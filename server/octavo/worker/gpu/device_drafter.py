"""A second model that guesses on a GPU, after each step and without a word to the host.

It reads what the first model reads, in steps with prompts, and guesses in captured steps: the first reads the last two
tokens of each sequence (the one before the last is a draft that it may not have read), each further one its own last
guess. It draws with the noise of the first model's draws, and leaves its guesses where the next step verifies them.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import torch
from torch import Tensor

import octavo_kernels
from octavo.layers.attention import ForwardContext
from octavo.models.base import CausalLM
from octavo.sample import devices
from octavo.sample.states import SamplingStates
from octavo.worker.gpu.device_batch import DeviceBatch
from octavo.worker.gpu.draft_plan import PADDING
from octavo.worker.gpu.graphs import Capture, Captured
from octavo.worker.input_batch import StepInputs
from octavo_kernels import AttentionMetadata, SamplingRows
from octavo_kernels.attention_metadata import for_groups


class DeviceDrafter:
    """Guesses with ``model``, whose part of the blocks are ``kv_caches``, for the sequences of ``batch``."""

    def __init__(
        self,
        model: CausalLM,
        kv_caches: list[Tensor],
        batch: DeviceBatch,
        sampling: SamplingStates,
        sizes: list[int],
        capture: Capture,
    ) -> None:
        self.sizes = sizes
        self._model, self._kv_caches, self._batch, self._sampling = model, kv_caches, batch, sampling
        self._capture = capture
        device, num_rows = batch.device, len(batch.last_tokens)
        self._rows = torch.full((sizes[-1],), PADDING, dtype=torch.int64, device=device)
        self._selected: list[int] = []
        self._last = torch.zeros(num_rows, dtype=torch.int64, device=device)  # guesses that are read next
        self._at = torch.zeros(num_rows, dtype=torch.int64, device=device)  # and where they are
        self._column = torch.zeros(1, dtype=torch.int64, device=device)
        self._graphs: dict[tuple[int, bool, bool], Captured] = {}

    def capture_all(self) -> None:
        """Capture every size now, the largest first, instead of when it is first needed."""
        for size in reversed(self.sizes):
            for truncated in (False, True):
                self._graph(size, truncated, True)
                self._graph(size, truncated, False)

    def read(self, inputs: StepInputs) -> None:
        """Have the model read the tokens of a step."""
        positions = inputs.positions.clamp(max=self._model.config.max_model_len - 1)
        self._model.begin(inputs.input_ids, positions, ForwardContext(inputs.metadata, self._kv_caches))

    def guess(self, rows: np.ndarray, most: int, truncated: bool) -> None:
        """Guess ``most`` tokens to follow the last ones of ``rows`` int64 [R], as far as their blocks reach."""
        at = bisect_left(self.sizes, len(rows))
        size = self.sizes[at]
        selected = rows.tolist() + [PADDING] * (size - len(rows))
        if selected != self._selected:
            self._rows[:size] = devices.put(np.array(selected, dtype=np.int64), self._batch.device)
            self._selected = selected
        self._sampling.table()  # brings changes to the device
        first, further = (self._graph(size, truncated, is_first) for is_first in (True, False))
        first.replay()
        for _ in range(most - 1):
            further.replay()

    def _graph(self, size: int, truncated: bool, is_first: bool) -> Captured:
        key = size, truncated, is_first
        if key not in self._graphs:
            table, rows = self._sampling.table(), self._rows[:size]

            def work() -> tuple[Tensor, ...]:
                hidden, positions = self._read_last_two(rows) if is_first else self._read_guess(rows)
                step = SamplingRows(table, rows, positions, truncated)
                guess = octavo_kernels.sample(self._model.compute_logits(hidden), step).token_ids
                self._batch.drafts[rows, self._column.expand(size)] = guess
                self._column.add_(1).clamp_(max=self._batch.drafts.shape[1] - 1)
                self._last[rows] = guess
                return (guess,)

            before = self._rows.clone()
            self._rows.fill_(PADDING)
            self._graphs[key] = self._capture(work)
            self._rows.copy_(before)
        return self._graphs[key]

    def _read_last_two(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        batch = self._batch
        real, size = rows >= 0, len(rows)
        last = torch.where(real, batch.num_computed[rows], 1)
        tokens = torch.stack([batch.before_last[rows], batch.last_tokens[rows]], 1).flatten()
        positions = torch.stack([last - 1, last], 1).flatten()
        ends = batch.num_computed.clone()
        step = octavo_kernels.decode_inputs(
            rows, batch.last_tokens, ends, batch.num_kv_tokens, batch.block_tables, batch.block_size
        )  # fmt: skip
        starts = 2 * torch.arange(size + 1, dtype=torch.int32, device=batch.device)
        self._column.zero_()
        self._at[rows] = torch.where(real, last + 1, 0)
        hidden = self._run(rows.repeat_interleave(2, output_size=2 * size), tokens, positions, starts, step.seq_lens,
                           step.block_tables, 2)  # fmt: skip
        return hidden[1::2], step.next_positions

    def _read_guess(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        batch = self._batch
        self._at.clamp_(max=batch.max_model_len - 1)  # of sequences for which fewer tokens are asked
        step = octavo_kernels.decode_inputs(
            rows, self._last, self._at, batch.num_kv_tokens, batch.block_tables, batch.block_size
        )  # fmt: skip
        starts = torch.arange(len(rows) + 1, dtype=torch.int32, device=batch.device)
        hidden = self._run(rows, step.token_ids, step.positions, starts, step.seq_lens, step.block_tables, 1)
        return hidden, step.next_positions

    def _run(
        self, rows: Tensor, tokens: Tensor, positions: Tensor, starts: Tensor, seq_lens: Tensor, tables: Tensor,
        width: int,
    ) -> Tensor:  # fmt: skip
        """Final states of tokens int64 [T] at ``positions`` of ``rows``; keys and values without a block are not
        written."""
        batch = self._batch
        size, longest = batch.block_size, batch.max_model_len
        real = (rows >= 0) & (positions < batch.room[rows]) & (positions >= batch.num_kv_tokens[rows])
        positions = positions.clamp(max=min(longest, self._model.config.max_model_len) - 1)
        slots = batch.block_tables[:, rows, positions // size].long() * size + positions % size
        slots = torch.where(real, slots, -1)
        first = AttentionMetadata(
            query_start_loc=starts, seq_lens=seq_lens, block_table=tables[0], slot_mapping=slots[0],
            max_query_len=width, max_seq_len=longest, num_actual_tokens=len(rows),
        )  # fmt: skip
        tokens = torch.where(rows >= 0, tokens, 0)
        context = ForwardContext(for_groups(first, tables, slots), self._kv_caches)
        hidden: Tensor = self._model(tokens, positions, context)
        return hidden
