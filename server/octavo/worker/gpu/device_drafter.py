"""Draft tokens on a GPU, after each step and without a word to the host.

Guesses are made in captured steps, drawn with the noise of the first model's draws, and left where the next step
verifies them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import cast

import numpy as np
import torch
from torch import Tensor

import octavo_kernels
from octavo.layers.attention import ForwardContext
from octavo.layers.decoder import DeferredHidden
from octavo.models.base import CausalLM
from octavo.models.state_reader import StateReader
from octavo.sample import devices
from octavo.worker.gpu.draft_plan import PADDING, DraftPlan
from octavo.worker.gpu.graphs import Captured
from octavo.worker.gpu.step_graphs import StepTokens
from octavo.worker.gpu.step_parts import SelectedRows, StepParts
from octavo.worker.input_batch import InputBatch, StepInputs
from octavo_kernels import SamplingRows


class DeviceDrafter(ABC):
    """Guesses token after token for the sequences of a batch."""

    num_reads = 1
    num_kinds = 2  # of guesses: the first ones, and one for all that follow

    def __init__(self, parts: StepParts, sizes: list[int]) -> None:
        """``sizes``: numbers of sequences that guesses are captured for."""
        self.sizes = sizes
        self._parts, self._batch = parts, parts.batch
        self._rows = SelectedRows(sizes, parts.batch.device)
        self._number = torch.zeros(1, dtype=torch.int64, device=parts.batch.device)  # of the guess that is made
        self._graphs: dict[tuple[int, bool, int], Captured] = {}

    def capture_all(self) -> None:
        """Capture every size now, the largest first, instead of when it is first needed."""
        for size in reversed(self.sizes):
            for truncated in (False, True):
                for kind in range(self.num_kinds):
                    self._graph(size, truncated, kind)

    @abstractmethod
    def read_inputs(self, inputs: StepInputs, target: CausalLM, deferred: DeferredHidden, number: int) -> None:
        """Read a step with prompts, the time ``number``, once its tokens are sampled. ``deferred``: what the first
        model's `begin` has returned."""

    @abstractmethod
    def _logits(self, rows: Tensor, number: int) -> Tensor:
        """Logits of guess ``number`` for ``rows`` int64 [R]: [R, V]. Can be captured."""

    def guess(self, rows: np.ndarray, most: int, truncated: bool, read: Callable[[int], None]) -> None:
        """Have ``read`` read the step, and guess ``most`` tokens to follow the last ones of ``rows`` int64 [R], as far
        as their blocks reach."""
        if most:
            size = self._rows.select(rows)
            assert size is not None
            self._parts.sampling.table()  # brings changes to the device
        for number in range(max(most, self.num_reads)):
            if number < self.num_reads:
                read(number)
            if number < most:
                self._graph(cast(int, size), truncated, min(number, self.num_kinds - 1)).replay()

    def _graph(self, size: int, truncated: bool, kind: int) -> Captured:
        key = size, truncated, kind
        if key not in self._graphs:
            table, rows, batch = self._parts.sampling.table(), self._rows.rows[:size], self._batch

            def work() -> tuple[Tensor, ...]:
                if kind == 0:
                    self._number.zero_()
                logits = self._logits(rows, kind)
                positions = torch.where(rows >= 0, batch.num_computed[rows] + 1 + self._number, 0)
                guess = octavo_kernels.sample(logits, SamplingRows(table, rows, positions, truncated)).token_ids
                batch.drafts[rows, self._number.expand(size)] = guess
                self._number.add_(1).clamp_(max=batch.most_drafts - 1)
                return ()

            number = self._number.clone()
            self._graphs[key] = self._parts.capture_on(self._rows.rows, self._rows.nobody, work)
            self._number.copy_(number)
        return self._graphs[key]

    def _last_guess(self, rows: Tensor) -> Tensor:
        """The guess of each of ``rows`` before the one that is made."""
        guesses = self._batch.drafts[rows, (self._number - 1).clamp(min=0).expand(len(rows))]
        return torch.where(rows >= 0, guesses, 0)

    def _one_each(self, rows: Tensor) -> DraftPlan:
        starts = torch.arange(len(rows) + 1, device=rows.device)
        return DraftPlan(rows, torch.zeros_like(rows), starts[:-1], rows, starts)

    def _context(self, plan: DraftPlan, positions: Tensor, width: int) -> ForwardContext:
        return ForwardContext(self._batch.metadata(plan, positions, width), self._parts.kv_caches)

    def _inside(self, positions: Tensor) -> Tensor:
        """Positions that the model knows."""
        longest = min(self._batch.max_model_len, self._parts.model.config.max_model_len)
        return positions.clamp(min=0, max=longest - 1)


class ModelDrafter(DeviceDrafter):
    """A second model. It reads what the first one reads, in steps with prompts; the first guess reads the last two
    tokens of each sequence (the one before the last is a draft that it may not have read), each further one its own
    last guess."""

    @property
    def _model(self) -> CausalLM:
        return cast(CausalLM, self._parts.model)

    def read_inputs(self, inputs: StepInputs, target: CausalLM, deferred: DeferredHidden, number: int) -> None:
        """See `DeviceDrafter`."""
        context = ForwardContext(inputs.metadata, self._parts.kv_caches)
        self._model.begin(inputs.input_ids, self._inside(inputs.positions), context)

    def _logits(self, rows: Tensor, number: int) -> Tensor:
        return self._model.compute_logits(self._read_guess(rows) if number else self._read_last_two(rows))

    def _read_last_two(self, rows: Tensor) -> Tensor:
        batch, size = self._batch, len(rows)
        twice, last = rows.repeat_interleave(2, output_size=2 * size), batch.num_computed[rows]
        tokens = torch.stack([batch.before_last[rows], batch.last_tokens[rows]], 1).flatten()
        positions = torch.where(twice >= 0, torch.stack([last - 1, last], 1).flatten(), 0)
        starts = 2 * torch.arange(size + 1, device=rows.device)
        # Owners and offsets are of steps that are verified.
        plan = DraftPlan(twice, torch.zeros_like(twice), torch.zeros_like(twice), rows, starts)
        hidden: Tensor = self._model(
            torch.where(twice >= 0, tokens, 0), self._inside(positions), self._context(plan, positions, 2)
        )
        return hidden[1::2]

    def _read_guess(self, rows: Tensor) -> Tensor:
        positions = torch.where(rows >= 0, self._batch.num_computed[rows] + self._number, 0)
        context = self._context(self._one_each(rows), positions, 1)
        hidden: Tensor = self._model(self._last_guess(rows), self._inside(positions), context)
        return hidden


class StateDrafter(DeviceDrafter):
    """A layer for multi-token prediction, or draft heads. It reads the states that each step leaves, with the tokens
    that were sampled there: those after wrong drafts, too, which the next step writes over. What it has made of the
    last right one of each sequence is where guesses begin."""

    def __init__(self, parts: StepParts, sizes: list[int], most_tokens: int, host: InputBatch) -> None:
        """``most_tokens``: of a captured step."""
        super().__init__(parts, sizes)
        self._host = host
        config, batch = self._reader.config, self._batch
        dtype = getattr(torch, config.dtype)
        self.num_reads, self.num_kinds = max(1, self._reader.num_reads), self._reader.num_kinds
        self._state = torch.zeros(len(batch.last_tokens), config.hidden_size, dtype=dtype, device=batch.device)
        self._before = self._state  # of a step that is not captured
        kept = most_tokens if self.num_reads > 1 else 0
        self._carried = torch.zeros(kept, config.hidden_size, dtype=dtype, device=batch.device)  # of one that is

    @property
    def _reader(self) -> StateReader:
        return cast(StateReader, self._parts.model)

    def states(self, target: CausalLM, deferred: DeferredHidden, hidden: Tensor) -> Tensor:
        """See `ReadsSteps`."""
        return self._reader.read(target, deferred, hidden)

    def read_inputs(self, inputs: StepInputs, target: CausalLM, deferred: DeferredHidden, number: int) -> None:
        """See `DeviceDrafter`."""
        if number == 0:
            self._before = self._reader.read(target, deferred, target.finish(*deferred))
            self._put_prompts(inputs)
        rows, starts = inputs.rows, inputs.metadata[0].query_start_loc.long()
        of_tokens = np.full(len(inputs.positions), PADDING, dtype=np.int64)
        of_tokens[: inputs.num_tokens] = np.repeat(rows, np.diff(inputs.starts))
        token_rows, sequences = (devices.put(one, self._batch.device) for one in (of_tokens, rows))
        plan = DraftPlan(token_rows, torch.zeros_like(token_rows), torch.zeros_like(token_rows), sequences, starts)
        tokens = StepTokens(inputs.input_ids, inputs.positions, inputs.metadata)
        states = self._read(plan, tokens, self._before, number)
        self._before = states if number + 1 < self.num_reads else self._state  # no step's states are kept beyond it

    def _put_prompts(self, inputs: StepInputs) -> None:
        """Set the known tokens after a part of a prompt as drafts: further times of reading treat them as guessed."""
        host, ahead = self._host, self.num_reads - 1
        rows = inputs.rows[host.num_computed[inputs.rows] + ahead < host.num_prompt[inputs.rows]]
        if ahead and len(rows):
            self._batch.set_drafts(
                rows, [host.token_ids[row, host.num_computed[row] + 1 :][:ahead].tolist() for row in rows]
            )

    def read(self, plan: DraftPlan, tokens: StepTokens, states: Tensor, number: int) -> None:
        """See `ReadsSteps`."""
        kept = self._carried[: len(plan.rows)]
        state = self._read(plan, tokens, kept if number else states, number)
        if self.num_reads > 1:
            kept.copy_(state)

    def _read(self, plan: DraftPlan, tokens: StepTokens, states: Tensor, number: int) -> Tensor:
        """The states ``[T, H]`` of a step's tokens, given those before."""
        batch, rows = self._batch, plan.rows
        if self._reader.num_reads:
            # From the last known token on; what is before that are the step's own tokens.
            beyond = torch.where(rows >= 0, tokens.positions + 1 + number - batch.num_computed[rows], 0)
            guesses = batch.drafts[rows, (beyond - 1).clamp(min=0, max=batch.most_drafts - 1)]
            following = torch.where(beyond == 0, batch.last_tokens[rows], guesses)
            following = torch.where(beyond < 0, tokens.token_ids.roll(-1 - number), following)
            following = torch.where(rows >= 0, following, 0)
            context = ForwardContext(tokens.metadata, self._parts.kv_caches)
            states = self._reader.predict(following, states, self._inside(tokens.positions), context, number)
        starts = plan.starts[:-1].clamp(max=len(rows) - 1)
        ends = starts + batch.num_computed[plan.sequences] - 1 - tokens.positions[starts]
        self._state[plan.sequences] = states[ends.clamp(min=0, max=len(rows) - 1)]
        return states

    def _logits(self, rows: Tensor, number: int) -> Tensor:
        state = self._state[rows]
        if self._reader.num_reads and number >= self._reader.num_reads:
            behind = self._number - self._reader.num_reads
            positions = torch.where(rows >= 0, self._batch.num_computed[rows] + behind, 0)
            context = self._context(self._one_each(rows), positions, 1)
            last = self._reader.num_reads - 1
            state = self._reader.predict(self._last_guess(rows), state, self._inside(positions), context, last)
            self._state[rows] = state
        return self._reader.guess(state, number)
