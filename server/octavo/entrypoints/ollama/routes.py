"""POST /api/chat and /api/generate"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from octavo.chat.answer import AnswerParser, CallDelta
from octavo.chat.messages import Conversation
from octavo.chat.render import Rendered
from octavo.chat.tools.plan import plan_tools
from octavo.entrypoints.admission import check_model, check_serving
from octavo.entrypoints.errors import APIError, bad_request, in_ollama_form
from octavo.entrypoints.generation.chat import PreparedChat, prepare_chat
from octavo.entrypoints.generation.context import in_words_of, naming, without_oldest_that_fits
from octavo.entrypoints.generation.logprobs import ChatLogprob, LogprobsFormatter
from octavo.entrypoints.generation.run import Generation, PromptOptions, TopLogprobs, prepare_request, sampling_params
from octavo.entrypoints.generation.stream import EventStream
from octavo.entrypoints.ollama.answers import (
    Call,
    ChatAnswer,
    GenerateAnswer,
    Message,
    durations,
    timestamp,
)
from octavo.entrypoints.ollama.dialect import NDJSON, can_think, num_ctx_of, template_of
from octavo.entrypoints.ollama.prepare import (
    OPTIONS,
    chat_conversation,
    constraint_of,
    generate_conversation,
    limit_of,
    sampling_fields,
    whole_calls,
)
from octavo.entrypoints.ollama.protocol import IMAGES, ChatRequest, GenerateRequest, Options
from octavo.entrypoints.state import ServerState, state_of
from octavo.entrypoints.transport.request_body import read_body
from octavo.entrypoints.transport.responses import JSON, encode_json, unless_disconnected
from octavo.entrypoints.transport.template import Template
from octavo.interface.outputs import CompletionOutput, RequestOutput
from octavo.interface.pooling_params import check_generates
from octavo.interface.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_said: set[str] = set()  # what has been logged once


@dataclass
class _Asked:
    """One request, ready for the engine."""

    state: ServerState
    body: ChatRequest | GenerateRequest
    began: float  # seconds since the epoch
    chat: PreparedChat

    @property
    def model(self) -> str:
        """The name that the client uses."""
        return self.body.model or self.state.model_name

    def new_parser(self) -> AnswerParser:
        """A parser of the answer."""
        return self.chat.new_parser(self.body.think is not False)


_OF_IDS = {"prompt_token_ids": "context"}  # where the client's tokens are


async def chat(request: Request) -> Response:
    """Handle POST /api/chat."""
    began = time.time()
    state = state_of(request)
    check_serving(state)
    body = await read_body(request, ChatRequest, state, any_type=True, images=IMAGES)
    _check(state, body)
    if not body.messages:
        if body.tools:  # wrong ones are refused, whatever else is asked
            plan_tools(
                Conversation([{"role": "user", "content": ""}], body.tools),
                state.chat_options,
                template_of(state) or "",
            )
        return _loaded(state, body)
    return await _answer(request, _Asked(state, body, began, await _prepare_chat(state, body)))


async def generate(request: Request) -> Response:
    """Handle POST /api/generate."""
    began = time.time()
    state = state_of(request)
    check_serving(state)
    body = await read_body(request, GenerateRequest, state, any_type=True, images=IMAGES)
    _check(state, body)
    if not body.prompt:
        return _loaded(state, body)
    if body.raw or not template_of(state):
        prepared = await _prepare_raw(state, body)
    else:
        conversation = generate_conversation(body)
        body.images = None  # not kept as long as the answer takes
        prepared = await _prepare(state, body, conversation)
    return await _answer(request, _Asked(state, body, began, prepared))


def _check(state: ServerState, body: ChatRequest | GenerateRequest) -> None:
    body.check()
    check_model(state, body.model)
    check_generates(state.engine.config.model.pooler)
    if body.think not in (None, False, "none") and not can_think(state):
        raise bad_request(
            f"think is not supported: {body.model or state.model_name} is served without a parser of reasoning "
            "(--reasoning-parser); drop think",
            "think",
        )
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs: true; set it or drop top_logprobs", "top_logprobs")
    if body.keep_alive is not None and "keep_alive" not in _said:
        _said.add("keep_alive")
        logger.info("keep_alive in requests has no effect: the model stays as long as the server runs")


async def _prepare_chat(state: ServerState, body: ChatRequest) -> PreparedChat:
    """A conversation that is too long loses its oldest messages, as few as will do, unless ``truncate`` is false."""
    conversation = chat_conversation(body)
    body.messages = None  # images are not kept as long as the answer takes
    if body.truncate is False:
        return await _prepare(state, body, conversation)
    return await without_oldest_that_fits(conversation, partial(_prepare, state, body))


async def _prepare(state: ServerState, body: ChatRequest | GenerateRequest, conversation: Conversation) -> PreparedChat:
    options = body.options or Options()
    params = _params(state, body, options)
    with in_words_of("messages" if isinstance(body, ChatRequest) else "prompt"), naming(_OF_IDS):
        prepared = await prepare_chat(
            state,
            conversation,
            params,
            PromptOptions(add_special_tokens=False),
            limit_of(options),
            partial(constraint_of, body.format),
        )
    return _within(num_ctx_of(state, options), prepared)


async def _prepare_raw(state: ServerState, body: GenerateRequest) -> PreparedChat:
    """The prompt as it is, without a chat template."""
    if body.system:
        raise bad_request("system needs a chat template, and there is none here (raw, or the model's own)", "system")
    if body.images:
        raise bad_request("images need a chat template, and there is none here (raw, or the model's own)", "images")
    if body.raw and body.context:
        raise bad_request("context is not for raw prompts: put the earlier text into prompt", "context")
    options = body.options or Options()
    prompt: str | list[int] = body.prompt or ""
    if body.context:
        prompt = [*body.context, *state.engine.input_processor.tokenize(body.prompt or "", add_special_tokens=False)]
    with in_words_of("prompt"), naming(_OF_IDS):
        request = await prepare_request(
            state,
            prompt,
            _params(state, body, options),
            PromptOptions(),
            limit_of(options),
            constraint_of(body.format),
        )
    return _within(
        num_ctx_of(state, options), PreparedChat(request, Rendered(request.prompt_token_ids, state.chat_options))
    )


def _params(state: ServerState, body: ChatRequest | GenerateRequest, options: Options) -> SamplingParams:
    with naming(OPTIONS):
        logprobs = TopLogprobs((body.top_logprobs or 0) if body.logprobs else None, "top_logprobs")
        return sampling_params(state, sampling_fields(options), limit_of(options), logprobs, body.streams)


def _within(num_ctx: int | None, prepared: PreparedChat) -> PreparedChat:
    """Prompt and answer together in ``num_ctx`` tokens. Raises APIError where the prompt alone takes them."""
    params, length = prepared.request.sampling_params, len(prepared.request.prompt_token_ids)
    if num_ctx is not None:
        if length >= num_ctx:
            raise bad_request(
                f"prompt has {length} tokens, but options.num_ctx is {num_ctx} for prompt and answer together; raise "
                "it (at most max_model_len) or shorten the prompt",
                "options.num_ctx",
            )
        params.max_tokens = min(params.max_tokens or num_ctx, num_ctx - length)
    return prepared


def _loaded(state: ServerState, body: ChatRequest | GenerateRequest) -> Response:
    """The answer to a request that has nothing to answer: it would load the model, or with keep_alive 0 unload it."""
    constraint_of(body.format)  # a wrong one is refused, whatever else is asked
    reason = "unload" if body.unloads else "load"
    common: dict[str, Any] = {
        "model": body.model or state.model_name,
        "created_at": timestamp(),
        "done": True,
        "done_reason": reason,
    }
    answer: Struct
    if isinstance(body, ChatRequest):
        answer = ChatAnswer(**common, message=Message())
    else:
        answer = GenerateAnswer(**common, response="")
    return Response(encode_json(answer) + b"\n", media_type=NDJSON) if body.streams else JSON(answer)


async def _answer(request: Request, asked: _Asked) -> Response:
    if asked.body.streams:
        generation = await Generation(asked.state, [asked.chat.request], [None]).start()
        return EventStream(generation, _Lines(asked), NDJSON)
    return await unless_disconnected(request, _complete(asked))


async def _complete(asked: _Asked) -> Response:
    with Generation(asked.state, [asked.chat.request], [None]) as generation:
        await generation.start()
        final = (await generation.final_outputs())[0]
    completion = final.outputs[0]
    parser = asked.new_parser()
    delta = parser.parse(completion)
    totals = _Totals()
    totals.add(final, completion)
    return JSON(
        _struct(
            asked,
            delta.content,
            delta.reasoning,
            whole_calls(delta.calls),
            _logprobs(asked, completion),
            **totals.fields(asked),
        )
    )


@dataclass
class _Totals:
    """What the last line of an answer says."""

    token_ids: list[int] = field(default_factory=list)
    last: RequestOutput | None = None
    reason: str | None = None

    def add(self, output: RequestOutput, completion: CompletionOutput) -> None:
        self.last = output
        self.token_ids += completion.token_ids
        self.reason = completion.finish_reason

    def fields(self, asked: _Asked) -> dict[str, Any]:
        assert self.last is not None
        prompt = self.last.prompt_token_ids
        context = {}
        if isinstance(asked.body, GenerateRequest) and not asked.body.raw:
            context = {"context": [*prompt, *self.token_ids]}
        return {
            "done": True,
            "done_reason": self.reason,
            "prompt_eval_count": len(prompt),
            "eval_count": len(self.token_ids),
            **durations(asked.began, self.last.metrics),
            **context,
        }


def _struct(
    asked: _Asked,
    text: str,
    thinking: str = "",
    calls: list[Call] | None = None,
    logprobs: list[ChatLogprob] | UnsetType = UNSET,
    **fields: Any,
) -> Struct:
    """An answer or a line of one."""
    common = {"model": asked.model, "created_at": timestamp(), "logprobs": logprobs, **fields}
    if isinstance(asked.body, ChatRequest):
        message = Message(text, thinking=thinking or UNSET, tool_calls=calls or UNSET)
        return ChatAnswer(message=message, **common)
    return GenerateAnswer(response=text, thinking=thinking or UNSET, **common)


def _logprobs(asked: _Asked, completion: CompletionOutput) -> list[ChatLogprob] | UnsetType:
    if completion.logprobs is None or not asked.body.logprobs:
        return UNSET
    formatter = LogprobsFormatter(asked.state)
    return formatter.chat(completion.token_ids, completion.logprobs, asked.body.top_logprobs or 0).content or UNSET


class _Lines:
    """The lines of a streamed answer. Calls come whole, in one line before the last."""

    def __init__(self, asked: _Asked) -> None:
        self._asked = asked
        self._parser = asked.new_parser()
        self._calls: list[CallDelta] = []
        self._totals = _Totals()
        only_text = asked.chat.is_plain and not asked.body.logprobs
        self._template = Template(partial(_text_line, asked), holes=2) if only_text else None

    def write(self, item: tuple[int, RequestOutput]) -> bytes:
        """The line of one output; empty if all of its text is held back."""
        _, output = item
        (completion,) = output.outputs
        self._totals.add(output, completion)
        if self._template is not None and completion.finish_reason is None:
            return self._template.fill(timestamp(), completion.text) if completion.text else b""
        delta = self._parser.feed(completion)
        self._calls += delta.calls
        calls = whole_calls(self._calls) if completion.finished else []
        logprobs = _logprobs(self._asked, completion)
        if not (delta.content or delta.reasoning or calls or logprobs is not UNSET):
            return b""
        return _line(_struct(self._asked, delta.content, delta.reasoning, calls, logprobs))

    def end(self) -> bytes:
        """The line with counts and durations."""
        return _line(_struct(self._asked, "", **self._totals.fields(self._asked)))

    def error(self, error: APIError) -> bytes:
        """A line with the error."""
        return _line(in_ollama_form(error))


def _text_line(asked: _Asked, created_at: str, text: str) -> bytes:
    return _line(_struct(asked, text, created_at=created_at))


def _line(answer: Struct) -> bytes:
    return encode_json(answer) + b"\n"
