"""Steps of decodes in which drafts are verified, captured for some numbers of tokens.

Which sequence each token is of, and where it stands after the sequence's last known token, lies in device memory, so
that one graph serves any sequences with any numbers of drafts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import numpy as np
from torch import Tensor

import octavo_kernels
from octavo.layers.attention import ForwardContext
from octavo.models.base import CausalLM
from octavo.sample import devices
from octavo.sample.states import SamplingStates
from octavo.worker.gpu.device_batch import DeviceBatch
from octavo.worker.gpu.draft_plan import DraftPlan, packed_plan, unpack_plan
from octavo.worker.gpu.graphs import Capture, Captured
from octavo_kernels import SamplingRows


class DraftGraphs:
    """Graphs over the plan that `select` has chosen last, by its number of tokens with padding (one of ``sizes``)."""

    def __init__(
        self,
        model: CausalLM,
        kv_caches: list[Tensor],
        batch: DeviceBatch,
        sampling: SamplingStates,
        sizes: list[int],
        max_num_seqs: int,
        capture: Capture,
    ) -> None:
        self.sizes = sizes
        self._model, self._kv_caches, self._batch, self._sampling = model, kv_caches, batch, sampling
        self._capture, self._max_num_seqs = capture, max_num_seqs
        nobody = np.empty(0, dtype=np.int64)
        self._nobody = devices.put(packed_plan(nobody, nobody, sizes[-1], self._sequences(sizes[-1])), batch.device)
        self._plan = self._nobody.clone()
        self._models: dict[int, Captured] = {}
        self._samplers: dict[tuple[int, bool], Captured] = {}

    def _sequences(self, size: int) -> int:
        return min(size, self._max_num_seqs)

    def plan(self, size: int) -> DraftPlan:
        """Of the graphs of that size."""
        return unpack_plan(self._plan, size, self._sequences(size))

    def capture_all(self) -> int:
        """Capture every size now, the largest first, instead of when it is first needed. Returns their number."""
        for size in reversed(self.sizes):
            self.model_graph(size)
            for truncated in (False, True):
                self.sampler_graph(size, truncated)
        return len(self.sizes)

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

    def model_graph(self, size: int) -> Captured:
        """Its outputs: hidden states [size, H], and the positions int64 [size] of the tokens to be sampled."""
        if size not in self._models:
            plan = self.plan(size)

            def work() -> tuple[Tensor, ...]:
                token_ids, positions, metadata = self._batch.draft_inputs(plan)
                hidden = self._model(token_ids, positions, ForwardContext(metadata, self._kv_caches))
                return hidden, positions + 1

            self._models[size] = self._capture_on_padding(work)
        return self._models[size]

    def sampler_graph(self, size: int, truncated: bool) -> Captured:
        """Samples after each token that `model_graph` has computed, as `DecodeGraphs.sampler_graph` does, and has the
        sequences go on after their right drafts.

        Its outputs: tokens int64 [size], bool [size] whether there was nothing to sample, and how many drafts of each
        sequence are right, int64 [S].
        """
        key = size, truncated
        if key not in self._samplers:
            plan, table = self.plan(size), self._sampling.table()
            hidden, positions = self.model_graph(size).outputs

            def work() -> tuple[Tensor, ...]:
                step = SamplingRows(table, plan.rows, positions, truncated)
                drawn = octavo_kernels.sample(self._model.compute_logits(hidden), step)
                accepted = self._batch.accept(plan, drawn.token_ids, drawn.invalid)
                return drawn.token_ids, drawn.invalid, accepted

            self._samplers[key] = self._capture_on_padding(work)
        return self._samplers[key]

    def _capture_on_padding(self, work: Callable[[], tuple[Tensor, ...]]) -> Captured:
        """Capture while every row is padding, so that running the work changes nothing."""
        before = self._plan.clone()
        self._plan.copy_(self._nobody)
        captured = self._capture(work)
        self._plan.copy_(before)
        return captured
