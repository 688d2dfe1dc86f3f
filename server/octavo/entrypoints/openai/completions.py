"""POST /v1/completions"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from octavo.entrypoints.generation import run as serving
from octavo.entrypoints.generation.structured import constraint_of
from octavo.entrypoints.openai.logprobs import prompt_logprobs
from octavo.entrypoints.openai.protocol import CompletionRequest
from octavo.entrypoints.openai.responses import Completion, CompletionChoice, CompletionLogprobs, Usage, usage
from octavo.entrypoints.state import ServerState
from octavo.entrypoints.transport.http_answers import (
    DONE,
    JSON,
    EventStream,
    EventTemplate,
    event,
    read_body,
    unless_disconnected,
)
from octavo.interface.messages import EngineCoreRequest
from octavo.interface.outputs import CompletionOutput, LogprobsTable, RequestOutput
from octavo.text.detokenizer import TextOffsets, prompt_offsets

DEFAULT_MAX_TOKENS = 16  # OpenAI's


@dataclass
class _Job:
    """One HTTP request's prompts on their way."""

    state: ServerState
    body: CompletionRequest
    id: str
    created: int
    requests: list[EngineCoreRequest]
    texts: list[str | None]
    n: int
    prompt_only: bool  # echo with max_tokens 0: the prompt's log-probabilities are what is wanted
    _echoed: dict[int, str] = field(default_factory=dict)  # by position: every choice asks for it

    def echoed(self, position: int) -> str:
        """The prompt as its choices repeat it; nothing unless they do."""
        if not self.body.echo:
            return ""
        if (text := self._echoed.get(position)) is None:
            text = self.texts[position]
            if text is None or self.body.truncate_prompt_tokens is not None:
                tokenizer, ids = self.state.engine.tokenizer, self.requests[position].prompt_token_ids
                text = "" if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=False)
            self._echoed[position] = text
        return text

    def completion(self, choices: list[CompletionChoice], used: Usage | UnsetType | None = UNSET) -> Completion:
        state = self.state
        return Completion(
            self.id, self.created, state.model_name, choices, system_fingerprint=state.fingerprint, usage=used
        )


async def create_completion(request: Request) -> Response:
    state = serving.state_of(request)
    state.check_serving()
    body = await read_body(request, CompletionRequest, state.max_body_bytes)
    body.check()
    state.check_model(body.model)
    job = await _prepare(state, body, serving.external_id(request, "cmpl", body.request_id))
    if body.stream:
        run = await serving.Running(state, job.requests, job.texts).start()
        events = _Events(job)
        return EventStream(run, events)
    return await unless_disconnected(request, _answer(job))


async def _prepare(state: ServerState, body: CompletionRequest, answer_id: str) -> _Job:
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    prompt_only = bool(body.echo) and max_tokens == 0
    params = serving.sampling_params(state, body, 1 if prompt_only else max_tokens, body.logprobs)
    if body.echo and body.logprobs is not None and params.prompt_logprobs is None:
        params.prompt_logprobs = body.logprobs
    prompts = body.prompts()
    special = True if body.add_special_tokens is None else body.add_special_tokens
    constraint = constraint_of(body)
    requests = []
    for prompt in prompts:
        requests.append(
            await serving.prepare(state, body, prompt, params, params.max_tokens, "max_tokens", special, constraint)
        )
        await asyncio.sleep(0)  # a thousand prompts do not hold up everybody else
    texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]
    return _Job(state, body, answer_id, int(time.time()), requests, texts, params.n, prompt_only)


async def _answer(job: _Job) -> Response:
    with serving.Running(job.state, job.requests, job.texts) as run:
        await run.start()
        finals = await run.final_outputs()
    choices = await serving.encoded(
        job.state,
        [
            (partial(_whole, job, position, completion, final), serving.weight(completion, final))
            for position, final in enumerate(finals)
            for completion in final.outputs
        ],
    )
    return JSON(job.completion(choices, _usage(finals, job)))


def _whole(job: _Job, position: int, completion: CompletionOutput, final: RequestOutput) -> CompletionChoice:
    return _Choice(job, position, completion.index).take(completion, final)


def _usage(finals: Sequence[RequestOutput], job: _Job) -> Usage:
    return usage(
        sum(len(final.prompt_token_ids) for final in finals),
        0 if job.prompt_only else sum(len(completion.token_ids) for final in finals for completion in final.outputs),
        sum(final.num_cached_tokens for final in finals),
    )


class _Events:
    """The events of a stream."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._choices: dict[tuple[int, int], _Choice] = {}
        self._prompt_logprobs: dict[int, LogprobsTable | None] = {}  # by position; each choice tells them
        self._prompt_tokens = sum(len(request.prompt_token_ids) for request in job.requests)
        self._completion_tokens = 0
        self._cached = [0] * len(job.requests)
        self._include_usage, self._continuous_usage = serving.streamed_usage(job.state, job.body)
        self._no_usage = None if self._include_usage else UNSET
        more = job.body.logprobs is not None or job.body.return_token_ids or self._continuous_usage
        self._only_text = not (more or job.prompt_only)

    def write(self, item: tuple[int, RequestOutput]) -> bytes:
        """What one output of one prompt tells; nothing when all of it is held back."""
        position, output = item
        job = self._job
        self._cached[position] = output.num_cached_tokens
        output.prompt_logprobs = self._prompt_logprobs.setdefault(position, output.prompt_logprobs)
        events = b""
        for completion in output.outputs:
            choice = self._choices.get((position, completion.index))
            if choice is None:
                choice = self._choices[position, completion.index] = _Choice(job, position, completion.index)
            self._completion_tokens += 0 if job.prompt_only else len(completion.token_ids)
            if choice.template is not None and completion.finish_reason is None:
                if completion.text:
                    events += choice.template.fill(completion.text)
                continue
            piece = choice.take(completion, output)
            if choice.worth_sending(piece):
                used = self._usage() if self._continuous_usage else self._no_usage
                events += event(job.completion([piece], used))
            if self._only_text:  # from now on
                choice.template = EventTemplate(
                    partial(_text_only, job, CompletionChoice(piece.index, ""), self._no_usage)
                )
        return events

    def end(self) -> bytes:
        if not self._include_usage:
            return DONE
        return event(self._job.completion([], self._usage())) + DONE

    def _usage(self) -> Usage:
        return usage(self._prompt_tokens, self._completion_tokens, sum(self._cached))


def _text_only(job: _Job, choice: CompletionChoice, used: UnsetType | None, text: str) -> Completion:
    choice.text = text
    return job.completion([choice], used)


class _Choice:
    """One answer's pieces: in a stream several, otherwise a single one."""

    def __init__(self, job: _Job, position: int, index: int) -> None:
        self._job = job
        self._position = position
        self._index = position * job.n + index
        self._offsets: TextOffsets | None = None  # of the tokens that are generated
        self._first = True
        self._format = serving.formatter(job.state, job.body)
        self.template: EventTemplate | None = None  # for pieces that are text and nothing else

    def take(self, completion: CompletionOutput, output: RequestOutput) -> CompletionChoice:
        job, body = self._job, self._job.body
        prompt_ids = output.prompt_token_ids
        if job.prompt_only:
            completion.text, completion.token_ids = "", []
            completion.logprobs = None if completion.logprobs is None else completion.logprobs[:0]
            if completion.finish_reason is not None:
                completion.finish_reason, completion.stop_reason = "length", None
        choice = CompletionChoice(self._index, completion.text, None, completion.finish_reason, completion.stop_reason)
        if self._first:
            choice.text = job.echoed(self._position) + choice.text
            if body.prompt_logprobs is not None and output.prompt_logprobs is not None:
                choice.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
            if body.return_token_ids:
                choice.prompt_token_ids = prompt_ids
        if body.return_token_ids:
            choice.token_ids = completion.token_ids
        if body.logprobs is not None and completion.logprobs is not None:
            choice.logprobs = self._logprobs(completion, output, body.logprobs)
        self._first = False
        return choice

    def _logprobs(self, completion: CompletionOutput, output: RequestOutput, top: int) -> CompletionLogprobs:
        job, vocabulary = self._job, self._job.state.engine.output_processor.vocabulary
        ids, positions = completion.token_ids, [*(completion.logprobs or ())]
        offsets = [0] * len(ids)  # without a tokenizer there is no text
        if vocabulary is not None:
            if self._offsets is None:
                params = job.requests[self._position].sampling_params
                start = len(job.echoed(self._position))
                self._offsets = TextOffsets(vocabulary, params, output.prompt_token_ids, start)
            offsets = self._offsets.take(ids)
        if self._first and job.body.echo and output.prompt_logprobs is not None:
            ids, positions = output.prompt_token_ids + ids, [*output.prompt_logprobs, *positions]
            before = [0] * len(output.prompt_token_ids)
            if vocabulary is not None:
                before = prompt_offsets(vocabulary, output.prompt_token_ids, job.echoed(self._position))
            offsets = before + offsets
        return self._format.completion(ids, positions, top, offsets)

    def worth_sending(self, piece: CompletionChoice) -> bool:
        """A piece without news (text that is held back) is not sent, unless tokens themselves are wanted."""
        return bool(
            piece.text
            or piece.finish_reason
            or piece.logprobs is not None
            or piece.prompt_logprobs is not UNSET
            or (piece.token_ids is not UNSET and piece.token_ids)
        )
