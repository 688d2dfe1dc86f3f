"""Steps in which every sequence computes one token, captured for some numbers of sequences.

One graph holds the model with the preparation of its inputs, another the head with the sampler, so that a row whose
sampling needs more than the captured sampler can still use the first. Sampled tokens stay on the device, where the next
step reads them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

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
from octavo_kernels import SamplingRows


class DecodeGraphs:
    """Graphs over the rows that `select_rows` has chosen last, by their number with padding (one of ``sizes``)."""

    def __init__(
        self,
        model: CausalLM,
        kv_caches: list[Tensor],
        batch: DeviceBatch,
        sampling: SamplingStates,
        sizes: list[int],
        capture: Capture,
        keep_two: bool = False,
    ) -> None:
        """``keep_two``: a drafter on the device asks for the token before the last one, too."""
        self.sizes = sizes
        self.selected: list[int] = []  # rows on the device, PADDING among them
        self._model, self._kv_caches, self._batch, self._sampling = model, kv_caches, batch, sampling
        self._capture, self._keep_two = capture, keep_two
        self._rows = torch.full((sizes[-1],), PADDING, dtype=torch.int64, device=batch.device)
        self._models: dict[int, Captured] = {}
        self._samplers: dict[tuple[int, bool], Captured] = {}

    def capture_all(self) -> None:
        """Capture every size now, the largest first, instead of when it is first needed."""
        for size in reversed(self.sizes):
            self.model_graph(size)
            for truncated in (False, True):
                self.sampler_graph(size, truncated)

    def select_rows(self, rows: np.ndarray) -> int | None:
        """Have the graphs compute ``rows`` int64 [R]; returns their size, None where none is large enough.

        Nothing is launched while the batch stays the same.
        """
        at = bisect_left(self.sizes, len(rows))
        if at == len(self.sizes):
            return None
        size = self.sizes[at]
        selected = rows.tolist() + [PADDING] * (size - len(rows))
        if selected != self.selected:
            self._rows[:size] = devices.put(np.array(selected, dtype=np.int64), self._batch.device)
            self.selected = selected
        return size

    def model_graph(self, size: int) -> Captured:
        """Its outputs: hidden states [size, H], and the positions int64 [size] of the tokens to be sampled."""
        if size not in self._models:
            rows = self._rows[:size]

            def work() -> tuple[Tensor, ...]:
                step, metadata = self._batch.decode_inputs(rows)
                hidden = self._model(step.token_ids, step.positions, ForwardContext(metadata, self._kv_caches))
                return hidden, step.next_positions

            self._models[size] = self._capture_on_padding(work)
        return self._models[size]

    def sampler_graph(self, size: int, truncated: bool) -> Captured:
        """Samples what `model_graph` left: greedy, by temperature and, if ``truncated``, with top-k, top-p and min-p.

        Its outputs: tokens int64 [size], and bool [size] whether there was nothing to sample.
        """
        key = size, truncated
        if key not in self._samplers:
            rows, table = self._rows[:size], self._sampling.table()
            hidden, positions = self.model_graph(size).outputs

            def work() -> tuple[Tensor, ...]:
                step = SamplingRows(table, rows, positions, truncated)
                drawn = octavo_kernels.sample(self._model.compute_logits(hidden), step)
                if self._keep_two:
                    self._batch.push(rows, drawn.token_ids)
                else:
                    self._batch.last_tokens[rows] = drawn.token_ids
                return drawn.token_ids, drawn.invalid

            self._samplers[key] = self._capture_on_padding(work)
        return self._samplers[key]

    def _capture_on_padding(self, work: Callable[[], tuple[Tensor, ...]]) -> Captured:
        """Capture while every row is padding, so that running the work changes nothing."""
        before = self._rows.clone()
        self._rows.fill_(PADDING)
        captured = self._capture(work)
        self._rows.copy_(before)
        return captured
