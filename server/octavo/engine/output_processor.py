"""Turns the core's outputs into the user's: text, stop strings, log-probabilities, times."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from octavo.interface.messages import EngineCoreOutput, EngineCoreRequest, LogprobsLists
from octavo.interface.outputs import CompletionOutput, LogprobsTable, PredictedTokens, RequestMetrics, RequestOutput
from octavo.interface.sampling_params import RequestOutputKind
from octavo.metrics.stats import FinishedRequest, FinishedSample, IterationStats, Tenant
from octavo.spec_decode.predicted import Prediction
from octavo.text.detokenizer import Detokenizer, Vocabulary

if TYPE_CHECKING:
    from octavo.text.tokenizer import Tokenizer


class OutputQueue(Protocol):
    """Announces requests with new output. The reader then calls `RequestState.take`: the output stays in the request's
    state until then, so a slow reader gets it in one piece and nothing piles up."""

    def put(self, state: RequestState) -> None:
        """``state`` has new output."""

    def put_error(self, error: Exception) -> None:
        """The engine has ended; no more output will come."""


@dataclass(slots=True)
class SampleState:
    """One of the ``n`` answers while it grows. With RequestOutputKind.DELTA it holds only what is not yet output."""

    index: int
    detokenizer: Detokenizer | None
    num_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: LogprobsTable | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    num_preemptions: int = 0
    prediction: Prediction | None = None  # as far as it is output


@dataclass(slots=True)
class RequestState:
    """A request from its arrival to its last output."""

    request: EngineCoreRequest
    prompt: str | None
    samples: list[SampleState]
    queue: OutputQueue | None
    metrics: RequestMetrics
    num_unfinished: int
    prompt_logprobs: LogprobsTable | None = None
    prompt_logprobs_sent: bool = False
    num_cached_tokens: int = 0
    error: str | None = None
    error_param: str | None = None
    embedding: list[float] | None = None
    tenant: Tenant | None = None
    changed: dict[int, SampleState] = field(default_factory=dict)  # since the last output

    @property
    def finished(self) -> bool:
        """True if all samples have finished."""
        return self.num_unfinished == 0

    def take(self) -> RequestOutput:
        """An output with what is new since the last one, or with everything, as the request's output_kind says."""
        request = self.request
        prompt_logprobs = self.prompt_logprobs
        if request.sampling_params.output_kind is RequestOutputKind.DELTA:
            changed, self.changed = self.changed, {}
            outputs = [_delta(sample) for sample in changed.values()]
            if self.prompt_logprobs_sent:
                prompt_logprobs = None
            self.prompt_logprobs_sent = True
        else:
            outputs = [_whole(sample) for sample in self.samples]
        return RequestOutput(
            request_id=request.request_id,
            prompt=self.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=outputs,
            finished=self.num_unfinished == 0,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=self.num_cached_tokens,
            metrics=self.metrics,
            error=self.error,
            error_param=self.error_param,
            embedding=self.embedding,
            predicted=None if request.prediction is None else self._predicted(request.prediction, outputs),
        )

    def _predicted(self, prediction: list[int], outputs: list[CompletionOutput]) -> PredictedTokens:
        """Count what all answers repeat, once ``outputs`` are out too."""
        is_delta = self.request.sampling_params.output_kind is RequestOutputKind.DELTA
        for output in outputs:
            sample = self.samples[output.index]
            if sample.prediction is None or not is_delta:
                sample.prediction = Prediction(prediction)
            sample.prediction.follow(output.token_ids)
        followed = [sample.prediction for sample in self.samples if sample.prediction is not None]
        return PredictedTokens(sum(one.num_right for one in followed), sum(one.num_wrong for one in followed))


class OutputProcessor:
    """The state of every unfinished request. Used from one thread."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.vocabulary = Vocabulary(tokenizer) if tokenizer is not None else None
        self.requests: dict[str, RequestState] = {}
        self.num_unfinished_samples = 0

    def has_unfinished_requests(self) -> bool:
        """True if any request is unfinished."""
        return bool(self.requests)

    def add_request(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        queue: OutputQueue | None = None,
        tenant: Tenant | None = None,
    ) -> None:
        """Expect outputs of ``request``; they go to ``queue`` when there is one, else process_outputs returns them."""
        if request.request_id in self.requests:
            raise ValueError(
                f"request_id {request.request_id!r} is already in use by a running request; choose another"
            )
        params = request.sampling_params
        text_of = None if self.vocabulary is None else self.vocabulary.token_text
        samples = [
            SampleState(
                index=index,
                detokenizer=Detokenizer(self.vocabulary, params, request.prompt_token_ids)
                if self.vocabulary is not None and params.detokenize
                else None,
                cumulative_logprob=None if params.logprobs is None else 0.0,
                logprobs=None
                if params.logprobs is None
                else LogprobsTable(text_of, ranked=params.logprob_token_ids is None),
            )
            for index in range(params.n)
        ]
        self.num_unfinished_samples += params.n
        self.requests[request.request_id] = RequestState(
            request=request,
            prompt=prompt,
            samples=samples,
            queue=queue,
            metrics=RequestMetrics(arrival_time=request.arrival_time),
            num_unfinished=params.n,
            tenant=tenant,
            prompt_logprobs=None if params.prompt_logprobs is None else LogprobsTable(text_of, [None], [None], [0]),
        )

    def abort_requests(
        self,
        request_ids: Iterable[str],
        reason: str = "abort",
        error: str | None = None,
        stats: IterationStats | None = None,
    ) -> list[str]:
        """End requests, with a last output each. Returns the ids that were unfinished."""
        now = time.time()
        known = []
        for request_id in request_ids:
            state = self.requests.pop(request_id, None)
            if state is None:
                continue
            known.append(request_id)
            for sample in state.samples:
                if sample.finish_reason is None:
                    sample.finish_reason = reason
                    state.changed[sample.index] = sample
                    if sample.detokenizer is not None:
                        sample.detokenizer.update([], finished=True)
                    if stats is not None:
                        stats.finished.append(_finished(state, sample, now))
            if stats is not None:
                stats.finished_requests.append(_finished_request(state, now, error))
            self.num_unfinished_samples -= state.num_unfinished
            state.num_unfinished = 0
            state.error = error
            if state.queue is not None:
                state.queue.put(state)
        return known

    def clear(self) -> None:
        """Drop all requests, without any output."""
        self.requests.clear()
        self.num_unfinished_samples = 0

    def process_outputs(
        self, outputs: list[EngineCoreOutput], timestamp: float | None = None, stats: IterationStats | None = None
    ) -> tuple[list[RequestOutput], list[tuple[str, int]]]:
        """Process one step's results.

        Returns the outputs of requests without a queue, and the samples, as (request id, index), that a stop string
        ended and that the core must end too. ``timestamp``: when the tokens were known, seconds since the epoch.
        ``stats`` collects the metrics.
        """
        touched: dict[str, RequestState] = {}
        stopped: list[tuple[str, int]] = []
        for output in outputs:
            state = self.requests.get(output.request_id)
            if state is None:  # aborted in the meantime
                continue
            if output.index < 0:  # the core refused the whole request
                self.abort_requests([output.request_id], reason="error", error=output.error, stats=stats)
                continue
            sample = state.samples[output.index]
            if sample.finish_reason is not None:  # a token that was in flight when a stop string matched
                continue
            if self._take(state, sample, output, timestamp, stats):
                stopped.append((output.request_id, output.index))
            if not output.new_token_ids and sample.finish_reason is None:
                continue  # log-probabilities of a part of the prompt: output with the first token
            state.changed[output.index] = sample
            touched[output.request_id] = state
        return self._collect(touched.values(), timestamp, stats), stopped

    def _collect(
        self, touched: Iterable[RequestState], timestamp: float | None, stats: IterationStats | None
    ) -> list[RequestOutput]:
        """Announce requests with new output, and forget those that have finished. Returns outputs without a queue."""
        results: list[RequestOutput] = []
        for state in touched:
            if state.num_unfinished == 0:
                if self.requests.pop(state.request.request_id, None) is None:  # refused in the same step
                    continue
                state.metrics.finished_time = timestamp
                if stats is not None:
                    now = time.time() if timestamp is None else timestamp
                    stats.finished_requests.append(_finished_request(state, now, state.error))
            elif state.request.sampling_params.output_kind is RequestOutputKind.FINAL_ONLY:
                continue
            if state.queue is not None:
                state.queue.put(state)
            else:
                results.append(state.take())
        return results

    def _take(
        self,
        state: RequestState,
        sample: SampleState,
        output: EngineCoreOutput,
        timestamp: float | None,
        stats: IterationStats | None,
    ) -> bool:
        """Add one output to its sample; True when a stop string ended it before the core did."""
        metrics = state.metrics
        if metrics.scheduled_time is None:
            metrics.scheduled_time = output.scheduled_time
            state.num_cached_tokens = output.num_cached_tokens
        sample.num_preemptions += output.num_preemptions
        token_ids = output.new_token_ids
        finish_reason, stop_reason = output.finish_reason, output.stop_reason
        stopped_by_string = False
        if sample.detokenizer is not None and (token_ids or finish_reason):
            used, stop = sample.detokenizer.update(token_ids, finish_reason is not None, finish_reason == "stop")
            token_ids = token_ids[:used]
            if stop is not None:
                stopped_by_string = finish_reason is None
                finish_reason, stop_reason = "stop", stop
        if token_ids:
            if stats is not None and timestamp is not None:
                _count_tokens(stats, state, sample, len(token_ids), timestamp)
            sample.num_tokens += len(token_ids)
            sample.token_ids += token_ids
            sample.last_token_time = metrics.last_token_time = timestamp
            if sample.first_token_time is None:
                sample.first_token_time = timestamp
                metrics.first_token_time = metrics.first_token_time or timestamp
        if output.new_logprobs is not None and sample.logprobs is not None:
            _take_logprobs(sample, output.new_logprobs, len(token_ids))
        if output.prompt_logprobs is not None and state.prompt_logprobs is not None:
            lists = output.prompt_logprobs
            state.prompt_logprobs.extend(lists.token_ids, lists.logprobs, lists.ranks)
        if output.embedding is not None:
            state.embedding = output.embedding
            if stats is not None:
                stats.num_prompt_tokens += len(state.request.prompt_token_ids)
                stats.count_for(state.tenant, len(state.request.prompt_token_ids), 0)
        if finish_reason is not None:
            sample.finish_reason, sample.stop_reason = finish_reason, stop_reason
            self._finish(state, sample, output, timestamp, stats)
        return stopped_by_string

    def _finish(
        self,
        state: RequestState,
        sample: SampleState,
        output: EngineCoreOutput,
        timestamp: float | None,
        stats: IterationStats | None,
    ) -> None:
        """Account for a sample that ``output`` has finished."""
        if output.error is not None:
            state.error, state.error_param = output.error, output.error_param
        state.num_unfinished -= 1
        self.num_unfinished_samples -= 1
        if stats is not None:
            stats.finished.append(_finished(state, sample, timestamp or time.time()))


def _take_logprobs(sample: SampleState, lists: LogprobsLists, count: int) -> None:
    assert sample.logprobs is not None and sample.cumulative_logprob is not None
    sample.cumulative_logprob += sum(row[0] for row in lists.logprobs[:count])
    sample.logprobs.extend(lists.token_ids[:count], lists.logprobs[:count], lists.ranks[:count])


def _count_tokens(
    stats: IterationStats, state: RequestState, sample: SampleState, count: int, timestamp: float
) -> None:
    """Account for new tokens of a sequence, before they are added to it."""
    stats.num_generation_tokens += count
    stats.count_for(state.tenant, 0, count)
    if sample.last_token_time is not None:
        stats.inter_token_seconds.append(timestamp - sample.last_token_time)
        return
    stats.first_token_seconds.append(timestamp - state.request.arrival_time)
    if state.metrics.first_token_time is None:  # the prompt is the request's, however many sequences follow it
        stats.num_prompt_tokens += len(state.request.prompt_token_ids)
        stats.count_for(state.tenant, len(state.request.prompt_token_ids), 0)
        stats.num_cached_tokens += state.num_cached_tokens


def _finished(state: RequestState, sample: SampleState, now: float) -> FinishedSample:
    arrival, scheduled = state.request.arrival_time, state.metrics.scheduled_time
    first, last = sample.first_token_time, sample.last_token_time
    return FinishedSample(
        reason=sample.finish_reason or "error",
        params=state.request.sampling_params,
        num_prompt_tokens=len(state.request.prompt_token_ids),
        num_cached_tokens=state.num_cached_tokens,
        num_generation_tokens=sample.num_tokens,
        e2e=now - arrival,
        queued=_between(arrival, scheduled),
        prefill=_between(scheduled, first),
        decode=_between(first, last),
        inference=_between(scheduled, last),
        num_preemptions=sample.num_preemptions,
    )


def _finished_request(state: RequestState, now: float, error: str | None) -> FinishedRequest:
    arrival, metrics = state.request.arrival_time, state.metrics
    scheduled, first, last = metrics.scheduled_time, metrics.first_token_time, metrics.last_token_time
    lengths = [sample.num_tokens for sample in state.samples]
    return FinishedRequest(
        request_id=state.request.request_id,
        arrival_time=arrival,
        params=state.request.sampling_params,
        num_prompt_tokens=len(state.request.prompt_token_ids),
        num_cached_tokens=state.num_cached_tokens,
        num_generation_tokens=sum(lengths),
        max_num_generation_tokens=max(lengths),
        e2e=now - arrival,
        queued=_between(arrival, scheduled),
        first_token=_between(arrival, first),
        prefill=_between(scheduled, first),
        decode=_between(first, last),
        inference=_between(scheduled, last),
        error=error,
    )


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


def _whole(sample: SampleState) -> CompletionOutput:
    return CompletionOutput(
        index=sample.index,
        text=sample.detokenizer.text if sample.detokenizer is not None else "",
        token_ids=list(sample.token_ids),
        cumulative_logprob=sample.cumulative_logprob,
        logprobs=None if sample.logprobs is None else sample.logprobs[:],
        finish_reason=sample.finish_reason,
        stop_reason=sample.stop_reason,
    )


def _delta(sample: SampleState) -> CompletionOutput:
    token_ids, sample.token_ids = sample.token_ids, []
    logprobs = sample.logprobs
    if logprobs is not None:
        sample.logprobs = LogprobsTable(logprobs.text_of, ranked=logprobs.ranked)
    return CompletionOutput(
        index=sample.index,
        text=sample.detokenizer.take_delta() if sample.detokenizer is not None else "",
        token_ids=token_ids,
        cumulative_logprob=sample.cumulative_logprob,
        logprobs=logprobs,
        finish_reason=sample.finish_reason,
        stop_reason=sample.stop_reason,
    )
