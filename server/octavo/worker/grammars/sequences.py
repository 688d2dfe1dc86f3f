"""Grammars of running sequences: the masks of each step, computed by other processes while the model runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from octavo.interface.step import SchedulerOutput
from octavo.worker.grammars.pool import TOO_SLOW, GrammarPool
from octavo.worker.grammars.process import GrammarProcess, GrammarSequence

STEP_SECONDS = 0.05  # CPU time of all masks that a step waits for
CUT_SECONDS = 0.002  # longest wait, before a step, for what grammars say of its drafts
FREELY = 1 << 30  # guessed tokens that are followed where the text is free
MASK_WALL_SECONDS = 0.8  # longest wait for a mask; its process ends itself earlier, unless it gets no CPU


class SequenceGrammars:
    """The grammars of the runner's sequences, and the bitmask of each step."""

    def __init__(self, pool: GrammarPool, vocab_size: int) -> None:
        self._pool = pool
        self._words = -(-vocab_size // 32)
        self._sequences: dict[str, GrammarSequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, req_id: object) -> bool:
        return req_id in self._sequences

    @property
    def hold(self) -> bool:
        """True if any has a mask: a text may be free for now."""
        return not all(sequence.is_free for sequence in self._sequences.values())

    def add(self, req_id: str, grammar: str, output_token_ids: Sequence[int]) -> None:
        """Start a sequence's grammar. ``output_token_ids``: generated before a preemption."""
        process = self._pool.get(grammar)
        if process is None or not self._pool.free_slots:  # no slot: aborted requests with slow masks hold them
            sequence = GrammarSequence(GrammarProcess(grammar), -1)
            sequence.problem = TOO_SLOW
        else:
            sequence = GrammarSequence(process, self._pool.free_slots.popleft())
            process.join(sequence, list(output_token_ids))
            self._pool.send(process)
        self._sequences[req_id] = sequence

    def remove(self, req_id: str) -> None:
        """Forget a sequence; unknown ones are ignored."""
        sequence = self._sequences.pop(req_id, None)
        if sequence is not None:
            sequence.process.end(sequence)
            sequence.removed = True
            self._pool.forget(sequence)

    def held(self) -> set[str]:
        """Sequences not to be scheduled yet: their masks have not arrived, and are slow or too many."""
        late = {i: sequence.process for i, sequence in self._sequences.items() if not sequence.is_ready}
        if not late:
            return set()
        slow, seconds = set(), 0.0
        for process in sorted(set(late.values()), key=lambda process: process.step_seconds):
            seconds += process.step_seconds
            if process.is_slow or seconds > STEP_SECONDS:
                slow.add(process)
        return {i for i, process in late.items() if process in slow}

    def cut(self, step: SchedulerOutput) -> None:
        """Take out of ``step`` the drafts that grammars forbid, and those after them: where that is known in time, else
        they are found wrong by the step itself."""
        drafts, asked = step.scheduled_spec_decode_tokens, dict[str, GrammarSequence]()
        for req_id in [*drafts]:
            sequence = self._sequences.get(req_id)
            if sequence is None or sequence.problem is not None:
                continue
            if sequence.is_free:
                sequence.num_followed = FREELY
                _keep(step, req_id, sequence.first_waker(drafts[req_id]))
            elif not sequence.process.is_slow:
                sequence.process.draft(sequence, drafts[req_id])
                asked[req_id] = sequence
        if not asked:
            return
        for process in {sequence.process for sequence in asked.values()}:
            self._pool.send(process)
        self._poll_until_ready([*asked.values()], CUT_SECONDS)
        for req_id, sequence in asked.items():
            if sequence.is_free:
                sequence.num_followed = FREELY
                _keep(step, req_id, sequence.first_waker(drafts[req_id]))
            elif sequence.is_ready and sequence.problem is None:
                _keep(step, req_id, sequence.num_followed)

    def start_fill(self, req_ids: list[str], drafts: Mapping[str, list[int]]) -> Callable[[], torch.Tensor | None]:
        """The step's bitmask int32 [R, ceil(V / 32)], by a function that waits for it (None: no row has a grammar).
        `draft_mask` gives those after the ``drafts`` of sequences."""
        found = [(i, self._sequences[req_id]) for i, req_id in enumerate(req_ids) if req_id in self._sequences]
        constrained = [(i, sequence) for i, sequence in found if not sequence.is_free]
        if not constrained:
            return lambda: None

        def result() -> torch.Tensor:
            self._wait([sequence for _, sequence in constrained])
            going_on = [(i, sequence.slot) for i, sequence in constrained if sequence.problem is None]
            rows, slots = [i for i, _ in going_on], [slot for _, slot in going_on]
            if len(rows) == len(req_ids):
                return torch.from_numpy(self._pool.masks[slots, 0])
            mask = np.full((len(req_ids), self._words), -1, dtype=np.int32)
            mask[[i for i, _ in constrained]] = 0  # after a problem no token is allowed: the request ends with an error
            if rows:
                mask[rows] = self._pool.masks[slots, 0]
            return torch.from_numpy(mask)

        return result

    def draft_mask(self, req_ids: list[str], depth: int) -> torch.Tensor | None:
        """The bitmask after ``depth`` of the guessed tokens, once that of `start_fill` is there; nothing is allowed
        where they were not followed so far."""
        if not any(req_id in self._sequences for req_id in req_ids):
            return None
        mask = np.full((len(req_ids), self._words), -1, dtype=np.int32)
        for i, req_id in enumerate(req_ids):
            sequence = self._sequences.get(req_id)
            if sequence is not None and sequence.num_followed != FREELY:
                is_there = sequence.problem is None and depth <= sequence.num_followed
                mask[i] = self._pool.masks[sequence.slot, depth] if is_there else 0
        return torch.from_numpy(mask)

    def _wait(self, sequences: list[GrammarSequence]) -> None:
        for process in {sequence.process for sequence in self._poll_until_ready(sequences, MASK_WALL_SECONDS)}:
            self._pool.fail(process, TOO_SLOW)

    def _poll_until_ready(self, sequences: list[GrammarSequence], seconds: float) -> list[GrammarSequence]:
        """Wait for what they were asked for. Returns those that are late."""
        self._pool.poll()
        until = time.monotonic() + seconds
        while late := [sequence for sequence in sequences if not sequence.is_ready]:
            left = until - time.monotonic()
            if left <= 0:
                return late
            self._pool.poll(left)
        return []

    def accept(self, tokens: Mapping[str, list[int]]) -> dict[str, str]:
        """Advance the grammars by sampled tokens. Returns the problems, by req_id."""
        problems, advanced = {}, set()
        for req_id, sampled in tokens.items():
            sequence = self._sequences.get(req_id)
            if sequence is None:
                continue
            if sequence.problem is not None:
                problems[req_id] = sequence.problem
                continue
            if sequence.is_free:
                at = sequence.first_waker(sampled)
                if at == len(sampled):
                    continue
                sequence.process.start(sequence, sampled[at:])
            else:
                sequence.process.advance(sequence, sampled)
            advanced.add(sequence.process)
        for process in advanced:
            self._pool.send(process)
        return problems


def _keep(step: SchedulerOutput, req_id: str, count: int) -> None:
    """Take the drafts of a sequence behind the first ``count`` out of ``step``."""
    drafts = step.scheduled_spec_decode_tokens
    num_forbidden = len(drafts[req_id]) - count
    if num_forbidden <= 0:
        return
    step.num_scheduled_tokens[req_id] -= num_forbidden
    step.total_num_scheduled_tokens -= num_forbidden
    drafts[req_id] = drafts[req_id][:count]  # the list itself is the scheduler's
    if not drafts[req_id]:
        del drafts[req_id]
