"""Turns a SchedulerOutput into tensors, runs the model and the sampler, and reads the results back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, compress

import numpy as np
import torch

import octavo_kernels
from octavo.interface.engine_config import EngineConfig
from octavo.interface.messages import LogprobsLists
from octavo.interface.sampling_params import SamplingParams
from octavo.interface.step import ModelRunnerOutput, NewRequestData, PendingOutput, SchedulerOutput
from octavo.layers.attention import ForwardContext
from octavo.models.base import CausalLM
from octavo.sample.logprobs import LogprobsTensors, compute_prompt_logprobs
from octavo.sample.metadata import SamplingMetadata
from octavo.sample.sampler import Sampler
from octavo.sample.states import SamplingStates
from octavo.worker.cpu.recorded_steps import RecordedSteps, States
from octavo.worker.grammar import SequenceGrammars
from octavo.worker.grammar_pool import GrammarPool
from octavo.worker.input_batch import InputBatch, StepInputs
from octavo.worker.pooler import Pooler
from octavo_kernels.cpu import Prefault

Arriving = Callable[[], list[torch.Tensor]]  # tensors on their way to the host

# Rows of logits made at once for prompt_logprobs: [256, vocabulary] float32 is 50 MB for 49k entries.
PROMPT_LOGPROBS_ROWS = 256

NOTHING_TO_SAMPLE = (
    "no token could be sampled: the logits hold NaN or infinity (damaged weights, or a dtype too narrow: try float32), "
    "or the request's constraints forbid every token"
)
NOTHING_ALLOWED = (
    "leaves nothing to say together with the request's other limits (allowed_token_ids, bad_words, min_tokens, "
    "logit_bias): they forbid every token that may follow; drop one of them"
)


class ModelRunner:
    """Runs steps of one model on one device. ``kv_caches``: one tensor a layer."""

    samples_with_kernels = False  # on a CPU too

    def __init__(
        self, config: EngineConfig, model: CausalLM, device: torch.device, kv_caches: list[torch.Tensor]
    ) -> None:
        self.config = config
        self.model = model
        self.row_multiple = model.row_multiple
        self.device = device
        max_num_seqs, vocab_size = config.scheduler.max_num_seqs, config.model.vocab_size
        self.batch = InputBatch(max_num_seqs, config.scheduler.max_model_len, config.cache.block_size)
        self.states = SamplingStates(max_num_seqs, vocab_size, device, self.samples_with_kernels)
        self.sampler = Sampler()
        self.kv_caches = kv_caches
        self._recorded_steps: RecordedSteps | None = None
        self._prefault: Prefault | None = None
        if device.type == "cpu":
            self._prefault = Prefault(kv_caches)
            self._recorded_steps = RecordedSteps(model, self.batch, kv_caches, config.scheduler.max_num_batched_tokens)
        self._logprobs: dict[str, int] = {}  # sequences that want them -> how many alternatives
        self._prompt_logprobs: dict[str, int] = {}
        self.pooler = Pooler()
        self.grammar_pool = GrammarPool(config.model, max_num_seqs)
        self._limited: set[str] = set()  # sequences with a grammar and further limits of what they may say
        self.grammars = SequenceGrammars(self.grammar_pool, vocab_size)

    @torch.inference_mode()
    def execute_model(self, step: SchedulerOutput) -> PendingOutput:
        """Compute one step; its order is the SchedulerOutput's contract: drop rows, copy blocks, add rows, compute."""
        self._update_rows(step)
        req_ids = list(step.num_scheduled_tokens)
        rows = np.array([self.batch.row_of[req_id] for req_id in req_ids], dtype=np.int64)
        num_scheduled = np.fromiter(step.num_scheduled_tokens.values(), dtype=np.int64, count=len(rows))
        # A prompt that is pooled ends among those to be sampled, but no token is.
        bitmask = self.grammars.start_fill([req_id for req_id in step.sampled_req_ids if req_id not in self.pooler])
        output = ModelRunnerOutput()
        if len(req_ids) == len(step.sampled_req_ids) == step.total_num_scheduled_tokens and not len(self.pooler):
            decoded = self._decode(output, req_ids, rows, bitmask)
            if decoded is not None:
                return decoded
        inputs = self._make_inputs(rows, num_scheduled)
        sampled = set(step.sampled_req_ids)
        indices = np.array([i for i, req_id in enumerate(req_ids) if req_id in sampled], dtype=np.int64)
        if self._recorded_steps and len(indices) and not self._prompt_logprobs and not len(self.pooler):
            wants = self._wants_logits(rows[indices], (self.batch.num_computed[rows] + num_scheduled)[indices])
            found = self._recorded_steps.run(inputs, inputs.starts[indices + 1] - 1, wants)
            if found is not None:
                self.batch.num_computed[rows] += num_scheduled
                ids = [req_ids[i] for i in indices]
                return self._sample(output, found.values, ids, rows[indices], bitmask, found.best)
        states = self._begin(inputs)
        late: list[Callable[[], None]] = []  # adds what is still on its way to the host
        if self._prompt_logprobs:
            states = tuple(state.clone() for state in states)  # a recording keeps them for one call only
            late += self._prompt_logprobs_of(output, inputs, states, req_ids)
        self.batch.num_computed[rows] += num_scheduled
        if len(self.pooler):
            late += self._pool(output, sampled, inputs, self.model.finish(*states), req_ids)
            indices = np.array([i for i, req_id in enumerate(req_ids) if req_id in sampled], dtype=np.int64)
        pending: PendingOutput = lambda: output  # noqa: E731
        if len(indices):
            logits = self._logits(states, inputs.starts[indices + 1] - 1)
            pending = self._sample(output, logits, [req_ids[i] for i in indices], rows[indices], bitmask)
        return _after(late, pending) if late else pending

    def _make_inputs(self, rows: np.ndarray, num_scheduled: np.ndarray) -> StepInputs:
        return StepInputs(self.batch, rows, num_scheduled, self.row_multiple)

    def _begin(self, inputs: StepInputs) -> States:
        """`CausalLM.begin` of a step. What is returned may be valid for the next call alone."""
        states = self._recorded_steps.begin(inputs) if self._recorded_steps else None
        if states is None:
            context = ForwardContext(inputs.metadata, self.kv_caches)
            states = self.model.begin(inputs.input_ids, inputs.positions, context)
        return states

    def _decode(
        self,
        output: ModelRunnerOutput,
        req_ids: list[str],
        rows: np.ndarray,
        bitmask: Callable[[], torch.Tensor | None],
    ) -> PendingOutput | None:
        """A step in which every sequence computes one token and gets one. None: there is no short way to do it."""
        if self._recorded_steps is None:
            return None
        wants = self._wants_logits(rows, self.batch.num_computed[rows] + 1)
        found = self._recorded_steps.decode(rows, wants)
        if found is None:
            return None
        self.batch.num_computed[rows] += 1
        return self._sample(output, found.values, req_ids, rows, bitmask, found.best)

    def _update_rows(self, step: SchedulerOutput) -> None:
        for req_id in step.finished_req_ids:
            row = self.batch.remove(req_id)
            if row is not None:
                self.states.remove_request(row)
                self._logprobs.pop(req_id, None)
                self._prompt_logprobs.pop(req_id, None)
                self.pooler.remove(req_id)
                self.grammars.remove(req_id)
                self._limited.discard(req_id)
        if step.block_copies:
            octavo_kernels.copy_blocks(self.kv_caches, self._put(np.array(step.block_copies, dtype=np.int64)))
        for data in step.scheduled_new_reqs:
            self._add_row(data)
        for change in step.scheduled_cached_reqs:
            self.batch.update_blocks(change)
        if self._prefault:
            self._prefault.mark_used(self.batch.highest_block)

    def _add_row(self, data: NewRequestData) -> None:
        row = self.batch.add(data)
        self.states.add_request(
            row,
            data.sampling_params,
            data.token_ids[: data.num_prompt_tokens],
            data.token_ids[data.num_prompt_tokens :],
            stop_token_ids=data.stop_token_ids,
            sample_index=data.sample_index,
            default_seed=self.config.model.seed,
        )
        if data.sampling_params.logprobs is not None:
            self._logprobs[data.req_id] = data.sampling_params.logprobs
        if data.sampling_params.prompt_logprobs is not None and data.sample_index == 0:
            self._prompt_logprobs[data.req_id] = data.sampling_params.prompt_logprobs
        if data.pooling is not None:
            self.pooler.add(data.req_id, data.pooling)
        if data.grammar is not None:
            if _is_limited(data.sampling_params):
                self._limited.add(data.req_id)
            self.grammars.add(data.req_id, data.grammar, data.token_ids[data.num_prompt_tokens :])

    def _pool(
        self,
        output: ModelRunnerOutput,
        finished: set[str],
        inputs: StepInputs,
        hidden: torch.Tensor,
        req_ids: list[str],
    ) -> Iterator[Callable[[], None]]:
        """Embeddings of the ``finished`` prompts, which leave that set: no token is sampled for them. Each call adds
        one to ``output``."""
        for i, req_id in enumerate(req_ids):
            if req_id in self.pooler:
                part = hidden[int(inputs.starts[i]) : int(inputs.starts[i + 1])]
                vector = self.pooler.take(req_id, part, req_id in finished)
                if vector is not None:
                    yield partial(_add_embedding, output, req_id, self._bring([vector]))
                    finished.discard(req_id)

    def _put(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def _logits(self, states: States, indices: np.ndarray) -> torch.Tensor:
        """float32 [len(indices), vocabulary] from the given rows of what `CausalLM.begin` returned."""
        padded = np.zeros(-(-len(indices) // self.row_multiple) * self.row_multiple, dtype=np.int64)
        padded[: len(indices)] = indices
        rows = self._put(padded)
        return self._head(tuple(state[rows] for state in states))[: len(indices)]

    def _head(self, states: States) -> torch.Tensor:
        logits = self._recorded_steps.logits(states) if self._recorded_steps else None
        return self.model.compute_logits(self.model.finish(*states)) if logits is None else logits

    def _sample(
        self,
        output: ModelRunnerOutput,
        logits: torch.Tensor,
        ids: list[str],
        rows: np.ndarray,
        bitmask: Callable[[], torch.Tensor | None],
        best: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> PendingOutput:
        """A token for each of the sequences ``ids``, which have just computed all that they have."""
        positions = self.batch.num_computed[rows]
        metadata = self._sampling_metadata(rows, positions, bitmask)
        if best is not None and metadata.is_greedy_only:
            # No operation of torch's: after a step the caches hold nothing of it, and each takes 50 us.
            tokens, invalid, logprobs = best[0].tolist(), [x - x != 0.0 for x in best[1].tolist()], None
        else:
            result = self.sampler(logits, metadata, best)
            tokens, invalid = result.sampled_token_ids.tolist(), result.invalid.tolist()
            logprobs = result.logprobs
        # The token that a sequence's next step reads. One that ends at the model's limit has no further step.
        self.batch.token_ids[rows, positions] = tokens
        self._report(output, ids, tokens, invalid)
        if logprobs is not None:
            add_logprobs(output, ids, self._wanted_logprobs(ids), logprobs)
        return lambda: output

    def _wants_logits(self, rows: np.ndarray, positions: np.ndarray) -> bool:
        """Whether more than the best token of the sequences ``rows`` will be wanted at these positions."""
        if len(self.grammars):
            return True
        return not self.states.make_metadata(rows.tolist(), positions.tolist()).is_greedy_only

    def _sampling_metadata(
        self, rows: np.ndarray, positions: np.ndarray, bitmask: Callable[[], torch.Tensor | None]
    ) -> SamplingMetadata:
        metadata = self.states.make_metadata(rows.tolist(), positions.tolist())
        if len(self.grammars):
            mask = bitmask()
            metadata = replace(metadata, grammar_bitmask=None if mask is None else self._put(mask.numpy()))
        return metadata

    def _report(
        self,
        output: ModelRunnerOutput,
        ids: list[str],
        tokens: list[int],
        invalid: list[bool],
        live: list[bool] | None = None,
    ) -> None:
        """Tell what each of the sequences ``ids`` got; the host has everything by now. ``live``: which of them still
        have the row they had (None: all): another one may go by the same name since."""
        output.sampled_token_ids = {req_id: [token] for req_id, token in zip(ids, tokens, strict=True)}
        if len(self.grammars):
            sampled = zip(ids, tokens, live or [True] * len(ids), strict=True)
            output.grammar_errors = self.grammars.accept((req_id, token) for req_id, token, lives in sampled if lives)
        if any(invalid):
            for req_id in compress(ids, invalid):
                if req_id in output.grammar_errors:
                    continue
                if req_id in self._limited and req_id in self.grammars:
                    output.grammar_errors[req_id] = NOTHING_ALLOWED
                else:
                    output.errors[req_id] = NOTHING_TO_SAMPLE

    def _wanted_logprobs(self, ids: list[str]) -> list[int | None]:
        return [self._logprobs.get(req_id) for req_id in ids]

    def _prompt_logprobs_of(
        self,
        output: ModelRunnerOutput,
        inputs: StepInputs,
        states: States,
        req_ids: list[str],
    ) -> Iterator[Callable[[], None]]:
        """Position p's hidden state predicts prompt token p + 1: the step's rows before the prompt's last one. Each
        call adds one prompt's to ``output``."""
        for i, req_id in enumerate(req_ids):
            k = self._prompt_logprobs.get(req_id)
            if k is None:
                continue
            row = self.batch.row_of[req_id]
            start, until = int(self.batch.num_computed[row]), int(inputs.seq_lens[i])
            until = min(until, int(self.batch.num_prompt[row]) - 1)
            if until <= start:
                continue
            targets = self.batch.token_ids[row, start + 1 : until + 1].astype(np.int64)
            parts = []
            for at in range(0, until - start, PROMPT_LOGPROBS_ROWS):
                end = min(at + PROMPT_LOGPROBS_ROWS, until - start)
                logits = self._logits(states, np.arange(inputs.starts[i] + at, inputs.starts[i] + end))
                part = compute_prompt_logprobs(logits, self._put(targets[at:end]), k)
                parts.append(self._bring([part.token_ids, part.logprobs, part.ranks]))
            yield partial(_add_prompt_logprobs, output, req_id, parts)

    def _bring(self, tensors: list[torch.Tensor]) -> Arriving:
        """Start copying ``tensors`` to the host; the returned call waits for them."""
        return lambda: tensors


def _is_limited(params: SamplingParams) -> bool:
    return bool(
        params.allowed_token_ids is not None or params.bad_words_token_ids or params.logit_bias or params.min_tokens
    )


def _after(late: list[Callable[[], None]], pending: PendingOutput) -> PendingOutput:
    def all_of_it() -> ModelRunnerOutput:
        for add in late:
            add()
        return pending()

    return all_of_it


def _add_embedding(output: ModelRunnerOutput, req_id: str, arrived: Arriving) -> None:
    output.embeddings[req_id] = arrived()[0].tolist()


def _add_prompt_logprobs(output: ModelRunnerOutput, req_id: str, parts: list[Arriving]) -> None:
    columns = zip(*([tensor.tolist() for tensor in arrived()] for arrived in parts), strict=True)
    output.prompt_logprobs[req_id] = LogprobsLists(*(list(chain.from_iterable(column)) for column in columns))


def add_logprobs(
    output: ModelRunnerOutput, ids: list[str], wanted: list[int | None], logprobs: LogprobsTensors
) -> None:
    """``wanted``: how many alternatives each of the sequences asked for, -1 for all, None for no log-probabilities."""
    token_ids, values, ranks = logprobs.token_ids.tolist(), logprobs.logprobs.tolist(), logprobs.ranks.tolist()
    for i, (req_id, count) in enumerate(zip(ids, wanted, strict=True)):
        if count is not None:
            end = count + 1 if count >= 0 else None
            output.logprobs[req_id] = LogprobsLists([token_ids[i][:end]], [values[i][:end]], [ranks[i]])
