"""The steps of an encoder: whole texts, as many as fit a step, each computed once and then forgotten.

Nothing is kept of a text between steps, so there are no blocks, no cached prefixes and no preemption. Pure: no torch,
no I/O, no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from octavo.core.lora import AdapterSlots
from octavo.core.request import Request, RequestStatus
from octavo.core.request_queue import make_request_queue
from octavo.core.results import make_output
from octavo.interface.engine_config import SchedulerConfig
from octavo.interface.lora import Adapter
from octavo.interface.messages import EngineCoreOutput, EngineCoreRequest, SchedulerStats
from octavo.interface.step import ModelRunnerOutput, NewRequestData, SchedulerOutput


class NoKVCache:
    """The KV cache of an engine that has none."""

    usage = 0.0

    def reset_prefix_cache(self) -> bool:
        """There is nothing to forget."""
        return True

    def share_block_map(self, cells: memoryview) -> None:
        """There are no blocks."""


class EncoderScheduler:
    """Owns every unfinished text; `Scheduler`'s interface, without what only generation needs."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.kv = NoKVCache()
        self.requests: dict[str, Request] = {}  # by request id
        self.waiting = make_request_queue(config.policy)
        self.running: dict[str, Request] = {}  # in a step in flight
        self.held: set[str] = set()  # no text has a grammar
        self.adapters = AdapterSlots(0)
        self._in_flight: deque[list[Request]] = deque()
        self._step_id = 0

    def add_request(self, core_request: EngineCoreRequest) -> None:
        """Queue a text. Raises ValueError when it could never run or its id is taken."""
        request_id, length = core_request.request_id, len(core_request.prompt_token_ids)
        if request_id in self.requests:
            raise ValueError(f"request_id {request_id!r} is already in use by an unfinished request")
        if core_request.pooling is None:
            raise ValueError("the model is an encoder: it makes vectors or classes of texts and cannot generate any")
        if not length:
            raise ValueError("prompt is empty: it must have at least one token")
        if length > self.config.max_num_batched_tokens:
            raise ValueError(
                f"prompt has {length} tokens, and an encoder takes a text in one step of at most "
                f"{self.config.max_num_batched_tokens} (max_num_batched_tokens); shorten it, or raise that"
            )
        request = Request(core_request)
        self.requests[request_id] = request
        self.waiting.add(request)

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> list[EngineCoreOutput]:
        """End texts from outside (abort, error). Unknown ids are ignored; results still in flight are dropped."""
        outputs = []
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                outputs.append(self._finish(request, status))
        return outputs

    def finish_adapter(self, adapter: Adapter, error: str) -> list[EngineCoreOutput]:
        """End nothing: no text has an adapter."""
        return []

    def finish_sample(self, request_id: str, index: int, status: RequestStatus) -> None:
        """End one of a request's samples: its only one."""
        self.finish_requests([request_id], status)

    def _finish(self, request: Request, status: RequestStatus) -> EngineCoreOutput:
        del self.requests[request.request_id]
        if self.running.pop(request.req_id, None) is None:
            self.waiting.remove(request)
        request.status = status
        return make_output(request)

    def has_request(self, request_id: str) -> bool:
        """True if a request of that id is unfinished."""
        return request_id in self.requests

    def block_ids(self, request_id: str) -> list[list[int]]:
        """Return nothing: no text holds blocks."""
        return []

    def has_unfinished_requests(self) -> bool:
        """True if any text waits or runs."""
        return bool(self.requests)

    @property
    def num_in_flight(self) -> int:
        """Steps scheduled whose results have not come back."""
        return len(self._in_flight)

    @property
    def num_waiting(self) -> int:
        """The number of texts in no step yet."""
        return len(self.waiting)

    def schedule(self, now: float = 0.0) -> SchedulerOutput:
        """The next step: texts in their order, until one does not fit. An empty step needs no update."""
        output, budget = SchedulerOutput(self._step_id), self.config.max_num_batched_tokens
        step: list[Request] = []
        while len(self.waiting) and len(self.running) < self.config.max_num_seqs:
            request = self.waiting.peek()
            if request.num_prompt_tokens > budget:
                break
            self.waiting.pop()
            budget -= request.num_prompt_tokens
            request.status, request.scheduled_time = RequestStatus.RUNNING, now
            self.running[request.req_id] = request
            step.append(request)
            output.scheduled_new_reqs.append(_as_data(request))
            output.num_scheduled_tokens[request.req_id] = request.num_prompt_tokens
        if step:
            output.total_num_scheduled_tokens = self.config.max_num_batched_tokens - budget
            output.num_prompt_tokens = output.total_num_scheduled_tokens
            output.sampled_req_ids = list(output.num_scheduled_tokens)
            self._in_flight.append(step)
            self._step_id += 1
        return output

    def update_from_output(self, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Take the results of the oldest step in flight: every text of it ends."""
        results = []
        for request in self._in_flight.popleft():
            if request.is_finished:
                continue
            error = output.errors.get(request.req_id)
            status = RequestStatus.FINISHED_STOPPED if error is None else RequestStatus.FINISHED_ERROR
            result = self._finish(request, status)
            result.embedding, result.error = output.embeddings.get(request.req_id), error
            results.append(result)
        return results

    def make_stats(self) -> SchedulerStats:
        """Gauges now."""
        return SchedulerStats(num_running_reqs=len(self.running), num_waiting_reqs=len(self.waiting))

    def check_integrity(self) -> None:
        """Raise AssertionError when queue and running texts contradict each other."""
        waiting = {request.req_id for request in self.waiting}
        assert not waiting & self.running.keys(), "a text both waits and runs"
        assert waiting | self.running.keys() == {r.req_id for r in self.requests.values()}, "a text is lost"
        assert len(self.running) <= self.config.max_num_seqs, "more run than max_num_seqs"


def _as_data(request: Request) -> NewRequestData:
    return NewRequestData(
        req_id=request.req_id,
        token_ids=request.all_token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        sampling_params=request.sampling_params,
        stop_token_ids=request.stop_token_ids,
        sample_index=0,
        block_ids=[],
        num_computed_tokens=0,
        num_kv_tokens=0,
        pooling=request.pooling,
        token_types=request.core_request.token_types,
    )
