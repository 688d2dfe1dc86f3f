"""Which tokens are computed in the next step.

There is no prefill or decode phase: a step hands a budget of tokens out, to running sequences first, then to waiting
ones, as many as each still has to compute; long prompts are cut into chunks by what is left. Several steps may be in
flight: `schedule` may be called again before `update_from_output` has seen the step before. Pure: no torch, no I/O, no
clock.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from octavo.core.kv_cache_manager import Allocation, KVCacheManager, PrefixHit
from octavo.core.request import NO_LIMIT, Request, RequestStatus, expand_samples
from octavo.core.request_queue import make_request_queue
from octavo.interface.engine_config import SchedulerConfig
from octavo.interface.messages import EngineCoreOutput, EngineCoreRequest, LogprobsLists, SchedulerStats
from octavo.interface.step import CachedRequestData, ModelRunnerOutput, NewRequestData, SchedulerOutput

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Scheduled:
    """One sequence's part of a step in flight."""

    request: Request
    epoch: int
    num_tokens: int
    computed_until: int
    sampled: bool
    replaced: bool  # a block of it is replaced by a copy in this step


@dataclass
class _Counters:
    """Since they were last read."""

    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0


@dataclass
class _Group:
    """The unfinished sequences of one request. ``waiting_samples`` share the prompt once ``leader`` has computed it."""

    sequences: dict[str, Request]
    leader: Request
    waiting_samples: list[Request]


@dataclass
class _Step:
    """The step being put together."""

    budget: int
    now: float
    scheduled: dict[str, _Scheduled] = field(default_factory=dict)
    new: list[NewRequestData] = field(default_factory=list)
    changed: dict[str, CachedRequestData] = field(default_factory=dict)
    copies: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    preempted: bool = False
    reserved: int = 0  # blocks that admitted prompts still need


class Scheduler:
    """Owns every unfinished sequence and the KV cache manager."""

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager) -> None:
        """Raises ValueError when one sequence of ``max_model_len`` would not fit: alone, it could never finish."""
        if kv.blocks_for(config.max_model_len) > kv.pool.num_usable_blocks:
            raise ValueError(
                f"max_model_len {config.max_model_len} needs {kv.blocks_for(config.max_model_len)} KV cache blocks, "
                f"the cache has {kv.pool.num_usable_blocks}; lower it or give the cache more memory"
            )
        self.config = config
        self.kv = kv
        self.requests: dict[str, Request] = {}
        self.waiting = make_request_queue(config.policy)
        self.running: dict[str, Request] = {}
        self.counters = _Counters()
        self._groups: dict[str, _Group] = {}
        self._prefilling: dict[str, Request] = {}  # running, with known tokens still to be handed out
        self._forked: dict[str, Request] = {}  # waiting, but holding the blocks of a shared prompt
        self._dropped: list[str] = []  # sequences whose row the runner must give up
        self._in_flight: deque[list[_Scheduled]] = deque()
        self._step_id = 0
        self.held: set[str] = set()  # running sequences to leave out: which tokens may follow is not known yet

    # -- adding and ending -------------------------------------------------------------------------------------------

    def add_request(self, core_request: EngineCoreRequest) -> None:
        """Queue the ``n`` sequences of a request. Raises ValueError when it could never run or its id is taken."""
        if core_request.request_id in self._groups:
            raise ValueError(f"request_id {core_request.request_id!r} is already in use by an unfinished request")
        if not core_request.prompt_token_ids:
            raise ValueError("prompt is empty: it must have at least one token")
        leader, *samples = expand_samples(core_request)
        needed = self.kv.blocks_for(leader.num_prompt_tokens + 1)
        if needed > self.kv.pool.num_usable_blocks:
            raise ValueError(
                f"prompt of {leader.num_prompt_tokens} tokens needs {needed} KV cache blocks, the cache has "
                f"{self.kv.pool.num_usable_blocks}; shorten it or give the cache more memory"
            )
        sequences = {request.req_id: request for request in (leader, *samples)}
        self.requests.update(sequences)
        self._groups[core_request.request_id] = _Group(sequences, leader, samples)
        self.waiting.add(leader)

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> list[EngineCoreOutput]:
        """End whole requests from outside (abort, error). Unknown ids are ignored. Frees everything at once."""
        outputs = []
        for request_id in request_ids:
            group = self._groups.get(request_id)
            for request in reversed(list(group.sequences.values()) if group else []):
                self._finish(request, status)
                outputs.append(_output_of(request))
        return outputs

    def finish_sample(self, request_id: str, index: int, status: RequestStatus) -> None:
        """End one of the ``n`` sequences of a request (its text matched a stop string). Unknown ones are ignored."""
        request = self.requests.get(f"{index}#{request_id}")
        if request is not None:
            self._finish(request, status)

    def _finish(self, request: Request, status: RequestStatus) -> None:
        """Take one sequence out of wherever it is."""
        group = self._groups[request.request_id]
        if request.req_id in self.running:
            del self.running[request.req_id]
            self._prefilling.pop(request.req_id, None)
            self._dropped.append(request.req_id)
        elif request in group.waiting_samples:
            group.waiting_samples.remove(request)
        else:
            self.waiting.remove(request)
            self._forked.pop(request.req_id, None)
        request.status = status
        self.kv.free(request)
        del self.requests[request.req_id]
        del group.sequences[request.req_id]
        if request is group.leader and group.waiting_samples:
            group.leader = group.waiting_samples.pop(0)
            self.waiting.add_front(group.leader)
        if not group.sequences:
            del self._groups[request.request_id]

    def has_request(self, request_id: str) -> bool:
        return request_id in self._groups

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    @property
    def num_in_flight(self) -> int:
        """Steps handed out whose results have not come back."""
        return len(self._in_flight)

    @property
    def num_waiting(self) -> int:
        return len(self.requests) - len(self.running)

    # -- scheduling --------------------------------------------------------------------------------------------------

    def schedule(self, now: float = 0.0) -> SchedulerOutput:
        """Put the next step together; ``now`` (seconds) stamps sequences that start. An empty step needs no update."""
        self.kv.begin_step()
        step = _Step(self.config.max_num_batched_tokens, now)
        self._schedule_running(step)
        if not step.preempted:
            self._schedule_waiting(step)
        return self._finish_step(step)

    def _num_schedulable(self, request: Request, budget: int) -> int:
        """Tokens to compute for it now: what is known or in flight and not yet handed out."""
        num_known = len(request.all_token_ids) + request.num_output_placeholders
        num_new = num_known - request.num_computed_tokens
        if request.num_output_placeholders and (
            num_known - request.num_prompt_tokens >= request.max_tokens or num_known >= self.config.max_model_len
        ):
            return 0  # the tokens in flight already end it
        if request.grammar is not None and (request.num_output_placeholders or request.req_id in self.held):
            return 0  # which tokens may follow is known once the one in flight is
        threshold = self.config.long_prefill_token_threshold
        if 0 < threshold < num_new:
            num_new = threshold
        return num_new if num_new < budget else budget

    def _schedule_running(self, step: _Step) -> None:
        """Decoding sequences first, so that none waits behind a long prompt; then prompts that are under way."""
        decoding = [request for req_id, request in self.running.items() if req_id not in self._prefilling]
        for request in (*decoding, *self._prefilling.values()):
            if step.budget <= 0:
                break
            if step.preempted and request.req_id not in self.running:
                continue  # preempted a moment ago
            num_new = self._num_schedulable(request, step.budget)
            if num_new <= 0:
                continue
            allocation = self.kv.allocate_slots(request, num_new)
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
            self._give(step, request, num_new, allocation)

    def _choose_victim(self) -> Request:
        if self.config.policy == "priority":
            return max(self.running.values())
        return next(reversed(self.running.values()))

    def _preempt(self, victim: Request, for_request: Request, step: _Step) -> None:
        """Free the victim's blocks; it starts again from its tokens when there is room."""
        logger.info(
            "preempting %s (%d tokens computed, %d blocks) so that %s can go on: the KV cache is full",
            victim.req_id, victim.num_computed_tokens, self.kv.num_blocks_of(victim), for_request.req_id,
        )  # fmt: skip
        given = step.scheduled.pop(victim.req_id, None)
        if given is not None:
            step.budget += given.num_tokens
            victim.num_output_placeholders -= given.sampled
            step.changed.pop(victim.req_id, None)
            step.copies.pop(victim.req_id, None)
        del self.running[victim.req_id]
        self._prefilling.pop(victim.req_id, None)
        self._dropped.append(victim.req_id)
        victim.status = RequestStatus.PREEMPTED
        victim.num_preemptions += 1
        self._give_blocks_back(victim)
        self.waiting.add_front(victim)
        step.preempted = True
        self.counters.num_preemptions += 1

    def _give_blocks_back(self, request: Request) -> None:
        """Forget what is computed of an unfinished sequence."""
        self.kv.free(request)
        request.epoch += 1
        request.num_computed_tokens = request.num_confirmed_tokens = request.num_kv_tokens = 0
        request.confirm_limit = NO_LIMIT
        request.num_hashed_blocks = 0
        request.partial_registered = False

    def _schedule_waiting(self, step: _Step) -> None:
        if not len(self.waiting):
            return
        step.reserved = sum(self._missing_blocks(request) for request in self._prefilling.values())
        while step.budget > 0 and len(self.waiting) and len(self.running) < self.config.max_num_seqs:
            request = self.waiting.peek()
            if request.num_output_placeholders:
                break  # preempted while a token of it was in flight: the next update brings it
            if self._admit(step, request):
                continue
            if self.running or not self._forked:
                break
            # Nobody runs, and waiting samples hold the blocks that the first in the queue needs.
            for sample in self._forked.values():
                self._give_blocks_back(sample)
            self._forked.clear()

    def _admit(self, step: _Step, request: Request) -> bool:
        """Start the first waiting sequence if its whole known length fits beside what running prompts still need."""
        free = self.kv.pool.num_free_blocks - step.reserved
        allocation = self._start_forked(request, free) or self._start(step, request, free)
        if allocation is None:
            return False
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = request.num_computed_tokens
            self.counters.prefix_cache_queries += request.num_tokens
            self.counters.prefix_cache_hits += request.num_cached_tokens
        if request.scheduled_time is None:
            request.scheduled_time = step.now
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
                pooling=request.pooling,
                grammar=request.grammar,
            )
        )
        self._give(step, request, self._num_schedulable(request, step.budget), allocation)
        step.reserved += self._missing_blocks(request)
        return True

    def _missing_blocks(self, request: Request) -> int:
        """Blocks that its known tokens need beyond those it has."""
        return max(0, self.kv.blocks_for(request.num_tokens) - self.kv.num_blocks_of(request))

    def _start_forked(self, request: Request, free: int) -> Allocation | None:
        """A sample that holds its prompt's blocks needs just its last prompt token computed."""
        if request.req_id not in self._forked or free < 1:
            return None
        allocation = self.kv.allocate_slots(request, 1)
        if allocation is not None:
            del self._forked[request.req_id]
        return allocation

    def _start(self, step: _Step, request: Request, free: int) -> Allocation | None:
        if request.req_id in self._forked:
            return None
        hit = self.kv.get_computed_blocks(request)
        revived = sum(block.ref_cnt == 0 for block in hit.blocks)
        if self.kv.blocks_for(request.num_tokens) - len(hit.blocks) + revived > free:
            return None
        attempts = [hit]
        if hit.partial is not None:  # for the rare case that the block to be copied is the last one there is
            attempts.append(PrefixHit(hit.blocks, None, len(hit.blocks) * self.kv.block_size))
        for attempt in attempts:
            request.num_computed_tokens = attempt.num_tokens
            num_new = self._num_schedulable(request, step.budget)
            allocation = self.kv.allocate_slots(request, num_new, attempt)
            if allocation is not None:
                return allocation
        request.num_computed_tokens = 0
        return None

    def _give(self, step: _Step, request: Request, num_new: int, allocation: Allocation) -> None:
        """Record ``num_new`` tokens of this step for the sequence."""
        if allocation.copies:
            step.copies[request.req_id] = allocation.copies
        step.budget -= num_new
        until = request.num_computed_tokens + num_new
        request.num_computed_tokens = until
        sampled = until >= len(request.all_token_ids) + request.num_output_placeholders
        if sampled:
            request.num_output_placeholders += 1
            self._prefilling.pop(request.req_id, None)
        step.scheduled[request.req_id] = _Scheduled(
            request, request.epoch, num_new, until, sampled, bool(allocation.replaced_blocks)
        )

    def _finish_step(self, step: _Step) -> SchedulerOutput:
        output = SchedulerOutput(self._step_id, step.new, list(step.changed.values()))
        if not step.scheduled:
            return output
        for req_id, scheduled in step.scheduled.items():
            request, start = scheduled.request, scheduled.computed_until - scheduled.num_tokens
            output.num_scheduled_tokens[req_id] = scheduled.num_tokens
            output.total_num_scheduled_tokens += scheduled.num_tokens
            if scheduled.sampled:
                output.sampled_req_ids.append(req_id)
            if start < request.num_prompt_tokens:
                output.num_prompt_tokens += min(scheduled.computed_until, request.num_prompt_tokens) - start
                self._fork_samples(request)
        output.block_copies = [pair for pairs in step.copies.values() for pair in pairs]
        output.finished_req_ids, self._dropped = self._dropped, []
        self._in_flight.append(list(step.scheduled.values()))
        self._step_id += 1
        return output

    def _fork_samples(self, leader: Request) -> None:
        """Once the whole prompt has been handed out, the other samples share its blocks and queue up behind it."""
        group = self._groups[leader.request_id]
        if leader is not group.leader or leader.num_computed_tokens < leader.num_prompt_tokens:
            return
        for sample in reversed(group.waiting_samples):
            self.kv.fork(leader, sample)
            self._forked[sample.req_id] = sample
            self.waiting.add_front(sample)
        group.waiting_samples = []

    # -- results -----------------------------------------------------------------------------------------------------

    def update_from_output(self, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Take the results of the oldest step in flight. Tokens of sequences that have ended since are dropped."""
        results: list[EngineCoreOutput] = []
        for scheduled in self._in_flight.popleft():
            request = scheduled.request
            if output.errors and (error := output.errors.get(request.req_id)) is not None:
                results += self._fail(request, error)
            if output.grammar_errors and (error := output.grammar_errors.get(request.req_id)) is not None:
                field = request.core_request.grammar_field
                results += self._fail(request, f"{field} {error}", field)
            if request.is_finished:
                continue
            if scheduled.epoch == request.epoch:
                self._confirm(request, scheduled)
            prompt_logprobs = self._new_prompt_logprobs(scheduled, output) if output.prompt_logprobs else None
            if scheduled.sampled:
                results.append(self._take_token(request, output))
                results[-1].prompt_logprobs = prompt_logprobs
            elif prompt_logprobs is not None:
                results.append(_output_of(request))
                results[-1].prompt_logprobs = prompt_logprobs
        return results

    def _fail(self, request: Request, error: str, param: str | None = None) -> list[EngineCoreOutput]:
        """End all samples of a request: the others may share KV that the failed step was to write."""
        group = self._groups.get(request.request_id)
        if group is None or group.leader.core_request is not request.core_request:
            return []  # the request has ended since, and perhaps another one has its id
        outputs = self.finish_requests([request.request_id], RequestStatus.FINISHED_ERROR)
        for output in outputs:
            output.error, output.error_param = error, param
        return outputs

    def _confirm(self, request: Request, scheduled: _Scheduled) -> None:
        if scheduled.replaced:
            request.confirm_limit = NO_LIMIT
        confirmed, limit = scheduled.computed_until, request.confirm_limit
        if confirmed > limit:
            confirmed = limit
        request.num_confirmed_tokens = confirmed
        if not request.partial_registered or confirmed // self.kv.block_size > request.num_hashed_blocks:
            self.kv.cache_blocks(request)

    def _new_prompt_logprobs(self, scheduled: _Scheduled, output: ModelRunnerOutput) -> LogprobsLists | None:
        """The step's share without what a recomputed prompt has already reported."""
        logprobs = output.prompt_logprobs.get(scheduled.request.req_id)
        if logprobs is None:
            return None
        start = scheduled.computed_until - scheduled.num_tokens
        logprobs = logprobs.since(max(0, scheduled.request.num_prompt_logprobs - start))
        scheduled.request.num_prompt_logprobs += len(logprobs.ranks)
        return logprobs if logprobs.ranks else None

    def _take_token(self, request: Request, output: ModelRunnerOutput) -> EngineCoreOutput:
        request.num_output_placeholders -= 1
        tokens = output.sampled_token_ids.get(request.req_id, [])
        ended = False
        if request.pooling is not None:
            request.status, ended = RequestStatus.FINISHED_STOPPED, True
        for i, token in enumerate(tokens):
            ended = request.append_output_token(token, self.config.max_model_len)
            if ended:
                tokens = tokens[: i + 1]
                break
        if ended:
            self._finish(request, request.status)
        result = _output_of(request, tokens)
        if output.logprobs:
            result.new_logprobs = output.logprobs.get(request.req_id)
        if output.embeddings:
            result.embedding = output.embeddings.get(request.req_id)
        return result

    # -- looking in --------------------------------------------------------------------------------------------------

    def make_stats(self) -> SchedulerStats:
        """Gauges now, and counters since the last call."""
        counters, self.counters = self.counters, _Counters()
        return SchedulerStats(
            num_running_reqs=len(self.running),
            num_waiting_reqs=self.num_waiting,
            kv_cache_usage=self.kv.usage,
            prefix_cache_queries=counters.prefix_cache_queries,
            prefix_cache_hits=counters.prefix_cache_hits,
            num_preemptions=counters.num_preemptions,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError when queues, groups and the KV cache contradict each other. O(everything)."""
        self.kv.check_integrity()
        waiting = {request.req_id for request in self.waiting}
        samples = {r.req_id for group in self._groups.values() for r in group.waiting_samples}
        assert not waiting & self.running.keys() and not samples & (waiting | self.running.keys()), "one is twice here"
        assert waiting | samples | self.running.keys() == self.requests.keys(), "a sequence is lost"
        assert {i for g in self._groups.values() for i in g.sequences} == self.requests.keys(), "groups lost a sequence"
        assert self._prefilling.keys() <= self.running.keys() and self._forked.keys() <= waiting
        assert len(self.running) <= self.config.max_num_seqs, "more run than max_num_seqs"
        for request in self.requests.values():
            holds = self.kv.num_blocks_of(request)
            if request.req_id in self.running:
                assert request.status == RequestStatus.RUNNING
                assert holds >= self.kv.blocks_for(request.num_computed_tokens), f"{request} writes beyond its blocks"
                assert request.num_confirmed_tokens <= request.num_computed_tokens
            else:
                assert bool(holds) == (request.req_id in self._forked), f"{request} waits and holds {holds} blocks"
        assert self.requests or self.kv.pool.num_free_blocks + len(self.kv.pinned_ids) == (
            self.kv.pool.num_usable_blocks
        ), "blocks leaked"


def _output_of(request: Request, tokens: list[int] | None = None) -> EngineCoreOutput:
    tokens = tokens or []
    output = EngineCoreOutput(request.request_id, request.index, tokens, finish_reason=request.finish_reason)
    output.stop_reason = request.stop_reason
    output.num_preemptions, request.num_preemptions = request.num_preemptions, 0
    if request.num_output_tokens == len(tokens):  # its first
        output.num_cached_tokens = max(0, request.num_cached_tokens)
        output.scheduled_time = request.scheduled_time
    return output
