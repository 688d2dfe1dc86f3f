"""The runner of a device with a queue of its own (a GPU): the host puts step N + 1 together while step N runs.

Sampled tokens stay on the device, where the next step reads them; the host gets a copy when it asks for the step's
results. Steps in which every sequence computes one token are captured: the model with the preparation of its inputs as
one graph for each number of sequences, the head with the sampler as another; of steps with prompts, the layers
(`PromptGraphs`). What the plain sampler cannot do (penalties, grammars, log-probabilities, ...) is done after the
model's graph, one operation at a time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

import octavo_kernels
from octavo.interface.engine_config import EngineConfig
from octavo.interface.sampling_params import SamplingParams
from octavo.interface.step import ModelRunnerOutput, NewRequestData, PendingOutput, SchedulerOutput
from octavo.layers.attention import ForwardContext
from octavo.models.base import CausalLM
from octavo.sample.logprobs import LogprobsTensors
from octavo.sample.metadata import SamplerOutput
from octavo.worker.cpu.recorded_steps import States
from octavo.worker.gpu.device_state import PADDING, DeviceState
from octavo.worker.gpu.graphs import Capture, Captured, capture_sizes, run_again
from octavo.worker.gpu.prompt_graphs import PromptGraphs, prompt_sizes
from octavo.worker.input_batch import StepInputs
from octavo.worker.model_runner import Arriving, ModelRunner, add_logprobs
from octavo_kernels import SamplingRows

UNKNOWN = -1  # a token that the device has and the host not yet


def captured_sizes(config: EngineConfig, model: CausalLM) -> list[int]:
    """In float32 a row's bits shall not depend on how many rows are beside it.

    That much a CPU's GEMM promises for such sizes. cuBLAS does not: it chooses by the number of rows how it sums.
    """
    exact = config.model.dtype == "float32"
    return capture_sizes(config.scheduler.max_num_seqs, model.row_multiple if exact else 1)


class DeviceModelRunner(ModelRunner):
    """A `ModelRunner` whose steps may overlap. ``capture`` says how to capture one; the default does it anew."""

    samples_with_kernels = True

    def __init__(
        self,
        config: EngineConfig,
        model: CausalLM,
        device: torch.device,
        kv_caches: list[Tensor],
        capture: Capture = run_again,
    ) -> None:
        super().__init__(config, model, device, kv_caches)
        self._recorded_steps = None
        max_num_reqs, max_blocks = self.batch.block_table.shape
        self._capture = capture
        self.sizes = captured_sizes(config, model)
        self.state = DeviceState(max_num_reqs, max_blocks, self.batch.block_size, self.sizes[-1], device)
        self._rows = torch.full((self.sizes[-1],), PADDING, dtype=torch.int64, device=device)
        self._rows_now: list[int] = []  # what `_rows` holds
        self._models: dict[int, Captured] = {}
        self._prompts: PromptGraphs | None = None
        if sizes := prompt_sizes(config):
            self._prompts = PromptGraphs(model, kv_caches, self.batch, sizes, device, capture)
        self._samplers: dict[tuple[int, bool], Captured] = {}
        # Rows by what their sampling needs beyond greedy and temperature.
        self._truncated: set[int] = set()
        self._special: set[int] = set()
        self._early: set[int] = set()  # not past their min_tokens yet

    @property
    def num_sizes(self) -> int:
        return len(self.sizes) + (len(self._prompts.sizes) if self._prompts else 0)

    # -- captured steps ----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def capture_all(self) -> None:
        """Capture every size now, the largest first, instead of when it is first needed."""
        for size in reversed(self.sizes):
            self._model_step(size)
            for truncated in (False, True):
                self._sampler_step(size, truncated)
        if self._prompts:
            self._prompts.capture_all()

    def _model_step(self, size: int) -> Captured:
        if size not in self._models:
            rows = self._rows[:size]

            def work() -> tuple[Tensor, ...]:
                step, metadata = self.state.decode_inputs(rows)
                hidden = self.model(step.token_ids, step.positions, ForwardContext(metadata, self.kv_caches))
                return hidden, step.next_positions

            self._models[size] = self._captured_on_nothing(work)
        return self._models[size]

    def _sampler_step(self, size: int, truncated: bool) -> Captured:
        key = size, truncated
        if key not in self._samplers:
            rows, table = self._rows[:size], self.states.table()
            hidden, positions = self._model_step(size).outputs

            def work() -> tuple[Tensor, ...]:
                step = SamplingRows(table, rows, positions, truncated)
                drawn = octavo_kernels.sample(self.model.compute_logits(hidden), step)
                self.state.last_tokens[rows] = drawn.token_ids
                return drawn.token_ids, drawn.invalid

            self._samplers[key] = self._captured_on_nothing(work)
        return self._samplers[key]

    def _captured_on_nothing(self, work: Callable[[], tuple[Tensor, ...]]) -> Captured:
        """Capture while every row is padding, so that running the work changes nothing."""
        before = self._rows.clone()
        self._rows.fill_(PADDING)
        captured = self._capture(work)
        self._rows.copy_(before)
        return captured

    def _decode(
        self,
        output: ModelRunnerOutput,
        req_ids: list[str],
        rows: np.ndarray,
        bitmask: Callable[[], Tensor | None],
    ) -> PendingOutput | None:
        at = bisect_left(self.sizes, len(rows))
        if at == len(self.sizes):
            return None
        size = self.sizes[at]
        self._point_to(rows, size)
        model = self._model_step(size)
        if self._early:
            next_positions = self.batch.num_computed + 1
            self._early = {row for row in self._early if next_positions[row] < self.states.min_position(row)}
        plain = self._special.isdisjoint(self._rows_now) and self._early.isdisjoint(self._rows_now)
        sampler = self._sampler_step(size, not self._truncated.isdisjoint(self._rows_now)) if plain else None
        model.replay()
        self.batch.num_computed[rows] += 1
        if sampler is None:
            logits = self.model.compute_logits(model.outputs[0])[: len(rows)]
            return self._sample(output, logits, req_ids, rows, bitmask)
        self.states.table()  # brings changes over
        sampler.replay()
        token_ids, invalid = sampler.outputs
        return self._await(output, req_ids, rows, SamplerOutput(token_ids[: len(rows)], invalid[: len(rows)]))

    def _point_to(self, rows: np.ndarray, size: int) -> None:
        """Let the captured steps of ``size`` be about ``rows``: nothing to do while the batch stays the same."""
        wanted = rows.tolist() + [PADDING] * (size - len(rows))
        if wanted != self._rows_now:
            self._rows[:size] = self._put(np.array(wanted, dtype=np.int64))
            self._rows_now = wanted

    # -- any step ----------------------------------------------------------------------------------------------------

    def _put(self, array: np.ndarray) -> Tensor:
        return self.state.put(array)

    def _bring(self, tensors: list[Tensor]) -> Arriving:
        return _Copies(tensors).wait

    def _update_rows(self, step: SchedulerOutput) -> None:
        super()._update_rows(step)
        if step.scheduled_new_reqs:
            new = np.array([self.batch.row_of[data.req_id] for data in step.scheduled_new_reqs], dtype=np.int64)
            self.state.set_rows(self.batch, new)
        rows, columns, blocks = [], [], []
        for change in step.scheduled_cached_reqs:
            row = self.batch.row_of[change.req_id]
            end = int(self.batch.num_blocks[row])
            touched = [index for index, _ in change.replaced_blocks]
            touched += range(end - len(change.new_block_ids), end)
            rows += [row] * len(touched)
            columns += touched
            blocks += self.batch.block_table[row, touched].tolist()
        if rows:
            self.state.set_blocks(rows, columns, blocks)

    def _add_row(self, data: NewRequestData) -> None:
        super()._add_row(data)
        row = self.batch.row_of[data.req_id]
        params = data.sampling_params
        (self._truncated.add if _is_truncated(params) else self._truncated.discard)(row)
        (self._special.add if _is_special(params) or data.grammar is not None else self._special.discard)(row)
        (self._early.add if self.states.min_position(row) else self._early.discard)(row)

    def _make_inputs(self, rows: np.ndarray, num_scheduled: np.ndarray) -> StepInputs:
        inputs = super()._make_inputs(rows, num_scheduled)
        unknown = (inputs.input_ids == UNKNOWN).nonzero()[:, 0]
        inputs.to(self._put)
        if len(unknown):  # the last token of a sequence that was sampled in a step still under way
            owners = rows[np.searchsorted(inputs.starts, unknown.numpy(), side="right") - 1]
            inputs.input_ids[self._put(unknown.numpy())] = self.state.last_tokens[self._put(owners)]
        self.state.set_computed(self.batch, rows, self.batch.num_computed[rows] + num_scheduled)
        return inputs

    def _begin(self, inputs: StepInputs) -> States:
        states = self._prompts.begin(inputs) if self._prompts else None
        return super()._begin(inputs) if states is None else states

    def _sample(
        self,
        output: ModelRunnerOutput,
        logits: Tensor,
        ids: list[str],
        rows: np.ndarray,
        bitmask: Callable[[], Tensor | None],
        best: tuple[Tensor, Tensor] | None = None,
    ) -> PendingOutput:
        positions = self.batch.num_computed[rows]
        result = self.sampler(logits, self._sampling_metadata(rows, positions, bitmask), best)
        self.state.last_tokens[self._put(rows)] = result.sampled_token_ids
        return self._await(output, ids, rows, result)

    def _await(
        self, output: ModelRunnerOutput, ids: list[str], rows: np.ndarray, result: SamplerOutput
    ) -> PendingOutput:
        """Start copying the results to the host; the returned call waits for them."""
        batch, positions = self.batch, self.batch.num_computed[rows]
        batch.token_ids[rows, positions] = UNKNOWN
        lives, wanted = batch.lives[rows], self._wanted_logprobs(ids)
        logprobs = result.logprobs
        tensors = [result.sampled_token_ids, result.invalid]
        tensors += [logprobs.token_ids, logprobs.logprobs, logprobs.ranks] if logprobs is not None else []
        copies = self._bring(tensors)

        def pending() -> ModelRunnerOutput:
            tokens, invalid, *rest = copies()
            # A row may have gone to another sequence since: what it holds is that one's.
            same = batch.lives[rows] == lives
            batch.token_ids[rows[same], positions[same]] = tokens.numpy()[same]
            self._report(output, ids, tokens.tolist(), invalid.tolist(), same.tolist())
            if rest:
                add_logprobs(output, ids, wanted, LogprobsTensors(*rest))
            return output

        return pending


class _Copies:
    """Copies of a step's results on their way to the host: each has memory of its own until it has been read."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        if tensors[0].device.type == "cpu":
            self._host = [tensor.clone() for tensor in tensors]
            return
        self._host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        for host, tensor in zip(self._host, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> list[Tensor]:
        if self._event is not None:
            self._event.synchronize()
        return self._host


def _is_truncated(params: SamplingParams) -> bool:
    return not params.greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)


def _is_special(params: SamplingParams) -> bool:
    """Whether the captured sampler, which knows greedy, temperature, top-k, top-p and min-p, is never enough."""
    return bool(
        params.logprobs is not None
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1
        or params.logit_bias
        or params.allowed_token_ids is not None
        or params.bad_words_token_ids
    )
