"""Recorded steps some of whose rows have LoRA adapters; those of `RecordedSteps` know nothing of any."""

from __future__ import annotations

from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor

from octavo.models.base import CausalLM
from octavo.worker.cpu.recorded_steps import RecordedSteps
from octavo.worker.input_batch import InputBatch
from octavo.worker.lora import AdapterManager
from octavo.worker.step import Logits, StepDraw
from octavo_kernels.cpu import Arena


class AdaptedSteps(RecordedSteps):
    """Has operations for the layers that any adapter so far had matrices for; recorded anew when there are more."""

    def __init__(
        self,
        model: CausalLM,
        batch: InputBatch,
        kv_caches: list[Tensor],
        max_rows: int,
        max_logits: int,
        arena: Arena,
        adapters: AdapterManager,
    ) -> None:
        """See `RecordedSteps`."""
        super().__init__(model, batch, kv_caches, max_rows, max_logits, arena=arena)
        self._adapters, self._num_changes = adapters, 0
        self._token_slots = torch.full((len(self._inputs.positions),), -1, dtype=torch.int32)
        self._logit_slots = torch.full((self._max_logits,), -1, dtype=torch.int32)
        self._arrays = self._token_slots.numpy(), self._logit_slots.numpy()

    def set_tokens(self, slots: np.ndarray) -> None:
        """The slots of the next step's tokens int32 [T], -1: none; before any other call for that step."""
        if self._num_changes != self._adapters.num_changes:
            self._num_changes = self._adapters.num_changes
            self._step = self._layers = self._head = None
        if len(slots) <= len(self._arrays[0]):  # else the step is not replayed
            self._arrays[0][: len(slots)] = slots

    def set_logits(self, slots: np.ndarray) -> None:
        """Set the slots of the rows int32 [R] that `compute_logits` gets next."""
        if len(slots) <= self._max_logits:
            self._arrays[1][: len(slots)] = slots

    def _replay(
        self,
        rows: int,
        sequences: int,
        indices: np.ndarray,
        wants_logits: bool,
        has_images: bool = False,
        draw: StepDraw | None = None,
    ) -> Logits | None:
        self.set_logits(self._arrays[0][indices])
        return super()._replay(rows, sequences, indices, wants_logits, has_images, draw)

    def _for_tokens(self) -> AbstractContextManager[None]:
        return self._adapters.model_adapters.applied(self._token_slots)

    def _for_logits(self) -> AbstractContextManager[None]:
        return self._adapters.model_adapters.applied(self._logit_slots)
