"""Parts that captured steps share: what they work with, how they are captured, and which rows they compute."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.loader.lora import ModelAdapters
from octavo.models.base import Model
from octavo.sample import devices
from octavo.sample.states import SamplingStates
from octavo.worker.gpu.device_batch import DeviceBatch
from octavo.worker.gpu.draft_plan import PADDING
from octavo.worker.gpu.graphs import Capture, Captured


@dataclass(frozen=True)
class StepParts:
    """A model, its part of the blocks, and what the device knows of the sequences."""

    model: Model
    kv_caches: list[Tensor]
    batch: DeviceBatch
    sampling: SamplingStates
    capture: Capture
    adapters: ModelAdapters | None = None  # that the steps apply; None: their rows have none

    def applied(self, rows: Tensor) -> AbstractContextManager[None]:
        """A context for the computation of tokens of the sequences ``rows`` int64 [T]. Can be captured."""
        return self.adapters.applied(self.batch.adapter_slots[rows]) if self.adapters else nullcontext()

    def capture_on(self, chosen: Tensor, nobody: Tensor, work: Callable[[], tuple[Tensor, ...]]) -> Captured:
        """Capture while ``chosen``, which says what is computed, says ``nobody``, so that running the work changes
        nothing."""
        before = chosen.clone()
        chosen.copy_(nobody)
        captured = self.capture(work)
        chosen.copy_(before)
        return captured


class SelectedRows:
    """The rows that captured steps of some sizes compute, on the device."""

    def __init__(self, sizes: list[int], device: torch.device) -> None:
        self.sizes, self.selected = sizes, list[int]()  # rows on the device, PADDING among them
        self.rows = torch.full((sizes[-1],), PADDING, dtype=torch.int64, device=device)
        self.nobody = self.rows.clone()

    def select(self, rows: np.ndarray) -> int | None:
        """Have steps compute ``rows`` int64 [R]; returns their size, None where none is large enough.

        Nothing is launched while the rows stay the same.
        """
        at = bisect_left(self.sizes, len(rows))
        if at == len(self.sizes):
            return None
        size = self.sizes[at]
        selected = rows.tolist() + [PADDING] * (size - len(rows))
        if selected != self.selected:
            self.rows[:size] = devices.put(np.array(selected, dtype=np.int64), self.rows.device)
            self.selected = selected
        return size
