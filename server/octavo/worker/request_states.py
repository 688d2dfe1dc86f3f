"""State of the sequences that have a row: tokens, blocks, sampling, grammars, wanted log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import compress, repeat

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.interface.engine_config import EngineConfig
from octavo.interface.messages import LogprobsLists
from octavo.interface.sampling_params import SamplingParams
from octavo.interface.step import ModelRunnerOutput, NewRequestData
from octavo.sample import devices
from octavo.sample.metadata import SamplingMetadata
from octavo.sample.states import SamplingStates
from octavo.worker.grammars.pool import GrammarPool
from octavo.worker.grammars.sequences import SequenceGrammars
from octavo.worker.grammars.shared_masks import MakeGrammars
from octavo.worker.input_batch import InputBatch
from octavo.worker.pooler import Pooler, PoolingHead
from octavo.worker.prompt_logprobs import PromptLogprobs
from octavo.worker.step import Logits, SampledRows, SampledTokens, StepDraw
from octavo_kernels.cpu import Drawn

NOTHING_TO_SAMPLE = (
    "no token could be sampled: the logits hold NaN or infinity (damaged weights, or a dtype too narrow: try float32), "
    "or the request's constraints forbid every token"
)
NOTHING_ALLOWED = (
    "allows no token together with the request's other constraints (allowed_token_ids, bad_words, min_tokens, "
    "logit_bias): remove one of them"
)


class RequestStates:
    """The state of running sequences between steps, one row each, whatever the device."""

    def __init__(
        self,
        config: EngineConfig,
        device: torch.device,
        sample_with_kernels: bool,
        pooling_head: PoolingHead,
        num_groups: int = 1,
        make_grammars: MakeGrammars = SequenceGrammars,
        state_blocks: int = 0,
    ) -> None:
        """``sample_with_kernels``: on a CPU too, as is always done elsewhere; ``num_groups`` and ``state_blocks``: see
        `InputBatch`."""
        scheduler, vocab_size = config.scheduler, config.model.vocab_size
        self.device = device
        sizes = scheduler.max_num_seqs, scheduler.max_model_len, config.cache.block_size
        self.batch = InputBatch(*sizes, num_groups, state_blocks)
        self.sampling = SamplingStates(scheduler.max_num_seqs, vocab_size, device, sample_with_kernels)
        num_drafts = config.speculative.num_speculative_tokens
        self.grammar_pool = GrammarPool(config.model, scheduler.max_num_seqs, num_drafts)
        self.grammars = make_grammars(self.grammar_pool, vocab_size)
        self.pooler = Pooler(pooling_head)
        self.prompt_logprobs = PromptLogprobs(device)
        self._num_logprobs: dict[str, int] = {}  # of the sequences that want them, -1: the whole vocabulary
        self._constrained: set[str] = set()  # sequences with a grammar and further constraints
        self._default_seed = config.model.seed

    def remove(self, req_ids: Iterable[str]) -> None:
        """Give rows up; sequences that have none are ignored."""
        for req_id in req_ids:
            row = self.batch.remove(req_id)
            if row is not None:
                self.sampling.remove_request(row)
                self._num_logprobs.pop(req_id, None)
                self.prompt_logprobs.remove(req_id)
                self.pooler.remove(req_id)
                self.grammars.remove(req_id)
                self._constrained.discard(req_id)

    def add(self, data: NewRequestData) -> None:
        """Give a sequence a row."""
        req_id, params = data.req_id, data.sampling_params
        prompt, generated = data.token_ids[: data.num_prompt_tokens], data.token_ids[data.num_prompt_tokens :]
        row, stops = self.batch.add(data), data.stop_token_ids
        self.sampling.add_request(row, params, prompt, generated, stops, data.sample_index, self._default_seed)
        if params.logprobs is not None:
            self._num_logprobs[req_id] = params.logprobs
        if params.prompt_logprobs is not None and data.sample_index == 0:
            self.prompt_logprobs.add(req_id, params.prompt_logprobs)
        if data.pooling is not None:
            self.pooler.add(req_id, data.pooling)
        if data.grammar is not None:
            self.grammars.add(req_id, data.grammar, generated)
            if _is_constrained(params):
                self._constrained.add(req_id)

    def sampling_metadata(self, sampled: SampledRows) -> SamplingMetadata:
        """The inputs of sampling these rows; waits for the grammars' bitmask."""
        metadata = self.sampling.make_metadata(sampled.rows.tolist(), sampled.positions.tolist())
        bitmask = sampled.grammar_bitmask()
        return metadata if bitmask is None else replace(metadata, grammar_bitmask=devices.put(bitmask, self.device))

    def wants_logits(self, sampled: SampledRows) -> bool:
        """True if sampling these rows takes more than each one's best token."""
        if self.grammars.hold:
            return True
        return not self.sampling.is_greedy_only(sampled.rows, sampled.positions)

    def draw(self, logits: Logits, sampled: SampledRows) -> Drawn | None:
        """The tokens of these rows, by the C kernel; waits for the grammars' bitmask. None: only `Sampler` can."""
        if not self.sampling.draws or logits.values.dtype != torch.float32:
            return None
        if self.needs_sampler(sampled) is not None:
            return None
        bitmask = sampled.grammar_bitmask()
        return self.sampling.draw(logits.values, sampled.rows, sampled.positions, logits.best, bitmask)

    def step_draw(self, sampled: SampledRows) -> StepDraw | None:
        """A draw of the tokens of these rows in their step's program. None: `draw` may, once the step has run."""
        if not self.sampling.draws or self.grammars.hold or self.needs_sampler(sampled) is not None:
            return None
        return self.sampling.step_draw(sampled.rows, sampled.positions)

    def needs_sampler(self, sampled: SampledRows) -> NDArray[np.bool_] | None:
        """See `SamplingStates.needs_sampler`."""
        return self.sampling.needs_sampler(sampled.rows)

    def wanted_logprobs(self, req_ids: list[str]) -> list[int | None] | None:
        """The number of alternatives that each sequence asked for (-1: all, None: no log-probabilities); None: nobody
        did."""
        return [self._num_logprobs.get(req_id) for req_id in req_ids] if self._num_logprobs else None

    def add_tokens(self, output: ModelRunnerOutput, req_ids: list[str], tokens: SampledTokens) -> None:
        """Put the sequences' tokens, or why there is none, into ``output``, and tell the grammars."""
        output.sampled_token_ids = {req_id: [token] for req_id, token in zip(req_ids, tokens.token_ids, strict=True)}
        if len(self.grammars):
            first = compress(zip(req_ids, tokens.token_ids, strict=True), tokens.same_sequence or repeat(True))
            accepted = {req_id: [token] for req_id, token in first}
            for some, later in tokens.later_rounds:
                for req_id, token, invalid in zip(some, later.token_ids, later.invalid, strict=True):
                    if not invalid and req_id in accepted:
                        accepted[req_id].append(token)
            output.grammar_errors = self.grammars.accept(accepted)
        for req_id in compress(req_ids, tokens.invalid):
            if req_id in self._constrained:
                output.grammar_errors.setdefault(req_id, NOTHING_ALLOWED)
            elif req_id not in output.grammar_errors:
                output.errors[req_id] = NOTHING_TO_SAMPLE

    def identities(self, req_ids: list[str]) -> dict[str, tuple[int, int]]:
        """Identify these sequences, as others may have their ids later; empty if that makes no difference."""
        batch = self.batch
        rows = {req_id: batch.row_of[req_id] for req_id in req_ids} if len(self.grammars) else {}
        return {req_id: (row, int(batch.row_generation[row])) for req_id, row in rows.items()}

    def take_tokens(self, output: ModelRunnerOutput, sampled: Mapping[str, tuple[int, int]]) -> None:
        """Tell the grammars what another stage has ``sampled`` (see `identities`), and put what they say of it into
        ``output``."""
        rows = {req_id: self.batch.row_of.get(req_id, -1) for req_id in sampled}
        accepted = {
            req_id: output.sampled_token_ids[req_id]
            for req_id, row in rows.items()
            if row >= 0 and sampled[req_id] == (row, self.batch.row_generation[row])
        }
        for req_id, error in self.grammars.accept(accepted).items():
            output.grammar_errors[req_id] = error
            output.errors.pop(req_id, None)


def add_logprobs(
    output: ModelRunnerOutput, req_ids: list[str], wanted: list[int | None], tokens: SampledTokens
) -> None:
    """Put the sequences' log-probabilities into ``output``; ``wanted`` as of `RequestStates.wanted_logprobs`."""
    if tokens.logprobs is None:
        return
    token_ids, values = tokens.logprobs.token_ids.tolist(), tokens.logprobs.logprobs.tolist()
    ranks = tokens.logprobs.ranks.tolist()
    for i, (req_id, count) in enumerate(zip(req_ids, wanted, strict=True)):
        if count is not None:
            end = count + 1 if count >= 0 else None
            output.logprobs[req_id] = LogprobsLists([token_ids[i][:end]], [values[i][:end]], [ranks[i]])


def _is_constrained(params: SamplingParams) -> bool:
    return bool(
        params.allowed_token_ids is not None or params.bad_words_token_ids or params.logit_bias or params.min_tokens
    )
