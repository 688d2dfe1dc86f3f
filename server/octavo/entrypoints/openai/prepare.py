"""POST /v1/completions"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from functools import partial

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from octavo.entrypoints.admission import check_model, check_serving
from octavo.entrypoints.generation.context import naming
from octavo.entrypoints.generation.logprobs import CompletionLogprobs, LogprobsFormatter, prompt_logprobs
from octavo.entrypoints.generation.run import (
    Generation,
    TokenLimit,
    TopLogprobs,
    answering_name,
    encode_choices,
    encoding_cost,
    external_id,
    prepare_request,
    sampling_params,
)
from octavo.entrypoints.generation.stream import EventStream
from octavo.entrypoints.openai.answers import Completion, CompletionChoice, Usage, usage
from octavo.entrypoints.openai.events import DONE, ChunkEvents
from octavo.entrypoints.openai.protocol import NO_LIMIT, CompletionRequest
from octavo.entrypoints.openai.response_format import constraint_of
from octavo.entrypoints.state import ServerState, state_of
from octavo.entrypoints.transport.request_body import read_body
from octavo.entrypoints.transport.responses import JSON, unless_disconnected
from octavo.entrypoints.transport.sse import EventTemplate, event
from octavo.interface.messages import EngineCoreRequest
from octavo.interface.outputs import CompletionOutput, LogprobsTable, RequestOutput
from octavo.interface.pooling_params import check_generates
from octavo.text.detokenizer import TextOffsets, prompt_offsets

DEFAULT_MAX_TOKENS = 16  # OpenAI's


@dataclass
class CompletionContext:
    """One HTTP request, its prompts ready for the engine."""

    state: ServerState
    body: CompletionRequest
    id: str
    created: int
    requests: list[EngineCoreRequest]
    texts: list[str | None]
    n: int
    prompt_only: bool  # echo with max_tokens 0: only the prompt's log-probabilities are wanted
    _echoed: dict[int, str] = field(default_factory=dict)  # by position: every choice repeats it

    def echoed(self, position: int) -> str:
        """The prompt as its choices repeat it; empty without echo."""
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
        """A response, or a chunk of one."""
        state = self.state
        return Completion(
            self.id,
            self.created,
            answering_name(state, self.requests[0]),
            choices,
            system_fingerprint=state.fingerprint,
            usage=used,
        )


async def create_completion(request: Request) -> Response:
    """Handle POST /v1/completions."""
    state = state_of(request)
    check_serving(state)
    body = await read_body(request, CompletionRequest, state)
    body.check()
    check_model(state, body.model)
    check_generates(state.engine.config.model.pooler)
    context = await _prepare(state, body, external_id(request, "cmpl", body.request_id))
    if body.stream:
        generation = await Generation(state, context.requests, context.texts).start()
        return EventStream(generation, _Events(context))
    return await unless_disconnected(request, _complete(context))


async def _prepare(state: ServerState, body: CompletionRequest, response_id: str) -> CompletionContext:
    max_tokens = {None: DEFAULT_MAX_TOKENS, NO_LIMIT: None}.get(body.max_tokens, body.max_tokens)
    prompt_only = bool(body.echo) and max_tokens == 0
    params = sampling_params(
        state,
        body.sampling_fields(),
        TokenLimit(1 if prompt_only else max_tokens),
        TopLogprobs(body.logprobs),
        bool(body.stream),
    )
    if body.echo and body.logprobs is not None and params.prompt_logprobs is None:
        params.prompt_logprobs = body.logprobs
    prompts = body.prompts()
    options = body.prompt_options(add_special_tokens=True)
    limit, constraint = TokenLimit(params.max_tokens), constraint_of(body)
    requests = []
    for prompt in prompts:
        with naming({"prompt_token_ids": "prompt"}):
            requests.append(await prepare_request(state, prompt, params, options, limit, constraint))
        await asyncio.sleep(0)  # let other requests run between a thousand prompts
    texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]
    return CompletionContext(state, body, response_id, int(time.time()), requests, texts, params.n, prompt_only)


async def _complete(context: CompletionContext) -> Response:
    with Generation(context.state, context.requests, context.texts) as generation:
        await generation.start()
        finals = await generation.final_outputs()
    choices = await encode_choices(
        context.state,
        [
            (partial(_whole, context, position, completion, final), encoding_cost(completion, final))
            for position, final in enumerate(finals)
            for completion in final.outputs
        ],
    )
    used = usage(
        sum(len(final.prompt_token_ids) for final in finals),
        0 if context.prompt_only else sum(len(choice.token_ids) for final in finals for choice in final.outputs),
        sum(final.num_cached_tokens for final in finals),
    )
    whole = context.completion(choices, used)
    whole.service_tier = whole.kv_transfer_params = None
    return JSON(whole)


def _whole(
    context: CompletionContext, position: int, completion: CompletionOutput, final: RequestOutput
) -> CompletionChoice:
    choice = _Choice(context, position, completion.index).take(completion, final)
    for name in ("prompt_logprobs", "token_ids", "prompt_token_ids"):
        if getattr(choice, name) is UNSET:
            setattr(choice, name, None)
    return choice


class _Events(ChunkEvents):
    """The chunks of a streamed completion."""

    def __init__(self, context: CompletionContext) -> None:
        super().__init__(context.state, context.body)
        self._context = context
        self._choices: dict[tuple[int, int], _Choice] = {}
        self._prompt_logprobs: dict[int, LogprobsTable | None] = {}  # by position; each choice has them
        self._prompt_tokens = sum(len(request.prompt_token_ids) for request in context.requests)
        self._completion_tokens = 0
        self._cached = [0] * len(context.requests)
        more = context.body.logprobs is not None or context.body.return_token_ids or self.continuous_usage
        self._only_text = not (more or context.prompt_only)

    def write(self, item: tuple[int, RequestOutput]) -> bytes:
        """The chunks of one output of one prompt; empty if all of its text is held back."""
        position, output = item
        context = self._context
        self._cached[position] = output.num_cached_tokens
        output.prompt_logprobs = self._prompt_logprobs.setdefault(position, output.prompt_logprobs)
        events = b""
        for completion in output.outputs:
            choice = self._choices.get((position, completion.index))
            if choice is None:
                choice = self._choices[position, completion.index] = _Choice(context, position, completion.index)
            self._completion_tokens += 0 if context.prompt_only else len(completion.token_ids)
            if choice.template is not None and completion.finish_reason is None:
                if completion.text:
                    events += choice.template.fill(completion.text)
                continue
            piece = choice.take(completion, output)
            if choice.worth_sending(piece):
                events += event(context.completion([piece], self.chunk_usage()))
            if self._only_text:  # from now on
                text_only = partial(_text_only, context, CompletionChoice(piece.index, ""), self.no_usage)
                choice.template = EventTemplate(text_only)
        return events

    def end(self) -> bytes:
        """The usage, if the client wants it, and the end."""
        return event(self._context.completion([], self.usage())) + DONE if self.include_usage else DONE

    def usage(self) -> Usage:
        """The usage so far."""
        return usage(self._prompt_tokens, self._completion_tokens, sum(self._cached))


def _text_only(context: CompletionContext, choice: CompletionChoice, used: UnsetType | None, text: str) -> Completion:
    choice.text = text
    return context.completion([choice], used)


class _Choice:
    """The pieces of one choice: several in a stream, otherwise one."""

    def __init__(self, context: CompletionContext, position: int, index: int) -> None:
        self._context = context
        self._position = position
        self._index = position * context.n + index
        self._offsets: TextOffsets | None = None  # of the tokens that are generated
        self._first = True
        self._format = LogprobsFormatter(context.state, context.body.return_tokens_as_token_ids)
        self.template: EventTemplate | None = None  # for pieces that are text and nothing else

    def take(self, completion: CompletionOutput, output: RequestOutput) -> CompletionChoice:
        context, body = self._context, self._context.body
        prompt_ids = output.prompt_token_ids
        if context.prompt_only:
            completion.text, completion.token_ids = "", []
            completion.logprobs = None if completion.logprobs is None else completion.logprobs[:0]
            if completion.finish_reason is not None:
                completion.finish_reason, completion.stop_reason = "length", None
        choice = CompletionChoice(self._index, completion.text, None, completion.finish_reason, completion.stop_reason)
        if self._first:
            choice.text = context.echoed(self._position) + choice.text
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
        context, vocabulary = self._context, self._context.state.engine.output_processor.vocabulary
        ids, positions = completion.token_ids, [*(completion.logprobs or ())]
        offsets = [0] * len(ids)  # without a tokenizer there is no text
        if vocabulary is not None:
            if self._offsets is None:
                params = context.requests[self._position].sampling_params
                start = len(context.echoed(self._position))
                self._offsets = TextOffsets(vocabulary, params, output.prompt_token_ids, start)
            offsets = self._offsets.take(ids)
        if self._first and context.body.echo and output.prompt_logprobs is not None:
            ids, positions = output.prompt_token_ids + ids, [*output.prompt_logprobs, *positions]
            before = [0] * len(output.prompt_token_ids)
            if vocabulary is not None:
                before = prompt_offsets(vocabulary, output.prompt_token_ids, context.echoed(self._position))
            offsets = before + offsets
        return self._format.completion(ids, positions, top, offsets)

    def worth_sending(self, piece: CompletionChoice) -> bool:
        """False for a piece whose text is held back, unless the client wants the tokens themselves."""
        return bool(
            piece.text
            or piece.finish_reason
            or piece.logprobs is not None
            or piece.prompt_logprobs is not UNSET
            or (piece.token_ids is not UNSET and piece.token_ids)
        )
