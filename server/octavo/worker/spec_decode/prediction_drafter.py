"""Guesses from the hidden states of the model's last step, by a checkpoint's own layer for multi-token prediction or by
draft heads that were trained for the model (EAGLE, Medusa).

The drafter reads what the model computes, in the same step: at each position the token after it and the model's state
there. Its layer's keys and values lie in the model's blocks, so it finds them with a cached prefix. (The last one of a
prefix was made with the token that followed there, perhaps another one; that costs a guess, no more.)
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.models.state_reader import StateReader
from octavo.sample.sampler import Sampler
from octavo.worker.request_states import RequestStates
from octavo.worker.spec_decode.draft_model import DraftStates
from octavo.worker.spec_decode.reader_steps import ReaderSteps
from octavo.worker.step import Logits, SampledRows

logger = logging.getLogger(__name__)


@dataclass
class StepStates:
    """The results of a step: for the sequences ``rows`` int64 [R] the tokens from ``starts`` int32 [R] on, whose
    states, as the drafter reads them, are ``hidden [T, ...]``."""

    rows: np.ndarray
    starts: np.ndarray
    hidden: Tensor


class PredictionDrafter:
    """Guesses with ``model``, whose part of the blocks are ``kv_caches``."""

    def __init__(self, model: StateReader, requests: RequestStates, kv_caches: list[Tensor], max_rows: int) -> None:
        """``max_rows``: maximum number of tokens of a step."""
        self._model, self._states, self._main = model, DraftStates(requests), requests.batch
        self._batch = self._states.batch
        self.steps = ReaderSteps(model, self._batch, kv_caches, max_rows, len(self._batch.num_computed))
        self._sampler = Sampler()
        self._failed = False
        self._before = self._main.num_computed.copy()

    @property
    def recording_obstacle(self) -> str | None:
        """See `octavo.worker.step.DeviceRunner`."""
        return self.steps.obstacle

    def begin_step(self) -> None:
        """The rows are as they are before a step."""
        np.copyto(self._before, self._main.num_computed)

    def propose(self, wanted: dict[str, int], step: StepStates) -> dict[str, list[int]]:
        """Up to ``wanted`` tokens to follow each of these sequences, after ``step``. Never raises."""
        try:
            return self._propose(wanted, step)
        except Exception:
            if not self._failed:
                logger.exception("guessing failed; sequences go on without drafts where it does")
            self._failed = True
            return {}

    def _propose(self, wanted: dict[str, int], step: StepStates) -> dict[str, list[int]]:
        main, rows, before, reads = self._main, step.rows, self._before[step.rows], self._model.num_reads
        counts = main.num_computed[rows] - before  # without rejected drafts
        # The states of these, in order; the last of each sequence has the token that was sampled after it.
        ends = np.cumsum(counts)
        index = np.arange(counts.sum()) + np.repeat(step.starts - ends + counts, counts)
        state = step.hidden[torch.from_numpy(index)]
        which = {main_row: i for i, main_row in enumerate(rows.tolist())}
        some = [(req_id, which[main.row_of[req_id]], count) for req_id, count in wanted.items() if count > 0]
        req_ids, at = [one[0] for one in some], np.array([one[1] for one in some], dtype=np.int64)
        own, known = rows[at], main.num_computed[rows[at]] + 1
        room = np.minimum(main.num_blocks[own] * main.block_size, main.token_ids.shape[1] - 1) - known + 1
        most = np.minimum(np.array([one[2] for one in some], dtype=np.int64), room)
        self._states.known[own] = known
        ready = np.flatnonzero(most > 0)
        places = ends[at[ready]] - 1
        drafts, wants_logits = dict[str, list[int]](), self._wants_logits(req_ids, own, known, ready)
        for number in range(max(reads, most.max(initial=0))):
            if number < reads:
                self._batch.num_computed[rows] = before
                state, logits = self.steps.run(rows, counts, state, number, places, wants_logits)
            else:
                if number == reads:  # from here on of the last tokens alone
                    state = state[torch.from_numpy(places)]
                self._batch.num_computed[own[ready]] = known[ready] - 1 + number - reads
                ones, each = np.ones(len(ready), dtype=np.int64), np.arange(len(ready))
                state, logits = self.steps.run(own[ready], ones, state, number, each, wants_logits)
            if not len(ready):
                continue
            tokens, invalid = self._sample(logits, [req_ids[i] for i in ready], own[ready], known[ready] + number)
            for i, token in zip(ready, tokens, strict=True):
                drafts.setdefault(req_ids[i], []).append(token)
            stays = ~invalid & (most[ready] > number + 1)
            ready, places = ready[stays], places[stays]
            if number >= reads:
                state = state[torch.from_numpy(np.flatnonzero(stays))]
            if not len(ready) and number + 1 >= reads:
                break
        return drafts

    def _wants_logits(self, req_ids: list[str], rows: np.ndarray, known: np.ndarray, ready: np.ndarray) -> bool:
        """True if guessing takes more than each row's best token."""
        sampled = SampledRows([req_ids[i] for i in ready], rows[ready], known[ready], _no_bitmask)
        return bool(len(ready)) and self._states.wants_logits(sampled)

    def _sample(
        self, logits: Logits, req_ids: list[str], rows: np.ndarray, positions: np.ndarray
    ) -> tuple[list[int], np.ndarray]:
        """A token for each of ``rows``, written behind the known ones, and which are invalid."""
        sampled = SampledRows(req_ids, rows, positions, _no_bitmask)
        if logits.best_only is not None:
            tokens, values = logits.best_only
            invalid = np.array([value - value != 0.0 for value in values])
        elif (drawn := self._states.draw(logits, sampled)) is not None:
            tokens, invalid = drawn.token_ids, np.array(drawn.invalid)
        else:
            result = self._sampler(logits.values, self._states.sampling_metadata(sampled), None)
            tokens, invalid = result.sampled_token_ids.tolist(), result.invalid.numpy()
        self._batch.token_ids[rows, positions] = tokens
        return tokens, invalid


def _no_bitmask() -> Tensor | None:
    return None
