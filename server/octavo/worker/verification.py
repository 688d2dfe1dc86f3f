"""Verification of draft tokens: the sampler, once for each position of a draft for as long as it was right.

A token is a function of what precedes it, its seed and its position (see `octavo.sample.gumbel`), so what is sampled
after the right drafts is what would be sampled without any: no token ever depends on a draft. Sampling position by
position keeps histories, which penalties and bad words look at, free of drafts that turn out wrong, and draws nothing
after a wrong one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor

from octavo.interface.step import ModelRunnerOutput, SchedulerOutput
from octavo.worker.input_batch import InputBatch
from octavo.worker.request_states import add_logprobs
from octavo.worker.step import DeviceRunner, Logits, SampledRows, SampledTokens


class DraftRows:
    """The sampled sequences of a step, each with the rows of logits of its last known token and of its drafts."""

    def __init__(self, drafts: Mapping[str, list[int]], sampled: SampledRows) -> None:
        """``sampled.positions`` are those after the drafts; they become those after the last known tokens."""
        self.num_rejected: np.ndarray | int = 0  # int64 [S]
        if drafts:
            self._drafts = [drafts.get(req_id, []) for req_id in sampled.req_ids]
            self._counts = np.array([len(tokens) + 1 for tokens in self._drafts], dtype=np.int64)
            self._first = np.cumsum(self._counts) - self._counts  # of each sequence: its first row of logits
            sampled.positions = sampled.positions - self._counts + 1
        self._has_drafts = bool(drafts)

    def __bool__(self) -> bool:
        return self._has_drafts

    def indices(self, ends: np.ndarray) -> np.ndarray:
        """Of the step's tokens, those that give a row of logits. ``ends`` int64 [S]: where each sequence's end."""
        if not self:
            return ends - 1
        offsets: np.ndarray = np.arange(self._counts.sum()) - np.repeat(self._first, self._counts)
        return offsets + np.repeat(ends - self._counts, self._counts)

    def verify(
        self,
        runner: DeviceRunner,
        logits: Logits,
        sampled: SampledRows,
        best_only: bool,
        draft_mask: Callable[[list[str], int], Tensor | None],
    ) -> SampledTokens:
        """Sample in rounds, each the sequences whose drafts were right so far, and count the others' rejected ones.
        ``best_only``: the best token of each row is all that is known and wanted. ``draft_mask``: what grammars allow
        after so many drafts, see `octavo.worker.grammar.SequenceGrammars`.

        In a later round, rows that nothing could be sampled from do not count: the next step comes back to them.
        """
        if best_only:
            return self._verify_best(runner, logits, sampled)
        which = np.arange(len(sampled.req_ids))
        rejected = self._counts.copy()
        rounds: list[tuple[list[str], SampledTokens]] = []
        while len(which):
            at, req_ids = len(rounds), [sampled.req_ids[i] for i in which]
            bitmask = partial(draft_mask, req_ids, at) if at else sampled.grammar_bitmask
            part = SampledRows(req_ids, sampled.rows[which], sampled.positions[which] + at, bitmask)
            tokens = runner.sample(_take(logits, self._first[which] + at, best_only), part)()
            rounds.append((part.req_ids, tokens))
            valid = ~np.array(tokens.invalid)
            rejected[which] -= valid if at else 1
            right = [self._drafts[i][at : at + 1] == [token] for i, token in zip(which, tokens.token_ids, strict=True)]
            which = which[valid & right]
        self.num_rejected = rejected
        return rounds[0][1]._replace(later_rounds=rounds[1:])

    def _verify_best(self, runner: DeviceRunner, logits: Logits, sampled: SampledRows) -> SampledTokens:
        """The same where the best tokens are all: what drafts are right is known before the last token is taken."""
        assert logits.best is not None
        best, values = (tensor.tolist() for tensor in logits.best)
        ends = []
        for row, drafts in zip(self._first.tolist(), self._drafts, strict=True):
            end = 0
            while end < len(drafts) and best[row + end] == drafts[end] and values[row + end] - values[row + end] == 0.0:
                end += 1
            ends.append(end)
        right = np.array(ends)
        last = SampledRows(sampled.req_ids, sampled.rows, sampled.positions + right, sampled.grammar_bitmask)
        tokens = runner.sample(_take(logits, self._first + right, True), last)()
        self.num_rejected = self._counts - 1 - right + (np.array(tokens.invalid) & (right > 0))
        rounds = []
        for at in range(int(right.max(initial=0)) + 1):
            which = [i for i, end in enumerate(ends) if end >= at]
            ids = [self._drafts[i][at] if ends[i] > at else tokens.token_ids[i] for i in which]
            invalid = [ends[i] == at and tokens.invalid[i] for i in which]
            rounds.append(([sampled.req_ids[i] for i in which], SampledTokens(ids, invalid)))
        return rounds[0][1]._replace(later_rounds=rounds[1:])


def put_drafts(batch: InputBatch, step: SchedulerOutput) -> None:
    """Write drafts into their sequences' rows, where the step's inputs are read."""
    for req_id, tokens in step.scheduled_spec_decode_tokens.items():
        row = batch.row_of[req_id]
        end = int(batch.num_computed[row]) + step.num_scheduled_tokens[req_id]
        batch.token_ids[row, end - len(tokens) : end] = tokens


def append_round(
    output: ModelRunnerOutput, req_ids: list[str], tokens: SampledTokens, wanted: list[int | None] | None
) -> None:
    """Add a later round to what the sequences have in ``output``; ``wanted`` as of `add_logprobs`."""
    new = ModelRunnerOutput()
    if wanted is not None:
        add_logprobs(new, req_ids, wanted, tokens)
    for req_id, token, invalid in zip(req_ids, tokens.token_ids, tokens.invalid, strict=True):
        if not invalid:
            output.sampled_token_ids[req_id].append(token)
            if req_id in new.logprobs:
                output.logprobs[req_id].extend(new.logprobs[req_id])


def _take(logits: Logits, indices: np.ndarray, best_only: bool) -> Logits:
    rows = torch.from_numpy(indices)
    best = None if logits.best is None else (logits.best[0][rows], logits.best[1][rows])
    return Logits(logits.values if best_only else logits.values[rows], best)
