"""The CPU's part of a step: one at a time, replayed from a recording where the model's steps can be recorded."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from octavo.interface.step import SchedulerOutput
from octavo.layers.attention import ForwardContext
from octavo.layers.decoder import DeferredHidden
from octavo.models.base import CausalLM
from octavo.models.state_reader import StateReader
from octavo.sample.sampler import Sampler
from octavo.worker.cpu.lora_steps import AdaptedSteps
from octavo.worker.cpu.recorded_steps import RecordedSteps
from octavo.worker.input_batch import StepInputs
from octavo.worker.kv_cache import KVCache
from octavo.worker.lora import AdapterManager, slots_at
from octavo.worker.request_states import RequestStates
from octavo.worker.stage import StageLink
from octavo.worker.step import DraftRows, Logits, PendingTokens, SampledRows, SampledTokens, pad_indices
from octavo.worker.verification import verify, verify_best
from octavo_kernels.cpu import Prefault


class CPURunner:
    """A `DeviceRunner` whose results are there when its methods return."""

    states: Tensor | None = None  # what a reader reads of the step that ran last, until the next one: [T, H], or more

    def __init__(
        self,
        model: CausalLM,
        requests: RequestStates,
        kv_cache: KVCache,
        max_rows: int,
        max_logits: int,
        before: StageLink | None = None,
        reader: StateReader | None = None,
        adapters: AdapterManager | None = None,
    ) -> None:
        """See `RecordedSteps`. ``before``: from the stage before, if there is one; ``adapters`` that rows may have."""
        self.model, self.requests, self.kv_caches, self._reader = model, requests, kv_cache.layers, reader
        self.sampler = Sampler()
        self._states = kv_cache.states
        sizes = requests.batch, kv_cache.layers, max_rows, max_logits
        steps = RecordedSteps(model, *sizes, reader, states=kv_cache.states)
        self.recorded_steps: RecordedSteps | None = steps
        self._before, self._received = before, list[Tensor]()
        self._adapters = adapters
        self._adapted_steps = None if adapters is None else AdaptedSteps(model, *sizes, steps.arena, adapters)
        self._slots: np.ndarray | None = None  # int32 [T] of the tokens of the step under way; None: no adapters
        self._row_multiple = model.row_multiple
        self._prefault = Prefault(kv_cache.blocks)

    @property
    def recording_obstacle(self) -> str | None:
        """The obstacle to recording steps; None: there is none."""
        return self.recorded_steps.obstacle if self.recorded_steps else None

    def update_rows(self, step: SchedulerOutput) -> None:
        """Have the pages of the blocks after those in use faulted in, and wait for the stage before."""
        self._prefault.mark_used(self.requests.batch.highest_block)
        if self._before is not None:
            self._received = self._before.receive()
            if self.recorded_steps:
                self.recorded_steps.receive(self._received)

    def decode(self, sampled: SampledRows, drafts: DraftRows | None = None) -> PendingTokens | None:
        """None: steps cannot be recorded."""
        counts = drafts.counts if drafts else None
        self._set_slots(sampled.rows, counts)
        steps = self._steps
        if steps is None:
            return None
        wants_logits = self.requests.wants_logits(sampled)
        draw = self.requests.step_draw(sampled) if wants_logits and not drafts else None
        logits = steps.decode(sampled.rows, wants_logits, counts, draw)
        if logits is None:
            return None
        self._keep_states()
        return self.verify(logits, sampled, drafts) if drafts else self.sample(logits, sampled)

    def make_inputs(self, rows: np.ndarray, num_scheduled: np.ndarray) -> StepInputs:
        """Padded as the model's linear layers want it."""
        self._set_slots(rows, num_scheduled)
        return StepInputs(self.requests.batch, rows, num_scheduled, self._row_multiple)

    def run_to_logits(self, inputs: StepInputs, indices: np.ndarray, sampled: SampledRows) -> Logits:
        """Compute only the best tokens if sampling needs nothing else."""
        logits, steps, images = None, self._steps, inputs.images
        # Embeddings are looked up before the program of a step with images, outside of what adapters apply to.
        if steps and (images is None or (images.embeds is not None and self._slots is None)):
            some = indices if len(indices) else np.zeros(1, dtype=np.int64)
            logits = steps.run_to_logits(inputs, some, self.requests.wants_logits(sampled))
        if logits is None:
            return Logits(self.compute_logits(self.run(inputs), indices))
        self._keep_states()
        return logits

    def run(self, inputs: StepInputs) -> DeferredHidden:
        """All layers up to the last attention."""
        steps = self._steps
        hidden = steps.run(inputs) if steps and inputs.images is None else None
        if hidden is None:
            context = ForwardContext(inputs.metadata, self.kv_caches, inputs.images, self._states, inputs.state)
            padding = (0, 0, 0, len(inputs.input_ids) - inputs.num_tokens)
            received = [functional.pad(tensor, padding) for tensor in self._received]
            with self._applied(np.arange(len(inputs.positions))):
                hidden = self.model.begin(inputs.input_ids, inputs.rotary_positions, context, *received)
            if self.model.tp.stage.size > 1:
                hidden = tuple(tensor[: inputs.num_tokens] for tensor in hidden)
        if self._reader is not None:
            self.states = self._reader.read(self.model, hidden, self.model.finish(*hidden))
        return hidden

    def run_decode(self, rows: np.ndarray) -> DeferredHidden | None:
        """`run` for a step in which each of the sequences ``rows`` int64 [R] computes one token. None: steps cannot be
        recorded."""
        return self.recorded_steps.run_decode(rows) if self.recorded_steps else None

    def _keep_states(self) -> None:
        if self._reader is not None and self.recorded_steps is not None:
            self.states = self.recorded_steps.states

    def compute_logits(self, hidden: DeferredHidden, indices: np.ndarray) -> Tensor:
        """float32 [len(indices), V]."""
        padded, steps = pad_indices(indices, self._row_multiple), self._steps
        rows = torch.from_numpy(padded)
        hidden = tuple(tensor[rows] for tensor in hidden)
        if isinstance(steps, AdaptedSteps) and self._slots is not None:
            steps.set_logits(self._slots[padded])
        logits = steps.compute_logits(hidden) if steps else None
        if logits is None:
            with self._applied(padded):
                logits = self.model.compute_logits(self.model.finish(*hidden))
        return logits[: len(indices)]

    def _set_slots(self, rows: np.ndarray, counts: np.ndarray | None) -> None:
        """Note which adapters the tokens of the next step have: ``counts`` int64 [R] of each sequence, None: one."""
        if self._adapters is None or self._adapted_steps is None:
            return
        slots: np.ndarray = self.requests.batch.adapter_slots[rows]
        self._slots = None
        if (slots >= 0).any():
            self._slots = slots if counts is None else slots.repeat(counts)
            self._adapted_steps.set_tokens(self._slots)

    @property
    def _steps(self) -> RecordedSteps | None:
        """The recordings that the step under way belongs to; None: steps are not recorded."""
        return self.recorded_steps if self._slots is None or self.recorded_steps is None else self._adapted_steps

    def _applied(self, indices: np.ndarray) -> AbstractContextManager[None]:
        """A context for the computation of these tokens of the step, its padding included."""
        if self._adapters is None or self._slots is None:
            return nullcontext()
        return self._adapters.model_adapters.applied(torch.from_numpy(slots_at(self._slots, indices)))

    def sample(self, logits: Logits, sampled: SampledRows) -> PendingTokens:
        """The tokens are in their rows when this returns."""
        if logits.best_only is not None:
            # No operation of torch's: after a step the caches hold nothing of it, and each takes 50 us.
            token_ids, values = logits.best_only
            tokens = SampledTokens(token_ids, [value - value != 0.0 for value in values])
        else:
            tokens = self._draw(logits, sampled)
        # A sequence that ends at max_model_len has no further step: its row has a place for the token all the same.
        self.requests.batch.token_ids[sampled.rows, sampled.positions] = tokens.token_ids
        return lambda: tokens

    def _draw(self, logits: Logits, sampled: SampledRows) -> SampledTokens:
        """Draw by the C kernel, but for the rows that only `Sampler` can draw. The two differ in the last bits of
        log-probabilities, so that either draws the same rows in any company."""
        if (drawn := logits.drawn or self.requests.draw(logits, sampled)) is not None:
            return SampledTokens.from_drawn(drawn)
        apart = self.requests.needs_sampler(sampled)
        if apart is None or apart.all():
            result = self.sampler(logits.values, self.requests.sampling_metadata(sampled), logits.best)
            return SampledTokens(result.sampled_token_ids.tolist(), result.invalid.tolist(), result.logprobs)
        bitmask = sampled.grammar_bitmask()  # may be asked once
        parts = [np.flatnonzero(apart), np.flatnonzero(~apart)]
        found = [self._draw(logits.take(which), sampled.take(which, bitmask)) for which in parts]
        return SampledTokens.joined(parts, found)

    def verify(self, logits: Logits, sampled: SampledRows, drafts: DraftRows) -> PendingTokens:
        """Verify in rounds, see `octavo.worker.verification`."""
        if logits.best_only is not None:
            tokens = verify_best(drafts, logits, sampled, self.requests.batch.token_ids)
        else:
            tokens = verify(drafts, self, logits, sampled, self.requests.grammars.draft_mask)
        return lambda: tokens

    def guess(self, step: SchedulerOutput) -> None:
        """A CPU's drafter is not the runner's."""
