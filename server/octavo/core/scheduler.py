"""Continuous batching: the choice of the tokens that the next step computes.

There is no prefill or decode phase: a step gives its budget of tokens to running sequences first, then to waiting ones,
to each as many as it still has to compute; long prompts are cut into chunks by what is left. Several steps may be in
flight: `schedule` may be called again before `update_from_output` has seen the step before. Pure: no torch, no I/O, no
clock.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from octavo.core.draft_scheduler import NO_DRAFTS, NOTHING, DraftScheduler, NoDrafts
from octavo.core.encoder_cache import EncoderCacheManager, NoImages
from octavo.core.integrity import check_integrity
from octavo.core.kv_cache_manager import Allocation, KVCacheManager
from octavo.core.lora import AdapterQueue, AdapterSlots, check_adapters
from octavo.core.request import Request, RequestStatus
from octavo.core.request_queue import RequestQueue, make_request_queue
from octavo.core.results import CurrentStep, ResultProcessor, ScheduledSequence, make_output
from octavo.core.sample_groups import SampleGroups
from octavo.core.spec_decode.drafts import Drafts
from octavo.core.states.manager import StatePlaces, committed_tokens
from octavo.interface.engine_config import SchedulerConfig, num_sampled_rows
from octavo.interface.lora import Adapter
from octavo.interface.messages import EngineCoreOutput, EngineCoreRequest, SchedulerStats
from octavo.interface.step import CachedRequestData, ModelRunnerOutput, NewRequestData, SchedulerOutput

logger = logging.getLogger(__name__)


class Scheduler:
    """Owns every unfinished sequence and the KV cache manager."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        drafts: Drafts | None = None,
        num_stages: int = 1,
        adapters: AdapterSlots | None = None,
        images: EncoderCacheManager | None = None,
    ) -> None:
        """``drafts``: None for no speculation. ``num_stages``: of a pipeline, which has a step in flight for each, none
        with a sequence that another one decodes; drafts are the host's then. ``adapters``: None for no LoRA adapters;
        ``images``: None for a model that reads none.
        Raises ValueError when one sequence of ``max_model_len`` would not fit: alone, it could never finish."""
        needed = kv.most_blocks(config.max_model_len)
        if needed > kv.pool.num_usable_blocks:
            raise ValueError(
                f"max_model_len {config.max_model_len} needs {needed} KV cache blocks, "
                f"the cache has {kv.pool.num_usable_blocks}; lower it or give the cache more memory"
            )
        self.config = config
        self.kv = kv
        self.requests: dict[str, Request] = {}
        self.waiting: RequestQueue = make_request_queue(config.policy)
        self.adapters = adapters or AdapterSlots(0)
        if adapters is not None:
            self.waiting = AdapterQueue(self.waiting, adapters, lambda: self._step_id)
        self.running: dict[str, Request] = {}
        self._prefilling: dict[str, Request] = {}  # running, with known tokens not yet scheduled
        self._finished_req_ids: list[str] = []  # sequences whose row the runner must drop
        self._in_flight: deque[list[ScheduledSequence]] = deque()
        self._step_id = 0
        self._groups = SampleGroups(kv)
        self._num_stages = num_stages
        self._images: EncoderCacheManager | NoImages = images or NoImages()
        self._results = ResultProcessor(config.max_model_len, kv, self._groups, self._finish, self._restart)
        self.counters = self._results.counters
        self.use_drafts(drafts)
        self.held: set[str] = set()  # running sequences whose grammar mask is not ready: not scheduled

    def use_drafts(self, drafts: Drafts | None) -> None:
        """Speculate with ``drafts`` from now on, None: not at all. There must be no step in flight."""
        self._results.drafts = drafts
        self._drafting: DraftScheduler | NoDrafts = (
            DraftScheduler(self.config, self.kv, drafts) if drafts is not None else NoDrafts(self.kv)
        )
        self._allocate = self._drafting.allocate

    @property
    def drafts(self) -> Drafts | None:
        """The drafts, None without speculation."""
        return self._drafting.drafts

    # -- adding and ending -------------------------------------------------------------------------------------------

    def add_request(self, core_request: EngineCoreRequest) -> None:
        """Queue the ``n`` sequences of a request. Raises ValueError when it could never run or its id is taken."""
        if core_request.request_id in self._groups:
            raise ValueError(f"request_id {core_request.request_id!r} is already in use by an unfinished request")
        if not core_request.prompt_token_ids:
            raise ValueError("prompt is empty: it must have at least one token")
        num_prompt_tokens = len(core_request.prompt_token_ids)
        needed = self.kv.most_blocks(num_prompt_tokens + 1)
        if needed > self.kv.pool.num_usable_blocks:
            raise ValueError(
                f"prompt of {num_prompt_tokens} tokens needs {needed} KV cache blocks, the cache has "
                f"{self.kv.pool.num_usable_blocks}; shorten it or give the cache more memory"
            )
        self._check_images(core_request)
        group = self._groups.add(core_request)
        self.requests.update(group.sequences)
        self.adapters.add(core_request.adapter, len(group.sequences))
        self.waiting.add(group.leader)

    def _check_images(self, core_request: EngineCoreRequest) -> None:
        if not core_request.mm_items:
            return
        rows = num_sampled_rows(self.config.max_num_seqs, self._drafting.num_reserved)
        most = self.config.max_num_batched_tokens - rows
        if (threshold := self.config.long_prefill_token_threshold) > 0:
            most = min(most, threshold)
        self._images.check(core_request.mm_items, most)

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> list[EngineCoreOutput]:
        """End whole requests from outside (abort, error). Unknown ids are ignored. Frees everything at once."""
        outputs = []
        for request_id in request_ids:
            for request in self._groups.unfinished(request_id):
                self._finish(request, status)
                outputs.append(make_output(request))
        return outputs

    def finish_adapter(self, adapter: Adapter, error: str) -> list[EngineCoreOutput]:
        """End all sequences of an adapter that cannot be used."""
        ended = {r.request_id for r in self.requests.values() if r.adapter is not None and r.adapter.key == adapter.key}
        outputs = self.finish_requests(ended, RequestStatus.FINISHED_ERROR)
        return [replace(output, error=error, error_param="model") for output in outputs]

    def finish_sample(self, request_id: str, index: int, status: RequestStatus) -> None:
        """End one of the ``n`` sequences of a request (its text matched a stop string). Unknown ones are ignored."""
        request = self.requests.get(f"{index}#{request_id}")
        if request is not None:
            self._finish(request, status)

    def _finish(self, request: Request, status: RequestStatus) -> None:
        """Take one sequence out of the queues and free what it holds."""
        if request.req_id in self.running:
            self._stop(request)
        elif self._groups.is_queued(request):
            self.waiting.remove(request)
        request.status = status
        self.kv.free(request)
        del self.requests[request.req_id]
        self.adapters.end(request.adapter)
        self._drafting.release(request)
        leader = self._groups.remove(request)
        if leader is not None:
            self.waiting.add_front(leader)

    def _stop(self, request: Request) -> None:
        """Take a running sequence's row away."""
        del self.running[request.req_id]
        self._images.drop(request)
        self._prefilling.pop(request.req_id, None)
        self._finished_req_ids.append(request.req_id)
        self.adapters.stop(request.adapter)

    def has_request(self, request_id: str) -> bool:
        """True if a request of that id is unfinished."""
        return request_id in self._groups

    def block_ids(self, request_id: str) -> list[list[int]]:
        """The ids of the blocks that each unfinished sample of a request holds, group after group."""
        samples = reversed(self._groups.unfinished(request_id))
        return [[i for ids in self.kv.block_ids(sample) for i in ids if i] for sample in samples]

    def has_unfinished_requests(self) -> bool:
        """True if any sequence waits or runs."""
        return bool(self.requests)

    @property
    def num_in_flight(self) -> int:
        """Steps scheduled whose results have not come back."""
        return len(self._in_flight)

    @property
    def num_waiting(self) -> int:
        """Sequences that do not run: queued, preempted, or waiting for their leader's prompt."""
        return len(self.requests) - len(self.running)

    # -- scheduling --------------------------------------------------------------------------------------------------

    def schedule(self, now: float = 0.0) -> SchedulerOutput:
        """The next step; ``now`` (seconds) is its time, for new sequences' metrics. An empty step needs no update."""
        self.kv.begin_step(now)
        self._images.begin_step(len(self.running) > len(self._prefilling))
        step = CurrentStep(self.config.max_num_batched_tokens, now)
        self._schedule_running(step)
        if not step.preempted:
            self._schedule_waiting(step)
        return self._finish_step(step)

    def _num_schedulable(self, request: Request, budget: int) -> int:
        """Tokens to compute for it now: those known or in flight and not yet scheduled, within ``budget``."""
        num_known = num_hoped = len(request.all_token_ids) + request.num_output_placeholders
        if request.num_output_placeholders:
            if request.num_drafts:
                if not self._drafting.on_device:
                    return 0  # how many tokens are in flight is known once they are back
                num_hoped += request.num_drafts
            if num_known - request.num_prompt_tokens >= request.max_tokens or num_hoped >= self.config.max_model_len:
                return 0  # those in flight already end it
        num_new = num_hoped - request.num_computed_tokens
        if request.grammar is not None and (request.num_output_placeholders or request.req_id in self.held):
            return 0  # which tokens may follow is known once the one in flight is
        threshold = self.config.long_prefill_token_threshold
        if 0 < threshold < num_new:
            num_new = threshold
        if num_new > budget:
            num_new = budget
        if self.kv.states is not None:
            num_new = self.kv.states.cut_step(request, num_new)
        if request.num_computed_tokens < request.images_until:
            num_new = self._images.cut(request, num_new)
        return num_new

    def _schedule_running(self, step: CurrentStep) -> None:
        """Decoding sequences first, so that none waits behind a long prompt; then prompts in progress."""
        decoding = self._decoding(step)
        guess = self._drafting.guess if step.draft_budget > 0 else None
        allocate = self._allocate
        for request in (*decoding, *self._prefilling.values()):
            if step.budget <= 0:
                break
            if step.preempted and request.req_id not in self.running:
                continue  # preempted a moment ago
            num_new = self._num_schedulable(request, step.budget)
            if num_new <= 0:
                continue
            drafts, allocation = guess(step, request, num_new) if guess is not None else NOTHING
            if allocation is None:
                allocation = allocate(request, num_new)
            while allocation is None:
                victim = self._choose_victim()
                self._preempt(victim, request, step)
                if victim is request:
                    break
                num_new = self._num_schedulable(request, step.budget)
                allocation = self.kv.allocate_slots(request, num_new)
            if allocation is None:
                continue
            if allocation.new_block_ids or allocation.replaced_blocks:
                step.changed[request.req_id] = CachedRequestData(
                    request.req_id, allocation.new_block_ids, allocation.replaced_blocks
                )
            self._schedule_tokens(step, request, num_new, allocation, drafts)

    def _decoding(self, step: CurrentStep) -> list[Request]:
        """Running sequences past their prompts; none while all of them wait for what is to be guessed after."""
        decoding = [request for req_id, request in self.running.items() if req_id not in self._prefilling]
        if self._num_stages > 1:  # a step for each stage, of like cost; its first one is told the token before
            ready = [r for r in decoding if not r.num_output_placeholders and r.req_id not in self.held]
            decoding = ready[: -(-len(decoding) // self._num_stages)]
        return [] if self._drafting.begin_step(step, decoding, len(self.requests)) else decoding

    def _choose_victim(self) -> Request:
        if self.config.policy == "priority":
            return max(self.running.values())
        return next(reversed(self.running.values()))

    def _preempt(self, victim: Request, for_request: Request, step: CurrentStep) -> None:
        """Free the victim's blocks; it is recomputed from its tokens when there is room."""
        logger.info(
            "KV cache full: preempting %s (%d tokens computed, %d blocks) for %s",
            victim.req_id,
            victim.num_computed_tokens,
            self.kv.num_blocks_of(victim),
            for_request.req_id,
        )
        scheduled = step.scheduled.pop(victim.req_id, None)
        if scheduled is not None:
            step.budget += scheduled.num_tokens
            victim.num_output_placeholders -= scheduled.sampled
            if step.drafts.pop(victim.req_id, None):
                victim.num_drafts -= len(scheduled.drafts)
            step.changed.pop(victim.req_id, None)
            step.copies.pop(victim.req_id, None)
        self._restart(victim)
        victim.num_preemptions += 1
        step.preempted = True
        self.counters.num_preemptions += 1

    def _restart(self, request: Request) -> None:
        """Have a sequence computed anew: its next tokens are not those that steps in flight expect."""
        if request.req_id not in self.running:
            return  # preempted: it is computed anew as it is
        self._stop(request)
        self._drafting.withdraw(request)
        request.status = RequestStatus.PREEMPTED
        self._release_blocks(request)
        self.waiting.add_front(request)

    def _release_blocks(self, request: Request) -> None:
        """Discard what is computed of an unfinished sequence."""
        self.kv.free(request)
        request.epoch += 1
        request.num_computed_tokens = request.num_confirmed_tokens = request.num_kv_tokens = 0
        request.num_state_tokens = 0

    def _schedule_waiting(self, step: CurrentStep) -> None:
        if not len(self.waiting):
            return
        step.reserved = sum(self.kv.missing_blocks(request) for request in self._prefilling.values())
        while step.budget > 0 and len(self.waiting) and len(self.running) < self.config.max_num_seqs:
            request = self.waiting.peek()
            if request is None or request.num_output_placeholders:
                break  # preempted while a token of it was in flight: the next update brings it
            if self._admit(step, request):
                continue
            if self.running or not self._groups.forked:
                break
            # Nobody runs, and waiting samples hold the blocks that the first in the queue needs.
            for sample in self._groups.forked.values():
                self._release_blocks(sample)
            self._groups.forked.clear()

    def _admit(self, step: CurrentStep, request: Request) -> bool:
        """Start the first waiting sequence if all its known tokens fit beside what running prompts still need."""
        free = self.kv.pool.num_free_blocks - step.reserved
        allocation = self._start_forked(step, request, free) or self._start(step, request, free)
        if allocation is None:
            return False
        if request.scheduled_time is None:
            request.scheduled_time = step.now
            request.num_cached_tokens = request.num_computed_tokens
            self.counters.prefix_cache_queries += request.num_tokens
            self.counters.prefix_cache_hits += request.num_cached_tokens
        self.waiting.pop()
        request.status = RequestStatus.RUNNING
        self.running[request.req_id] = self._prefilling[request.req_id] = request
        step.new.append(
            NewRequestData(
                req_id=request.req_id,
                token_ids=request.all_token_ids[:],
                num_prompt_tokens=request.num_prompt_tokens,
                sampling_params=request.sampling_params,
                stop_token_ids=request.stop_token_ids,
                sample_index=request.index,
                block_ids=self.kv.block_ids(request),
                num_computed_tokens=request.num_computed_tokens,
                num_kv_tokens=request.num_kv_tokens,
                state_pages=allocation.state.read if allocation.state is not None else None,
                num_state_tokens=request.num_state_tokens,
                pooling=request.pooling,
                grammar=request.grammar,
                adapter_slot=self.adapters.start(request.adapter),
                mm_items=[item.without_tensors() for item in request.mm_items] or None,
            )
        )
        self._schedule_tokens(step, request, self._num_schedulable(request, step.budget), allocation)
        step.reserved += self.kv.missing_blocks(request)
        return True

    def _start_forked(self, step: CurrentStep, request: Request, free: int) -> Allocation | None:
        """A sample that holds its prompt's blocks needs just its last prompt token computed."""
        if request.req_id not in self._groups.forked or free < 1 or not self._num_schedulable(request, step.budget):
            return None
        allocation = self._allocate(request, 1)
        if allocation is not None:
            del self._groups.forked[request.req_id]
        return allocation

    def _start(self, step: CurrentStep, request: Request, free: int) -> Allocation | None:
        if request.req_id in self._groups.forked:
            return None
        hit = self.kv.get_computed_blocks(request)
        if self.kv.missing_blocks(request, hit) > free:
            return None
        attempts = [hit]
        if hit.partial is not None:  # for the rare case that the block to be copied is the last one there is
            attempts.append(hit.without_copy(self.kv.block_size))
        for attempt in attempts:
            request.num_computed_tokens = attempt.num_tokens
            num_new = self._num_schedulable(request, step.budget)
            if num_new <= 0:
                continue  # there is no room for an image now
            allocation = self._allocate(request, num_new, attempt)
            if allocation is not None:
                return allocation
        request.num_computed_tokens = 0
        return None

    def _schedule_tokens(
        self, step: CurrentStep, request: Request, num_new: int, allocation: Allocation, drafts: list[int] = NO_DRAFTS
    ) -> None:
        """Record ``num_new`` tokens of this step for the sequence, and ``drafts`` after them."""
        if allocation.copies:
            step.copies[request.req_id] = allocation.copies
        num_known = len(request.all_token_ids) + request.num_output_placeholders + request.num_drafts
        if self.kv.states is not None:
            request.num_state_tokens = committed_tokens(request, request.num_computed_tokens + num_new)
            if allocation.state is not None:
                self._change_state(step, request.req_id, allocation.state)
        if drafts:
            num_new += len(drafts)
            step.draft_budget -= len(drafts)
            step.drafts[request.req_id] = drafts
            request.num_drafts += len(drafts)
        step.budget -= num_new
        until = request.num_computed_tokens + num_new
        if request.num_computed_tokens < request.images_until:
            self._images.use(request, until)
        request.num_computed_tokens = until
        sampled = until >= num_known
        if sampled:
            request.num_output_placeholders += 1
            self._prefilling.pop(request.req_id, None)
        step.scheduled[request.req_id] = ScheduledSequence(
            request,
            request.epoch,
            num_new,
            until,
            sampled,
            bool(allocation.replaced_blocks),
            drafts,
            request.num_rejected,
        )

    @staticmethod
    def _change_state(step: CurrentStep, req_id: str, places: StatePlaces) -> None:
        """Have the step write the sequence's state elsewhere, or to another place too."""
        if places.write is not None or places.snapshot is not None:
            change = step.changed.setdefault(req_id, CachedRequestData(req_id, [], []))
            change.state_pages, change.snapshot = places.write, places.snapshot

    def _finish_step(self, step: CurrentStep) -> SchedulerOutput:
        output = SchedulerOutput(self._step_id, step.new, list(step.changed.values()))
        output.scheduled_spec_decode_tokens = step.drafts
        if not step.scheduled:
            return output
        num_scheduled, sampled, staged = output.num_scheduled_tokens, output.sampled_req_ids, self._num_stages > 1
        for req_id, scheduled in step.scheduled.items():
            request, num_tokens = scheduled.request, scheduled.num_tokens
            start = scheduled.computed_until - num_tokens
            num_scheduled[req_id] = num_tokens
            if scheduled.sampled:
                sampled.append(req_id)
                if staged and request.num_output_tokens:
                    output.last_tokens[req_id] = request.all_token_ids[-1], request.num_tokens - 1
            if start < request.num_prompt_tokens:
                output.num_prompt_tokens += min(scheduled.computed_until, request.num_prompt_tokens) - start
                for sample in self._groups.fork(request):
                    self.waiting.add_front(sample)
        output.total_num_scheduled_tokens = sum(num_scheduled.values())
        self._drafting.order(step, output, len(self.requests))
        output.block_copies = [pair for pairs in step.copies.values() for pair in pairs]
        output.adapters = self.adapters.take_placed()
        output.encoder_inputs, output.free_encoder_hashes = self._images.take()
        output.finished_req_ids, self._finished_req_ids = self._finished_req_ids, []
        self._in_flight.append(list(step.scheduled.values()))
        self._step_id += 1
        return output

    # -- results -----------------------------------------------------------------------------------------------------

    def update_from_output(self, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Take the results of the oldest step in flight. Tokens of sequences that have ended since are dropped."""
        step = self._in_flight.popleft()
        if output.errors:
            for scheduled in step:
                if scheduled.request.req_id in output.errors:
                    self._images.forget(scheduled.request)
        return self._results.process(step, output)

    # -- inspection -------------------------------------------------------------------------------------------------

    def make_stats(self) -> SchedulerStats:
        """Gauges now, and counters since the last call."""
        running, waiting = self.adapters.names() if self.adapters.num_slots else (None, None)
        return SchedulerStats(
            num_running_reqs=len(self.running),
            num_waiting_reqs=self.num_waiting,
            kv_cache_usage=self.kv.usage,
            retained_blocks=self.kv.pool.retained.num_blocks,
            **self.counters.take(),
            spec_decode=self._drafting.take_stats(),
            states=self.kv.states.take_stats() if self.kv.states is not None else None,
            running_adapters=running,
            waiting_adapters=waiting,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError when queues, groups and the KV cache contradict each other. O(everything)."""
        assert len(self.running) <= self.config.max_num_seqs, "more run than max_num_seqs"
        waiting, drafts = {request.req_id for request in self.waiting}, self._drafting.num_speculative_tokens
        check_integrity(self.kv, self._groups, self.requests, self.running, waiting, self._prefilling.keys(), drafts)
        check_adapters(self.adapters, self.requests.values(), self.running.values())
        self._images.check_integrity(set(self.running))
