"""Steps of decodes in which drafts are verified.

Which sequence each token is of, and where it stands after the sequence's last known token, lies in device memory, so
that one graph serves any sequences with any numbers of drafts.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from torch import Tensor

from octavo.sample import devices
from octavo.worker.gpu.draft_plan import DraftPlan, packed_plan, unpack_plan
from octavo.worker.gpu.step_graphs import ReadsSteps, StepGraphs, StepTokens
from octavo.worker.gpu.step_parts import StepParts
from octavo_kernels import AttentionMetadata


class DraftGraphs(StepGraphs):
    """Graphs over the plan that `select` has chosen last. Those of a sampler sample after each token; a third output
    says how many drafts of each sequence are right, int64 [S]."""

    def __init__(self, parts: StepParts, sizes: list[int], max_num_seqs: int, reader: ReadsSteps | None = None) -> None:
        self._max_num_seqs, nobody = max_num_seqs, np.empty(0, dtype=np.int64)
        empty = packed_plan(nobody, nobody, sizes[-1], min(sizes[-1], max_num_seqs))
        padding = devices.put(empty, parts.batch.device)
        self._plan = padding.clone()
        super().__init__(parts, sizes, self._plan, padding, reader)

    def plan(self, size: int) -> DraftPlan:
        """See `StepGraphs`."""
        return unpack_plan(self._plan, size, self._sequences(size))

    def _sequences(self, size: int) -> int:
        return min(size, self._max_num_seqs)

    def select(self, rows: np.ndarray, counts: np.ndarray) -> int | None:
        """Have the graphs compute ``counts`` tokens of ``rows``, both int64 [R]; returns their size, None where none is
        large enough."""
        at = bisect_left(self.sizes, int(counts.sum()))
        if at == len(self.sizes):
            return None
        size = self.sizes[at]
        packed = packed_plan(rows, counts, size, self._sequences(size))
        self._plan[:, : size + 1] = devices.put(packed, self._batch.device)
        return size

    def _inputs(self, size: int) -> tuple[StepTokens, Tensor]:
        token_ids, positions, metadata = self._batch.draft_inputs(self.plan(size))
        return StepTokens(token_ids, positions, metadata), positions + 1

    def _metadata(self, size: int, positions: Tensor) -> list[AttentionMetadata]:
        return self._batch.metadata(self.plan(size), positions, self._batch.most_drafts + 1)

    def _go_on(self, size: int, token_ids: Tensor, invalid: Tensor) -> tuple[Tensor, ...]:
        return (self._batch.accept(self.plan(size), token_ids, invalid),)
