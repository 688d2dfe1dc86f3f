"""A second model that guesses what the first one will say, token by token, after each step.

Its layers have keys and values of their own in the blocks that the first one's tables name, so that prefixes, samples
that fork, windows and preemptions are the block tables' alone. It reads what it has not read only when it is to guess
or will soon be, and draws with the noise of the first one's draws: where both models are of one mind they agree, at any
temperature. It may miss keys and values (of a prefix that nobody had it read, of positions that a window has passed):
then it guesses badly, and no more.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from octavo.models.base import CausalLM
from octavo.sample.metadata import SamplingMetadata
from octavo.worker.cpu.runner import CPURunner
from octavo.worker.kv_cache import KVCache
from octavo.worker.request_states import RequestStates
from octavo.worker.step import Logits, SampledRows, SampledTokens, StepDraw
from octavo_kernels.cpu import Drawn

logger = logging.getLogger(__name__)


class DraftStates:
    """The rows of the first model's sequences as the second one sees them: with a count of its own of the tokens that
    it has read. Tokens and blocks are the same memory. What it guesses is written behind the known tokens, where the
    next step's are written over it."""

    def __init__(self, requests: RequestStates) -> None:
        self.requests = requests
        self.batch = copy.copy(requests.batch)
        self.batch.num_computed = np.zeros_like(requests.batch.num_computed)
        self.batch.position_shifts = {}  # it reads placeholders as text
        self.batch.states = None  # it has no recurrent layers
        self.known = np.zeros_like(requests.batch.num_computed)  # tokens that are no guesses

    def sampling_metadata(self, sampled: SampledRows) -> SamplingMetadata:
        """The metadata that the first model's sampler will have at these positions, but without guesses in
        histories."""
        rows, states = sampled.rows.tolist(), self.requests.sampling
        metadata = states.make_metadata(rows, sampled.positions.tolist())
        if metadata.penalties is not None or metadata.bad_words is not None:
            now = states.make_metadata(rows, self.known[sampled.rows].tolist())
            metadata = replace(metadata, penalties=now.penalties, bad_words=now.bad_words)
        return replace(metadata, repeated=None, apart=None, append=None, logprobs_rows=None, num_logprobs=None)

    def draw(self, logits: Logits, sampled: SampledRows) -> Drawn | None:
        """The same tokens as by `sampling_metadata`, drawn by the C kernel. None: only `Sampler` can."""
        states = self.requests.sampling
        if not states.draws or logits.values.dtype != torch.float32:
            return None
        known = self.known[sampled.rows]
        return states.draw(logits.values, sampled.rows, sampled.positions, logits.best, known=known)

    def step_draw(self, sampled: SampledRows) -> StepDraw | None:
        """See `RequestStates.step_draw`."""
        states = self.requests.sampling
        return states.step_draw(sampled.rows, sampled.positions, self.known[sampled.rows]) if states.draws else None

    def needs_sampler(self, sampled: SampledRows) -> None:
        """Let one draw all rows: a guess is not said."""

    def wants_logits(self, sampled: SampledRows) -> bool:
        """True if guessing takes more than each row's best token."""
        return not self.requests.sampling.is_greedy_only(sampled.rows, sampled.positions)


class DraftModel:
    """Guesses with ``model``, whose part of the blocks ``kv_cache`` has."""

    def __init__(
        self, model: CausalLM, requests: RequestStates, kv_cache: KVCache, max_rows: int, window: int | None
    ) -> None:
        """``max_rows``: maximum number of tokens that it reads at a time; ``window``: the shortest of any layer's of
        both models, None: there is none."""
        self._states = DraftStates(requests)
        self._batch, self._main = self._states.batch, requests.batch
        max_logits = len(self._batch.num_computed)
        states: RequestStates = self._states  # type: ignore[assignment]  # all that a runner asks of them
        self._runner = CPURunner(model, states, kv_cache, max_rows, max_logits)
        self._max_rows, self._window = max_rows, window
        self._max_len = model.config.max_model_len
        self._before = self._main.num_computed.copy()
        self._ahead: set[int] = set()  # rows that it may have read further than the first model has
        self._failed = False

    @property
    def recording_obstacle(self) -> str | None:
        """See `octavo.worker.step.DeviceRunner`."""
        return self._runner.recording_obstacle

    def begin_step(self) -> None:
        """The rows are as they are before a step."""
        if self._window is not None:
            np.copyto(self._before, self._main.num_computed)

    def add(self, row: int) -> None:
        """A row has a new sequence: what was found of it in blocks was read by this model too, as far as is known."""
        self._batch.num_computed[row] = self._main.num_computed[row]

    def propose(self, rows: np.ndarray, wanted: dict[str, int]) -> dict[str, list[int]]:
        """Up to ``wanted`` tokens to follow each of these sequences (0: it reads only), after a step in which the
        sequences ``rows`` int64 [S] got tokens. Never raises: nothing is guessed where it fails."""
        if self._ahead:  # it has read guesses of its own
            computed, read = self._main.num_computed, self._batch.num_computed
            read[rows] = np.minimum(read[rows], computed[rows])
            self._ahead.difference_update(rows.tolist())
        try:
            return self._propose(wanted) if wanted else {}
        except Exception:
            if not self._failed:
                logger.exception("the draft model failed; sequences go on without drafts where it does")
            self._failed = True
            return {}

    def _propose(self, wanted: dict[str, int]) -> dict[str, list[int]]:
        main, read = self._main, self._batch.num_computed
        rows = np.array([main.row_of[req_id] for req_id in wanted], dtype=np.int64)
        self._ahead.update(rows.tolist())
        known = main.num_computed[rows] + 1
        # The last guess is not read, and all else must have a place.
        room = main.num_blocks[rows] * main.block_size - known + 1
        asked = np.array(list(wanted.values()))
        counts = np.minimum(asked, np.minimum(room, self._max_len - known))
        end = np.where(asked > 0, known, known - 1)
        start = np.minimum(read[rows], known - 1)
        if self._window is not None:  # what a window had passed before the step is another sequence's by now
            start = np.maximum(start, self._before[rows] - self._window + 1)
        unread = np.where((counts > 0) | ((asked == 0) & (known <= self._max_len)), end - start, 0)
        reads = np.minimum(unread, np.maximum(self._max_rows - (np.cumsum(unread) - unread), 0))
        some = np.flatnonzero(reads)
        if not len(some):
            return {}
        read[rows[some]] = start[some]
        self._states.known[rows] = known
        ready = np.flatnonzero((reads == unread) & (reads > 0) & (asked > 0))
        sampled = self._sampled([*wanted], rows, known, ready)
        inputs = self._runner.make_inputs(rows[some], reads[some])
        if len(ready):
            ends = inputs.starts[1 + np.searchsorted(some, ready)] - 1
            tokens = self._runner.sample(self._runner.run_to_logits(inputs, ends, sampled), sampled)()
        else:
            self._runner.run(inputs)
        read[rows[some]] += reads[some]
        drafts: dict[str, list[int]] = {}
        guessed = 0
        while len(ready):
            valid = ~np.array(tokens.invalid)
            for req_id, token in zip(sampled.req_ids, tokens.token_ids, strict=True):
                drafts.setdefault(req_id, []).append(token)
            guessed += 1
            ready = ready[valid & (counts[ready] > guessed)]
            if len(ready):
                sampled = self._sampled([*wanted], rows, known + guessed, ready)
                tokens = self._step(sampled)
        return drafts

    def _sampled(self, req_ids: list[str], rows: np.ndarray, positions: np.ndarray, which: np.ndarray) -> SampledRows:
        return SampledRows([req_ids[i] for i in which], rows[which], positions[which], _no_bitmask)

    def _step(self, sampled: SampledRows) -> SampledTokens:
        """Read the last guess of each sequence and make the next."""
        pending = self._runner.decode(sampled)
        if pending is None:
            inputs = self._runner.make_inputs(sampled.rows, np.ones(len(sampled.rows), dtype=np.int64))
            logits = self._runner.run_to_logits(inputs, inputs.starts[1:] - 1, sampled)
            pending = self._runner.sample(logits, sampled)
        self._batch.num_computed[sampled.rows] += 1
        return pending()


def _no_bitmask() -> Tensor | None:
    return None
