"""The GPU's part of a step: the host makes step N + 1 while the device runs step N.

Steps are captured where they can be: decodes with their sampling (`DecodeGraphs`), the layers of those with prompts
(`PrefillGraphs`). Sampling with penalties, grammars, log-probabilities and the like launches each operation by itself,
after the captured model.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from octavo.interface.engine_config import EngineConfig
from octavo.interface.sampling_params import SamplingParams
from octavo.interface.step import SchedulerOutput
from octavo.layers.attention import ForwardContext
from octavo.layers.decoder import DeferredHidden
from octavo.memory.capture_sizes import decode_sizes, draft_sizes, drafter_sizes, prefill_sizes
from octavo.models.base import CausalLM, Model
from octavo.models.state_reader import StateReader
from octavo.sample import devices
from octavo.sample.logprobs import LogprobsTensors
from octavo.sample.metadata import SamplerOutput, SamplingMetadata
from octavo.sample.sampler import Sampler
from octavo.worker.gpu.decode_graphs import DecodeGraphs
from octavo.worker.gpu.device_batch import DeviceBatch
from octavo.worker.gpu.device_drafter import DeviceDrafter, ModelDrafter, StateDrafter
from octavo.worker.gpu.draft_graphs import DraftGraphs
from octavo.worker.gpu.draft_plan import packed_plan, unpack_plan
from octavo.worker.gpu.graphs import Capture, run_eagerly
from octavo.worker.gpu.prefill_graphs import PrefillGraphs
from octavo.worker.gpu.step_graphs import Graphs, StepGraphs
from octavo.worker.gpu.step_parts import StepParts
from octavo.worker.host_copy import HostCopy
from octavo.worker.input_batch import StepInputs
from octavo.worker.lora import AdapterManager, slots_at
from octavo.worker.request_states import RequestStates
from octavo.worker.step import DraftRows, Logits, PendingTokens, SampledRows, SampledTokens, pad_indices
from octavo.worker.verification import rounds_of
from octavo_kernels.gpu_parts import is_on

DrafterParts = tuple[Model, list[Tensor]]
UNKNOWN = -1  # a token that the device has and the host not yet


class GPURunner:
    """A `DeviceRunner` whose steps may overlap: results are copied to the host when they are asked for."""

    recording_obstacle = None
    states: Tensor | None = None

    def __init__(
        self,
        config: EngineConfig,
        model: CausalLM,
        requests: RequestStates,
        kv_caches: list[Tensor],
        capture: Capture = run_eagerly,
        drafter: DrafterParts | None = None,
        adapters: AdapterManager | None = None,
    ) -> None:
        """``drafter``: a model that guesses on the device, and its part of the blocks; ``adapters`` that rows may
        have. Steps in which none has one are captured without."""
        self.model, self.requests, self.kv_caches = model, requests, kv_caches
        self.sampler = Sampler()
        self._row_multiple = model.row_multiple
        sizes = decode_sizes(config, model.row_multiple)
        num_drafts = config.speculative.num_speculative_tokens
        device, has_adapters = requests.device, adapters is not None
        has_mrope = config.model.has_mrope
        self.batch = DeviceBatch(
            requests.batch, sizes[-1], device, num_drafts, drafter is not None, has_adapters, has_mrope
        )
        parts = StepParts(model, kv_caches, self.batch, requests.sampling, capture)
        self._adapters = adapters
        self._slots: np.ndarray | None = None  # int32 [T] of the step's tokens; None: no row has an adapter
        self.drafter: DeviceDrafter | None = None
        self._reader: StateDrafter | None = None  # the drafter, if it reads what the model computes
        if drafter is not None:
            own = replace(parts, model=drafter[0], kv_caches=drafter[1])
            guesses = drafter_sizes(config, model.row_multiple)
            if isinstance(drafter[0], StateReader):
                largest = max(sizes + draft_sizes(config, model.row_multiple))
                self.drafter = self._reader = StateDrafter(own, guesses, largest, requests.batch)
            else:
                self.drafter = ModelDrafter(own, guesses)
        keeps_two = isinstance(self.drafter, ModelDrafter)
        guessed, most = draft_sizes(config, model.row_multiple), config.scheduler.max_num_seqs
        lora = replace(parts, adapters=adapters.model_adapters) if adapters is not None else None
        decodes = partial(DecodeGraphs, sizes=sizes, keep_two=keeps_two, reader=self._reader)
        self.decode_graphs = Graphs.build(decodes, parts, lora)
        self.draft_graphs: Graphs[DraftGraphs] | None = None
        if guessed:
            verified = partial(DraftGraphs, sizes=guessed, max_num_seqs=most, reader=self._reader)
            self.draft_graphs = Graphs.build(verified, parts, lora)
        self.prefill_graphs: PrefillGraphs | None = None
        if is_on("prompt-graphs") and (sizes := prefill_sizes(config)):
            self.prefill_graphs = PrefillGraphs(
                model, kv_caches, requests.batch, sizes, device, capture, adapters.model_adapters if adapters else None
            )
        self._read: Callable[[int], None] = _nothing  # has the drafter read the step under way
        # Rows of sequences that go on from what the device has sampled.
        self._sampled = np.zeros(len(requests.batch.num_computed), dtype=bool)
        # Rows by what their sampling needs beyond greedy and temperature.
        self._truncated: set[int] = set()
        self._uncaptured: set[int] = set()  # more than the captured sampler can do
        self._below_min_tokens: set[int] = set()

    @torch.inference_mode()
    def capture_all(self) -> int:
        """Capture every size now instead of when it is first needed. Returns their number."""
        every = (*self.decode_graphs.all(), *(self.draft_graphs.all() if self.draft_graphs else ()))
        found = [graphs for graphs in (*every, self.prefill_graphs, self.drafter) if graphs]
        for graphs in found:
            graphs.capture_all()
        return sum(len(graphs.sizes) for graphs in found)

    def update_rows(self, step: SchedulerOutput) -> None:
        """Bring new rows and blocks to the device."""
        host = self.requests.batch
        if step.scheduled_new_reqs:
            new = [host.row_of[data.req_id] for data in step.scheduled_new_reqs]
            for row, data in zip(new, step.scheduled_new_reqs, strict=True):
                for rows, belongs in (
                    (self._truncated, _is_truncated(data.sampling_params)),
                    (self._uncaptured, _is_uncaptured(data.sampling_params) or data.grammar is not None),
                    (self._below_min_tokens, self.requests.sampling.min_position(row) > 0),
                ):
                    (rows.add if belongs else rows.discard)(row)
            self.batch.set_rows(np.array(new, dtype=np.int64))
            self._sampled[new] = False
        self.batch.set_blocks(step.scheduled_cached_reqs)

    def decode(self, sampled: SampledRows, drafts: DraftRows) -> PendingTokens | None:
        """Two replays while nothing but the tokens changes. None: there are too many sequences, or drafts."""
        if drafts:
            return self._decode_drafts(sampled, drafts)
        graphs = self.decode_graphs.of(self._take_slots(sampled.rows, None))
        size = graphs.select_rows(sampled.rows)
        if size is None:
            return None
        model = graphs.model_graph(size)
        rows, sampler = graphs.selected, None
        if self._can_capture_sampling(rows):
            sampler = graphs.sampler_graph(size, not self._truncated.isdisjoint(rows))
        model.replay()
        self._read_later(graphs, size)
        count = len(sampled.rows)
        self._sampled[sampled.rows] = True
        if sampler is None:
            logits = Logits(self._logits_of(model.outputs[0])[:count])
            return self._sample(logits, sampled, model.outputs[1][:count])
        self.requests.sampling.table()  # brings changes to the device
        sampler.replay()
        token_ids, invalid = sampler.outputs
        return self._read_back(SamplerOutput(token_ids[:count], invalid[:count]), sampled)

    def _can_capture_sampling(self, rows: list[int]) -> bool:
        """True if captured samplers can do what these rows need."""
        if not is_on("captured-sampler"):
            return False
        if self._below_min_tokens:
            next_positions, sampling = self.requests.batch.num_computed + 1, self.requests.sampling
            self._below_min_tokens = {
                row for row in self._below_min_tokens if next_positions[row] < sampling.min_position(row)
            }
        return self._uncaptured.isdisjoint(rows) and self._below_min_tokens.isdisjoint(rows)

    def _take_slots(self, rows: np.ndarray, counts: np.ndarray | None) -> bool:
        """Note which adapters the tokens of the next step have: ``counts`` int64 [R] of each sequence, None: one.
        Whether they have any."""
        self._slots = None
        if self._adapters is None:
            return False
        slots: np.ndarray = self.requests.batch.adapter_slots[rows]
        if not (slots >= 0).any():
            return False
        self._adapters.begin_step(slots)
        self._slots = slots if counts is None else slots.repeat(counts)
        return True

    def _slots_of(self, indices: np.ndarray) -> Tensor | None:
        """The slots, on the device, of these tokens of the step, its padding included; None: no row has an adapter."""
        return None if self._slots is None else self._put(slots_at(self._slots, indices))

    def _applied(self, indices: np.ndarray) -> AbstractContextManager[None]:
        """A context for the computation of these tokens of the step, if it is not captured."""
        slots = self._slots_of(indices)
        if self._adapters is None or slots is None:
            return nullcontext()
        return self._adapters.model_adapters.applied(slots)

    def _logits_of(self, hidden: Tensor) -> Tensor:
        """Logits of all rows that a captured step has left."""
        with self._applied(np.arange(len(hidden))):
            return self.model.compute_logits(hidden)

    def _decode_drafts(self, sampled: SampledRows, drafts: DraftRows) -> PendingTokens | None:
        counts = drafts.counts
        has_lora = self._take_slots(sampled.rows, counts)
        if self.draft_graphs is None:
            return None
        graphs = self.draft_graphs.of(has_lora)
        size = graphs.select(sampled.rows, counts)
        if size is None:
            return None
        if self.drafter is None:
            self.batch.set_drafts(sampled.rows, drafts.tokens)
        self._sampled[sampled.rows] = True
        model, total, rows = graphs.model_graph(size), int(counts.sum()), sampled.rows.tolist()
        model.replay()
        self._read_later(graphs, size)
        if not self._can_capture_sampling(rows):
            logits = Logits(self._logits_of(model.outputs[0])[:total])
            return self._verify(logits, sampled, drafts, model.outputs[1][:total])
        self.requests.sampling.table()
        sampler = graphs.sampler_graph(size, not self._truncated.isdisjoint(rows))
        sampler.replay()
        token_ids, invalid, accepted = sampler.outputs
        result = SamplerOutput(token_ids[:total], invalid[:total])
        return self._read_back_drafts(result, accepted[: len(counts)], sampled, drafts)

    def make_inputs(self, rows: np.ndarray, num_scheduled: np.ndarray) -> StepInputs:
        """Tokens that only the device knows are filled in there."""
        self._take_slots(rows, num_scheduled)
        inputs = StepInputs(self.requests.batch, rows, num_scheduled, self._row_multiple)
        if self.drafter is not None:
            inputs.to(self.batch.device)
            self.batch.sampled_inputs(inputs, rows, num_scheduled, np.flatnonzero(self._sampled[rows]))
            new = ~self._sampled[rows]
            if new.any():
                self.batch.set_computed(rows[new], self.requests.batch.num_computed[rows[new]] + num_scheduled[new])
            return inputs
        unknown = (inputs.input_ids == UNKNOWN).nonzero()[:, 0]
        inputs.to(self.batch.device)
        if len(unknown):  # the last token of a sequence that was sampled in a step still under way
            owners = rows[np.searchsorted(inputs.starts, unknown.numpy(), side="right") - 1]
            inputs.input_ids[self._put(unknown.numpy())] = self.batch.last_tokens[self._put(owners)]
        self.batch.set_computed(rows, self.requests.batch.num_computed[rows] + num_scheduled)
        return inputs

    def run_to_logits(self, inputs: StepInputs, indices: np.ndarray, sampled: SampledRows) -> Logits:
        """Logits in the model's dtype."""
        return Logits(self.compute_logits(self.run(inputs), indices))

    def run(self, inputs: StepInputs) -> DeferredHidden:
        """All layers up to the last attention, as one graph where there is one large enough."""
        tokens, graphs = np.arange(len(inputs.positions)), self.prefill_graphs
        hidden = graphs.run(inputs, self._slots_of(tokens)) if graphs and inputs.images is None else None
        if hidden is None:
            context = ForwardContext(inputs.metadata, self.kv_caches, inputs.images)
            with self._applied(tokens):
                hidden = self.model.begin(inputs.input_ids, inputs.rotary_positions, context)
        if self.drafter is not None:
            self._read = partial(self.drafter.read_inputs, inputs, self.model, hidden)
        return hidden

    def _read_later(self, graphs: StepGraphs, size: int) -> None:
        """Have a drafter that reads states read those of a captured step, once its tokens are sampled."""
        if self._reader is not None:
            readers = [graphs.reader_graph(size, number) for number in range(self._reader.num_reads)]
            self._read = lambda number: readers[number].replay()

    def guess(self, step: SchedulerOutput) -> None:
        """Have the drafter, if there is one, read ``step`` and guess what follows it."""
        if self.drafter is None:
            return
        read, self._read = self._read, _nothing
        wanted = {req_id: count for req_id, count in step.num_draft_tokens.items() if count}
        rows = [self.requests.batch.row_of[req_id] for req_id in wanted]
        truncated = not self._truncated.isdisjoint(rows)
        self.drafter.guess(np.array(rows, dtype=np.int64), max(wanted.values(), default=0), truncated, read)

    def compute_logits(self, hidden: DeferredHidden, indices: np.ndarray) -> Tensor:
        """[len(indices), V] in the model's dtype."""
        padded = pad_indices(indices, self._row_multiple)
        rows = self._put(padded)
        hidden = tuple(tensor[rows] for tensor in hidden)
        with self._applied(padded):
            return self.model.compute_logits(self.model.finish(*hidden))[: len(indices)]

    def sample(self, logits: Logits, sampled: SampledRows) -> PendingTokens:
        """One operation at a time, whatever sampling needs."""
        return self._sample(logits, sampled, self._go_on(sampled))

    def _sample(self, logits: Logits, sampled: SampledRows, positions: Tensor | None) -> PendingTokens:
        """``positions`` int64 [S], of what is sampled, where the device alone knows them."""
        result = self.sampler(logits.values, _at(self.requests.sampling_metadata(sampled), positions))
        rows = self._put(sampled.rows)
        if self.drafter is not None:
            self.batch.push(rows, result.sampled_token_ids)
        else:
            self.batch.last_tokens[rows] = result.sampled_token_ids
        return self._read_back(result, sampled)

    def _go_on(self, sampled: SampledRows, drafts: bool = False) -> Tensor | None:
        """After a step with prompts, count its token of sequences that went on from what the device had sampled, unless
        what ``drafts`` are right does, and have the others do so. Returns the positions of what is sampled, int64 [S].
        None: the host knows."""
        if self.drafter is None:
            return None
        rows, batch, host = self._put(sampled.rows), self.batch, self.requests.batch
        is_new = ~self._sampled[sampled.rows]
        new, last = sampled.rows[is_new], sampled.positions[is_new] - 1
        if len(new):
            batch.last_tokens[self._put(new)] = self._put(host.token_ids[new, last].astype(np.int64))
        # Of prompts all was counted.
        batch.num_computed[rows] += self._put((~is_new).astype(np.int64) - int(drafts))
        self._sampled[sampled.rows] = True
        return batch.num_computed[rows] + int(drafts)

    def verify(self, logits: Logits, sampled: SampledRows, drafts: DraftRows) -> PendingTokens:
        """One operation at a time, whatever sampling needs; tokens after wrong drafts are drawn, too, and dropped."""
        if self.drafter is None:
            self.batch.set_drafts(sampled.rows, drafts.tokens)
            self.batch.num_computed[self._put(sampled.rows)] = self._put(sampled.positions - 1)  # as before the step
            return self._verify(logits, sampled, drafts, None)
        first = self._go_on(sampled, drafts=True)
        assert first is not None
        which = np.repeat(np.arange(len(sampled.rows)), drafts.counts)
        after = self._put(np.arange(len(which)) - drafts.first[which])
        return self._verify(logits, sampled, drafts, first[self._put(which)] + after)

    def _verify(
        self, logits: Logits, sampled: SampledRows, drafts: DraftRows, positions: Tensor | None
    ) -> PendingTokens:
        """``positions`` int64, of what is sampled after each token, where the device alone knows them; what it has
        counted is as before the step."""
        counts, first, count = drafts.counts, drafts.first, len(sampled.rows)
        which: np.ndarray = np.repeat(np.arange(count), counts)
        every = SampledRows(
            [sampled.req_ids[i] for i in which],
            sampled.rows[which],
            sampled.positions[which] + np.arange(len(which)) - first[which],
            lambda: _take(sampled.grammar_bitmask(), which),
        )
        result = self.sampler(logits.values, _at(self.requests.sampling_metadata(every), positions))
        plan = unpack_plan(self._put(packed_plan(sampled.rows, counts, len(which), count)), len(which), count)
        accepted = self.batch.accept(plan, result.sampled_token_ids, result.invalid)
        return self._read_back_drafts(result, accepted, sampled, drafts)

    def _read_back_drafts(
        self, result: SamplerOutput, accepted: Tensor, sampled: SampledRows, drafts: DraftRows
    ) -> PendingTokens:
        """Read back as `_read_back` does. Sequences with drafts are in no other step until the returned call has
        counted their tokens.

        ``result`` of all rows of ``drafts``; ``accepted`` int64 [S].
        """
        batch, rows, positions, logprobs = self.requests.batch, sampled.rows, sampled.positions, result.logprobs
        batch.token_ids[rows, positions] = UNKNOWN
        generation, counts = batch.row_generation[rows], drafts.counts
        tensors = [result.sampled_token_ids, result.invalid, accepted]
        tensors += [logprobs.token_ids, logprobs.logprobs, logprobs.ranks] if logprobs is not None else []
        copy = HostCopy(tensors)

        def pending() -> SampledTokens:
            token_ids, invalid, accepted, *rest = copy.wait()
            right, same = accepted.numpy(), batch.row_generation[rows] == generation
            first, ids = drafts.first, token_ids.numpy()
            batch.num_computed[rows[same]] -= (counts - 1 - right)[same]
            for i in np.flatnonzero(same):
                batch.token_ids[rows[i], positions[i] :][: right[i] + 1] = ids[first[i] :][: right[i] + 1]
            logprobs = LogprobsTensors(*rest) if rest else None
            every = SampledTokens(token_ids.tolist(), invalid.tolist(), logprobs, same.tolist())
            return rounds_of(sampled.req_ids, first, right, every)

        return pending

    def _read_back(self, result: SamplerOutput, sampled: SampledRows) -> PendingTokens:
        """Start copying the results to the host; the returned call waits for them."""
        batch, rows, positions, logprobs = self.requests.batch, sampled.rows, sampled.positions, result.logprobs
        batch.token_ids[rows, positions] = UNKNOWN
        generation = batch.row_generation[rows]
        tensors = [result.sampled_token_ids, result.invalid]
        tensors += [logprobs.token_ids, logprobs.logprobs, logprobs.ranks] if logprobs is not None else []
        copy = HostCopy(tensors)

        def pending() -> SampledTokens:
            token_ids, invalid, *rest = copy.wait()
            # A row may have gone to another sequence since: what it holds is that one's.
            same = batch.row_generation[rows] == generation
            batch.token_ids[rows[same], positions[same]] = token_ids.numpy()[same]
            logprobs = LogprobsTensors(*rest) if rest else None
            return SampledTokens(token_ids.tolist(), invalid.tolist(), logprobs, same.tolist())

        return pending

    def _put(self, array: np.ndarray) -> Tensor:
        return devices.put(array, self.batch.device)


def _at(metadata: SamplingMetadata, positions: Tensor | None) -> SamplingMetadata:
    """The same at ``positions`` int64 [R]."""
    if positions is None or metadata.kernel_rows is None:
        return metadata
    return replace(metadata, kernel_rows=replace(metadata.kernel_rows, positions=positions))


def _take(bitmask: Tensor | None, which: np.ndarray) -> Tensor | None:
    return None if bitmask is None else bitmask[torch.from_numpy(which)]


def _nothing(number: int) -> None:
    """There is nothing to be read."""


def _is_truncated(params: SamplingParams) -> bool:
    return not params.greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)


def _is_uncaptured(params: SamplingParams) -> bool:
    """True if sampling needs more than greedy, temperature, top-k, top-p and min-p."""
    return bool(
        params.logprobs is not None
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1
        or params.logit_bias
        or params.allowed_token_ids is not None
        or params.bad_words_token_ids
        or params.shapes_logits
    )
