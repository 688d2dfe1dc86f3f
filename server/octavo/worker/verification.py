"""Verification of draft tokens: the sampler, once for each position of a draft for as long as it was right.

A token is a function of what precedes it, its seed and its position (see `octavo.sample.gumbel`), so what is sampled
after the right drafts is what would be sampled without any: no token ever depends on a draft. Sampling position by
position keeps histories, which penalties and bad words look at, free of drafts that turn out wrong, and draws nothing
after a wrong one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from octavo.interface.step import ModelRunnerOutput, SchedulerOutput
from octavo.worker.input_batch import InputBatch
from octavo.worker.request_states import add_logprobs
from octavo.worker.step import DeviceRunner, DraftRows, Logits, SampledRows, SampledTokens


def verify(
    drafts: DraftRows,
    runner: DeviceRunner,
    logits: Logits,
    sampled: SampledRows,
    draft_mask: Callable[[list[str], int], Tensor | None],
) -> SampledTokens:
    """Sample in rounds, each the sequences whose drafts were right so far, and count the others' rejected ones.
    ``draft_mask``: what grammars allow after so many drafts, see `octavo.worker.grammars.sequences.SequenceGrammars`.

    In a later round, rows that nothing could be sampled from do not count: the next step comes back to them.
    """
    which = np.arange(len(sampled.req_ids))
    first, rejected = drafts.first, drafts.counts.copy()
    rounds: list[tuple[list[str], SampledTokens]] = []
    while len(which):
        at, req_ids = len(rounds), [sampled.req_ids[i] for i in which]
        bitmask = partial(draft_mask, req_ids, at) if at else sampled.grammar_bitmask
        part = SampledRows(req_ids, sampled.rows[which], sampled.positions[which] + at, bitmask)
        tokens = runner.sample(logits.take(first[which] + at), part)()
        rounds.append((part.req_ids, tokens))
        valid = ~np.array(tokens.invalid)
        rejected[which] -= valid if at else 1
        right = [drafts.tokens[i][at : at + 1] == [token] for i, token in zip(which, tokens.token_ids, strict=True)]
        which = which[valid & right]
    drafts.num_rejected = rejected
    return rounds[0][1]._replace(later_rounds=rounds[1:])


def verify_best(drafts: DraftRows, logits: Logits, sampled: SampledRows, token_ids: np.ndarray) -> SampledTokens:
    """Verify if only the best token of each row is known and wanted. The last tokens of sequences are written into
    ``token_ids`` int32 [rows, positions]. On lists: after a step the caches hold nothing of numpy and of torch, whose
    operations then take 20 to 50 us each."""
    assert logits.best_only is not None
    best, values = logits.best_only
    ends, last, nothing, rejected, row = list[int](), list[int](), list[bool](), list[int](), 0
    for guessed, batch_row, position in zip(
        drafts.tokens, sampled.rows.tolist(), sampled.positions.tolist(), strict=True
    ):
        end = 0
        while end < len(guessed) and best[row + end] == guessed[end] and values[row + end] - values[row + end] == 0.0:
            end += 1
        ends.append(end)
        last.append(best[row + end])
        nothing.append(values[row + end] - values[row + end] != 0.0)
        rejected.append(len(guessed) - end + (nothing[-1] and end > 0))
        token_ids[batch_row, position + end] = last[-1]
        row += len(guessed) + 1
    drafts.num_rejected = np.array(rejected)
    rounds = []
    for at in range(max(ends) + 1):
        which = [i for i, end in enumerate(ends) if end >= at]
        ids = [drafts.tokens[i][at] if ends[i] > at else last[i] for i in which]
        invalid = [ends[i] == at and nothing[i] for i in which]
        rounds.append(([sampled.req_ids[i] for i in which], SampledTokens(ids, invalid)))
    return rounds[0][1]._replace(later_rounds=rounds[1:])


def rounds_of(req_ids: list[str], first: np.ndarray, right: np.ndarray, sampled: SampledTokens) -> SampledTokens:
    """The tokens of sequences of which ``right`` int64 [S] drafts are right, in rounds as `verify` has them,
    out of what was ``sampled`` after all tokens, each sequence's from ``first`` int64 [S] on."""
    rounds = []
    for at in range(int(right.max(initial=0)) + 1):
        which = np.flatnonzero(right >= at)
        rows = first[which] + at
        logprobs = sampled.logprobs and sampled.logprobs.take(torch.from_numpy(rows))
        ids, invalid = ([part[i] for i in rows.tolist()] for part in (sampled.token_ids, sampled.invalid))
        rounds.append(([req_ids[i] for i in which], SampledTokens(ids, invalid, logprobs)))
    return rounds[0][1]._replace(later_rounds=rounds[1:], same_sequence=sampled.same_sequence)


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
