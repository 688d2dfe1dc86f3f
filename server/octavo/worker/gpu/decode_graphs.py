"""Steps in which every sequence computes one token. Sampled tokens stay on the device, where the next step reads
them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from octavo.worker.gpu.draft_plan import DraftPlan
from octavo.worker.gpu.step_graphs import ReadsSteps, StepGraphs, StepTokens
from octavo.worker.gpu.step_parts import SelectedRows, StepParts
from octavo_kernels import AttentionMetadata


class DecodeGraphs(StepGraphs):
    """Graphs over the rows that `select_rows` has chosen last. Those of a sampler have two outputs."""

    def __init__(
        self, parts: StepParts, sizes: list[int], keep_two: bool = False, reader: ReadsSteps | None = None
    ) -> None:
        """``keep_two``: a drafter on the device asks for the token before the last one, too."""
        self._rows, self._keep_two = SelectedRows(sizes, parts.batch.device), keep_two
        self._starts = torch.arange(max(sizes, default=0) + 1, device=parts.batch.device)
        self._offsets = torch.zeros_like(self._starts)
        super().__init__(parts, sizes, self._rows.rows, self._rows.nobody, reader)

    @property
    def selected(self) -> list[int]:
        """Rows on the device, PADDING among them."""
        return self._rows.selected

    def select_rows(self, rows: np.ndarray) -> int | None:
        """See `SelectedRows.select`."""
        return self._rows.select(rows)

    def plan(self, size: int) -> DraftPlan:
        """See `StepGraphs`."""
        rows = self._rows.rows[:size]
        return DraftPlan(rows, self._offsets[:size], self._starts[:size], rows, self._starts[: size + 1])

    def _inputs(self, size: int) -> tuple[StepTokens, Tensor]:
        step, metadata = self._batch.decode_inputs(self._rows.rows[:size])
        return StepTokens(step.token_ids, step.positions, metadata), step.next_positions

    def _metadata(self, size: int, positions: Tensor) -> list[AttentionMetadata]:
        return self._batch.metadata(self.plan(size), positions, 1)

    def _go_on(self, size: int, token_ids: Tensor, invalid: Tensor) -> tuple[Tensor, ...]:
        rows = self._rows.rows[:size]
        if self._keep_two:
            self._batch.push(rows, token_ids)
        else:
            self._batch.last_tokens[rows] = token_ids
        return ()
