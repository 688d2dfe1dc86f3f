"""Drives the steps of a model: keeps the requests' rows, has a device compute, and puts the results together."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

import octavo_kernels
from octavo.interface.step import ModelRunnerOutput, PendingOutput, SchedulerOutput
from octavo.layers.attention import StepImages
from octavo.models.base import CausalLM
from octavo.sample import devices
from octavo.worker.image_encoder import ImageEncoder
from octavo.worker.input_batch import InputBatch, StepInputs
from octavo.worker.kv_cache import KVCache
from octavo.worker.lora import AdapterManager
from octavo.worker.request_states import RequestStates, add_logprobs
from octavo.worker.spec_decode.draft_model import DraftModel
from octavo.worker.spec_decode.prediction_drafter import PredictionDrafter, StepStates
from octavo.worker.step import DeviceRunner, DraftRows, Logits, PendingTokens, SampledRows
from octavo.worker.verification import append_round, put_drafts

Late = tuple[dict[str, Any], str, Callable[[], Any]]  # part of an output, the sequence, waits for what belongs there


def rows_of(batch: InputBatch, step: SchedulerOutput) -> tuple[np.ndarray, np.ndarray]:
    """The rows of a step's sequences, and how many tokens each computes: int64 [R]."""
    scheduled = step.num_scheduled_tokens
    rows = np.array([batch.row_of[req_id] for req_id in scheduled], dtype=np.int64)
    return rows, np.fromiter(scheduled.values(), dtype=np.int64, count=len(rows))


class ModelRunner:
    """Runs steps of one model on one device."""

    def __init__(
        self,
        model: CausalLM,
        requests: RequestStates,
        device_runner: DeviceRunner,
        kv_cache: KVCache,
        drafter: DraftModel | PredictionDrafter | None = None,
        adapters: AdapterManager | None = None,
        images: ImageEncoder | None = None,
    ) -> None:
        self.model, self.images = model, images
        self.adapters = adapters
        self.drafter = drafter
        self.requests = requests
        self.device_runner = device_runner
        self.kv_cache = kv_cache

    @torch.inference_mode()
    def execute_model(self, step: SchedulerOutput) -> PendingOutput:
        """Start one step: update rows, make inputs, run, sample. Calling what is returned reads the results back."""
        if (replicas := self.model.tp.replicas) is not None:
            replicas.set_rows(step.rows_of_replicas)
        if not step.num_scheduled_tokens:
            self.model.serve_others()
            return ModelRunnerOutput
        self.update_rows(step)
        requests, batch, runner = self.requests, self.requests.batch, self.device_runner
        req_ids, pooler = list(step.num_scheduled_tokens), requests.pooler
        rows, num_scheduled = rows_of(batch, step)
        positions = batch.num_computed[rows] + num_scheduled
        if batch.states is not None:
            ended, drafted = set(step.sampled_req_ids), step.scheduled_spec_decode_tokens
            batch.states.begin_step(rows, [(i in ended) * (1 + len(drafted.get(i, ()))) for i in req_ids])
        # A prompt that is pooled ends among those to be sampled, but no token is.
        sampled_ids = [req_id for req_id in step.sampled_req_ids if req_id not in pooler]
        bitmask = requests.grammars.start_fill(sampled_ids, step.scheduled_spec_decode_tokens)
        num_drafts = sum(map(len, step.scheduled_spec_decode_tokens.values()))
        images = self.images_of(step, rows, num_scheduled)
        is_decode = (
            images is None and len(req_ids) == len(step.sampled_req_ids) == step.total_num_scheduled_tokens - num_drafts
        )
        if is_decode and not len(pooler):
            sampled = SampledRows(req_ids, rows, positions, bitmask)
            drafts = DraftRows(step.scheduled_spec_decode_tokens, sampled)
            tokens = runner.decode(sampled, drafts)
            if tokens is not None:
                batch.end_step(rows, positions)
                batch.num_computed[rows] -= drafts.num_rejected
                output = ModelRunnerOutput()
                self._draft(output, step, rows, self._states(rows, num_scheduled))
                return self._read_back(output, sampled, tokens, [])
        inputs = self.make_inputs(rows, num_scheduled, images)
        ended = set(step.sampled_req_ids)
        order = [i for i, req_id in enumerate(req_ids) if req_id in ended and req_id not in pooler]
        which = np.array(order, dtype=np.int64)
        sampled = SampledRows([req_ids[i] for i in order], rows[which], positions[which], bitmask)
        drafts = DraftRows(step.scheduled_spec_decode_tokens, sampled)
        indices = drafts.indices(inputs.starts[which + 1])
        output, late = ModelRunnerOutput(), list[Late]()
        logits = self._logits(step, req_ids, inputs, indices, sampled, output, late)
        tokens = self._sample(logits, sampled, drafts) if logits is not None else None
        batch.end_step(rows, positions)
        batch.num_computed[sampled.rows] -= drafts.num_rejected
        self._draft(output, step, sampled.rows, self._states(rows, num_scheduled))
        return self._read_back(output, sampled, tokens, late)

    def _logits(
        self,
        step: SchedulerOutput,
        req_ids: list[str],
        inputs: StepInputs,
        indices: np.ndarray,
        sampled: SampledRows,
        output: ModelRunnerOutput,
        late: list[Late],
    ) -> Logits | None:
        """Run the model, for the logits of the tokens ``indices`` int64 [S]; None: there are none to be sampled. What
        else is wanted of hidden states, log-probabilities of prompts and pooled texts, is started into ``late``."""
        requests, runner, has_tokens = self.requests, self.device_runner, bool(sampled.req_ids)
        wants_prompts, pools = len(requests.prompt_logprobs) > 0, len(requests.pooler) > 0
        if (has_tokens or self._reads_states) and not pools and not wants_prompts:
            logits = runner.run_to_logits(inputs, indices, sampled)
            return logits if has_tokens else None
        hidden = runner.run(inputs)
        if wants_prompts:
            hidden = tuple(tensor.clone() for tensor in hidden)  # their logits are further work of the device
            logits_of = partial(runner.compute_logits, hidden)
            started = requests.prompt_logprobs.start(requests.batch, req_ids, inputs, logits_of)
            late += [(output.prompt_logprobs, *one) for one in started]
        if pools:
            pooled = requests.pooler.start(req_ids, inputs, self.model.finish(*hidden), set(step.sampled_req_ids))
            late += [(output.embeddings, *one) for one in pooled]
        return Logits(runner.compute_logits(hidden, indices)) if has_tokens else None

    def images_of(self, step: SchedulerOutput, rows: np.ndarray, num_scheduled: np.ndarray) -> StepImages | None:
        """Images' changes to ``step``; for the arrays see `rows_of`."""
        if self.images is None:
            return None
        return self.images.images_of(
            list(step.num_scheduled_tokens), self.requests.batch.num_computed[rows], num_scheduled
        )

    def make_inputs(self, rows: np.ndarray, num_scheduled: np.ndarray, images: StepImages | None) -> StepInputs:
        """The device's inputs, with what ``images`` change."""
        inputs = self.device_runner.make_inputs(rows, num_scheduled)
        if images is not None and self.images is not None:
            inputs.images = self.images.fit(images, inputs)
        return inputs

    def _sample(self, logits: Logits, sampled: SampledRows, drafts: DraftRows) -> PendingTokens:
        runner = self.device_runner
        return runner.verify(logits, sampled, drafts) if drafts else runner.sample(logits, sampled)

    @property
    def _reads_states(self) -> bool:
        """True if a drafter on the host wants the states of all rows."""
        return isinstance(self.drafter, PredictionDrafter)

    def _states(self, rows: np.ndarray, counts: np.ndarray) -> StepStates | None:
        states = self.device_runner.states
        return None if states is None else StepStates(rows, np.cumsum(counts) - counts, states)

    def _draft(
        self, output: ModelRunnerOutput, step: SchedulerOutput, rows: np.ndarray, states: StepStates | None
    ) -> None:
        """Have the drafter guess; the sequences ``rows`` got tokens."""
        self.device_runner.guess(step)
        if self.drafter is None:
            return
        started = time.perf_counter()
        if isinstance(self.drafter, DraftModel):
            output.draft_token_ids = self.drafter.propose(rows, step.num_draft_tokens)
        else:
            assert states is not None
            output.draft_token_ids = self.drafter.propose(step.num_draft_tokens, states)
        output.draft_seconds = time.perf_counter() - started

    @property
    def recording_obstacle(self) -> str | None:
        """See `DeviceRunner`."""
        return self.device_runner.recording_obstacle or (self.drafter.recording_obstacle if self.drafter else None)

    def update_rows(self, step: SchedulerOutput) -> None:
        """Drop rows, copy blocks, add rows and blocks, in the order of the SchedulerOutput's contract."""
        requests = self.requests
        requests.remove(step.finished_req_ids)
        if self.adapters is not None and step.adapters:
            self.adapters.put(step.adapters)
        if step.block_copies:
            copies = devices.put(np.array(step.block_copies, dtype=np.int64), requests.device)
            octavo_kernels.copy_blocks(self.kv_cache.blocks, copies)
        for data in step.scheduled_new_reqs:
            requests.add(data)
            if isinstance(self.drafter, DraftModel):
                self.drafter.add(requests.batch.row_of[data.req_id])
        for change in step.scheduled_cached_reqs:
            requests.batch.update_blocks(change)
        if step.last_tokens:
            requests.batch.put_tokens(step)
        if self.drafter is not None:
            self.drafter.begin_step()
        self.device_runner.update_rows(step)
        put_drafts(requests.batch, step)
        if self.images is not None:  # last: where it fails, nothing is left undone that later steps count on
            self.images.update(step)

    def _read_back(
        self, output: ModelRunnerOutput, sampled: SampledRows, tokens: PendingTokens | None, late: list[Late]
    ) -> PendingOutput:
        requests, req_ids = self.requests, sampled.req_ids
        wanted = requests.wanted_logprobs(req_ids)  # a sequence may have ended, and be forgotten, when this is called

        def wanted_in(some: list[str]) -> list[int | None] | None:
            of_each = dict(zip(req_ids, wanted, strict=True)) if wanted is not None else None
            return [of_each[req_id] for req_id in some] if of_each is not None else None

        def pending() -> ModelRunnerOutput:
            for results, req_id, wait in late:
                results[req_id] = wait()
            if tokens is not None:
                read = tokens()
                requests.add_tokens(output, req_ids, read)
                if wanted is not None:
                    add_logprobs(output, req_ids, wanted, read)
                for some, later in read.later_rounds:
                    append_round(output, some, later, wanted_in(some))
            return output

        return pending
