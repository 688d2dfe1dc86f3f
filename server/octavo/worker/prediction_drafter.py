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

from octavo.layers.attention import ForwardContext
from octavo.models.state_reader import StateReader
from octavo.sample.sampler import Sampler
from octavo.worker.draft_model import DraftStates
from octavo.worker.input_batch import StepInputs
from octavo.worker.request_states import RequestStates
from octavo.worker.step import SampledRows, pad_indices

logger = logging.getLogger(__name__)


@dataclass
class StepStates:
    """What a step has computed: of the sequences ``rows`` int64 [R] the tokens from ``starts`` int32 [R] on, whose
    states, as the drafter reads them, are ``hidden [T, ...]``."""

    rows: np.ndarray
    starts: np.ndarray
    hidden: Tensor


class PredictionDrafter:
    """Guesses with ``model``, whose part of the blocks are ``kv_caches``."""

    def __init__(self, model: StateReader, requests: RequestStates, kv_caches: list[Tensor]) -> None:
        self.model, self._kv_caches = model, kv_caches
        self._states, self._main = DraftStates(requests), requests.batch
        self._batch = self._states.batch
        self._sampler = Sampler()
        self._failed = False
        self._before = self._main.num_computed.copy()

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
        main, rows, before = self._main, step.rows, self._before[step.rows]
        counts = main.num_computed[rows] - before  # without rejected drafts
        # The states of these, in order; the last of each sequence has the token that was sampled after it.
        ends = np.cumsum(counts)
        index = np.arange(counts.sum()) + np.repeat(step.starts - ends + counts, counts)
        self._batch.num_computed[rows] = before
        state = self._run(rows, counts, self.model.join(step.hidden[torch.from_numpy(index)]))
        which = {main_row: i for i, main_row in enumerate(rows.tolist())}
        some = [(req_id, which[main.row_of[req_id]], count) for req_id, count in wanted.items() if count > 0]
        if not some:
            return {}
        req_ids, at = [one[0] for one in some], np.array([one[1] for one in some], dtype=np.int64)
        rows, known = rows[at], main.num_computed[rows[at]] + 1
        room = np.minimum(main.num_blocks[rows] * main.block_size, main.token_ids.shape[1] - 1) - known + 1
        most = np.minimum(np.array([one[2] for one in some]), room)
        self._states.known[rows] = known
        state, drafts, ready = state[torch.from_numpy(ends[at] - 1)], dict[str, list[int]](), np.arange(len(at))
        ready = ready[most > 0]
        state = state[torch.from_numpy(ready)]
        for guessed in range(int(most.max(initial=0))):
            sampled = SampledRows([req_ids[i] for i in ready], rows[ready], known[ready] + guessed, lambda: None)
            tokens, invalid = self._sample(state, sampled, guessed)
            for i, token in zip(ready, tokens, strict=True):
                drafts.setdefault(req_ids[i], []).append(token)
            stays = ~invalid & (most[ready] > guessed + 1)
            ready, state = ready[stays], state[torch.from_numpy(np.flatnonzero(stays))]
            if not len(ready):
                break
            self._batch.num_computed[rows[ready]] = known[ready] - 1 + guessed
            state = self._run(rows[ready], np.ones(len(ready), dtype=np.int64), state)
        return drafts

    def _run(self, rows: np.ndarray, counts: np.ndarray, before: Tensor) -> Tensor:
        """The states ``[T, H]`` after ``counts`` tokens of ``rows`` from those that the view has computed on, given the
        states before ``[T, H]``."""
        inputs = StepInputs(self._batch, rows, counts, self.model.row_multiple)
        total = inputs.num_tokens
        positions = inputs.positions[:total].numpy()
        inputs.input_ids[:total] = torch.from_numpy(
            self._batch.token_ids[np.repeat(rows, counts), positions + 1].astype(np.int64)
        )
        padded = before.new_zeros(len(inputs.input_ids), before.shape[1])
        padded[:total] = before
        context = ForwardContext(inputs.metadata, self._kv_caches)
        return self.model.predict(inputs.input_ids, padded, inputs.positions, context)[:total]

    def _sample(self, state: Tensor, sampled: SampledRows, number: int) -> tuple[list[int], np.ndarray]:
        """Guess ``number``: a token for each row of ``state``, written behind the known ones, and which are invalid."""
        padded = torch.from_numpy(pad_indices(np.arange(len(state)), self.model.row_multiple))
        logits = self.model.guess(state[padded], number)[: len(state)]
        result = self._sampler(logits, self._states.sampling_metadata(sampled), None)
        tokens = result.sampled_token_ids.tolist()
        self._batch.token_ids[sampled.rows, sampled.positions] = tokens
        return tokens, result.invalid.numpy()
