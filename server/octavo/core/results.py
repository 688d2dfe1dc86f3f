"""Apply a step's results to its sequences: tokens, ends, log-probabilities, errors, and confirmed KV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.request import Request, RequestStatus
from octavo.core.sample_groups import SampleGroups
from octavo.core.spec_decode.drafts import Drafts
from octavo.core.thoughts import ThoughtWatch
from octavo.interface.messages import EngineCoreOutput, LogprobsLists
from octavo.interface.step import CachedRequestData, ModelRunnerOutput, NewRequestData


@dataclass
class CurrentStep:
    """The step under construction: its limits, and what is in it so far."""

    budget: int
    now: float
    scheduled: dict[str, ScheduledSequence] = field(default_factory=dict)
    new: list[NewRequestData] = field(default_factory=list)
    changed: dict[str, CachedRequestData] = field(default_factory=dict)
    copies: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    preempted: bool = False
    reserved: int = 0  # blocks that admitted prompts still need
    draft_budget: int = 0
    drafts: dict[str, list[int]] = field(default_factory=dict)


@dataclass(slots=True)
class ScheduledSequence:
    """One sequence's part of a step in flight."""

    request: Request
    epoch: int
    num_tokens: int
    computed_until: int  # the request's num_computed_tokens after the step
    sampled: bool
    replaced: bool  # a block of it is replaced by a copy in this step
    drafts: list[int]  # the last ones of its tokens
    rejected_before: int  # the request's num_rejected when the step was scheduled


@dataclass
class Counters:
    """Counts since they were last taken, by their names in `SchedulerStats`."""

    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    num_thoughts_ended: int = 0

    def take(self) -> dict[str, Any]:
        """The counts, which begin anew."""
        taken = asdict(self)
        vars(self).update(dict.fromkeys(taken, 0))
        return taken


def make_output(request: Request, tokens: list[int] | None = None) -> EngineCoreOutput:
    """The sequence's news for the front end, ``tokens`` (already appended) among them."""
    tokens = tokens or []
    output = EngineCoreOutput(request.request_id, request.index, tokens)
    if request.is_finished:
        output.finish_reason, output.stop_reason = request.finish_reason, request.stop_reason
    if request.num_preemptions:
        output.num_preemptions, request.num_preemptions = request.num_preemptions, 0
    if request.num_output_tokens == len(tokens):  # its first
        output.num_cached_tokens = request.num_cached_tokens
        output.scheduled_time = request.scheduled_time
    return output


class ResultProcessor:
    """Takes in the results of steps for a scheduler, whose ``finish`` takes a sequence out of its queues and whose
    ``restart`` has a sequence's tokens computed anew."""

    def __init__(
        self,
        max_model_len: int,
        kv: KVCacheManager,
        groups: SampleGroups,
        finish: Callable[[Request, RequestStatus], None],
        restart: Callable[[Request], None],
    ) -> None:
        self._max_model_len = max_model_len
        self._kv = kv
        self._groups = groups
        self._finish = finish
        self._restart = restart
        self.counters = Counters()
        self.drafts: Drafts | None = None  # whose drafts are counted

    def process(self, step: list[ScheduledSequence], output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Take in what one step gave. Tokens of sequences that have ended since are dropped."""
        results: list[EngineCoreOutput] = []
        if self.drafts is not None:
            self.drafts.receive(output.draft_token_ids)
        any_failed, confirm = bool(output.errors or output.grammar_errors), self._kv.confirm
        speculates, has_states = self.drafts is not None, self._kv.states is not None
        for scheduled in step:
            request = scheduled.request
            if any_failed:
                results += self._take_error(request, output)
            if request.is_finished:
                continue
            if speculates:
                # What was computed before this step is less by what steps in flight then have rejected since.
                scheduled.computed_until -= request.num_rejected - scheduled.rejected_before
                if scheduled.drafts:
                    self._drop_rejected(scheduled, output)
            if scheduled.epoch == request.epoch:
                confirm(request, scheduled.computed_until, scheduled.replaced)
                if has_states:  # all but the last token that was known, and the drafts behind it
                    num_behind = scheduled.num_tokens if scheduled.drafts else scheduled.sampled
                    self._kv.confirm_state(request, scheduled.computed_until - num_behind)
            prompt_logprobs = self._new_prompt_logprobs(scheduled, output) if output.prompt_logprobs else None
            if scheduled.sampled:
                results.append(self._take_token(request, output))
                results[-1].prompt_logprobs = prompt_logprobs
            elif prompt_logprobs is not None:
                results.append(make_output(request))
                results[-1].prompt_logprobs = prompt_logprobs
        return results

    def _take_error(self, request: Request, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        results: list[EngineCoreOutput] = []
        if (error := output.errors.get(request.req_id)) is not None:
            results += self._fail(request, error)
        if (error := output.grammar_errors.get(request.req_id)) is not None:
            field = request.core_request.grammar_field
            results += self._fail(request, f"{field} {error}", field)
        return results

    def _drop_rejected(self, scheduled: ScheduledSequence, output: ModelRunnerOutput) -> None:
        """Drop rejected drafts: the sequence is computed only up to the accepted ones."""
        request = scheduled.request
        num_accepted = max(len(output.sampled_token_ids.get(request.req_id, [])) - 1, 0)
        num_rejected = len(scheduled.drafts) - num_accepted
        request.num_drafts -= len(scheduled.drafts)
        request.num_rejected += num_rejected
        scheduled.computed_until -= num_rejected
        scheduled.num_tokens -= num_rejected
        if scheduled.epoch == request.epoch:
            request.num_computed_tokens -= num_rejected
        if self.drafts is not None:
            self.drafts.observe(request, len(scheduled.drafts), num_accepted)

    def _fail(self, request: Request, error: str, param: str | None = None) -> list[EngineCoreOutput]:
        """End all samples of a request: the others may share KV that the failed step was to write."""
        outputs = []
        for sequence in self._groups.siblings(request):
            self._finish(sequence, RequestStatus.FINISHED_ERROR)
            outputs.append(make_output(sequence))
            outputs[-1].error, outputs[-1].error_param = error, param
        return outputs

    def _new_prompt_logprobs(self, scheduled: ScheduledSequence, output: ModelRunnerOutput) -> LogprobsLists | None:
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
        used_up = False
        if request.thoughts is not None:
            tokens, used_up = self._within_budget(request, request.thoughts, tokens)
        for i, token in enumerate(tokens):
            ended = request.append_output_token(token, self._max_model_len)
            if ended:
                tokens = tokens[: i + 1]
                break
        num_sampled = len(tokens)
        if used_up and not ended:
            closing, ended = self._end_thoughts(request)
            tokens = [*tokens, *closing]
        if ended:
            self._finish(request, request.status)
        result = make_output(request, tokens)
        if output.logprobs:
            logprobs = output.logprobs.get(request.req_id)
            result.new_logprobs = logprobs and logprobs.until(num_sampled).with_known(tokens[num_sampled:])
        if output.embeddings:
            result.embedding = output.embeddings.get(request.req_id)
        return result

    def _within_budget(self, request: Request, watch: ThoughtWatch, tokens: list[int]) -> tuple[list[int], bool]:
        """The tokens that the budget of thoughts leaves, and whether it is used up by now."""
        if watch.num_dropped:  # of a step that was in flight when it was
            watch.num_dropped -= 1
            tokens, kept = [], None
        else:
            kept = watch.take(tokens, request.num_output_tokens)
        if kept is not None:
            watch.is_over, watch.num_dropped = True, request.num_output_placeholders
        if watch.is_over and not watch.num_dropped:
            request.thoughts = None
        return tokens if kept is None else tokens[:kept], kept is not None

    def _end_thoughts(self, request: Request) -> tuple[list[int], bool]:
        """Append the tokens that end a sequence's thoughts; returns them, and whether they end the sequence."""
        budget = request.core_request.thoughts
        assert budget is not None
        self._restart(request)
        self.counters.num_thoughts_ended += 1
        known = request.num_tokens
        ended = request.append_known_tokens(budget.closing, self._max_model_len)
        return request.all_token_ids[known:], ended
