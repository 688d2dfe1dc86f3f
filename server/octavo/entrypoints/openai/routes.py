"""POST /v1/chat/completions"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from octavo.chat.answer import AnswerDelta, AnswerParser
from octavo.entrypoints.admission import check_model, check_serving
from octavo.entrypoints.errors import bad_request
from octavo.entrypoints.fields.values import IMAGES
from octavo.entrypoints.generation.chat import PreparedChat, prepare_chat, read_messages
from octavo.entrypoints.generation.logprobs import ChatLogprobs, LogprobsFormatter, prompt_logprobs
from octavo.entrypoints.generation.run import (
    Generation,
    TopLogprobs,
    answering_name,
    encode_choices,
    encoding_cost,
    external_id,
    sampling_params,
)
from octavo.entrypoints.generation.stream import EventStream
from octavo.entrypoints.openai.answers import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    FunctionCall,
    ToolCall,
    ToolCallDelta,
    Usage,
    usage,
)
from octavo.entrypoints.openai.events import DONE, ChunkEvents
from octavo.entrypoints.openai.protocol import ChatCompletionRequest
from octavo.entrypoints.openai.response_format import constraint_of
from octavo.entrypoints.state import ServerState, state_of
from octavo.entrypoints.transport.request_body import read_body
from octavo.entrypoints.transport.responses import JSON, unless_disconnected
from octavo.entrypoints.transport.sse import EventTemplate, event
from octavo.interface.outputs import CompletionOutput, RequestOutput
from octavo.interface.pooling_params import check_generates


@dataclass
class ChatRequestContext:
    """One HTTP request, its conversation ready for the engine."""

    state: ServerState
    body: ChatCompletionRequest
    id: str
    created: int
    chat: PreparedChat
    role: str
    echo: str  # what the answer begins with

    def new_parser(self) -> AnswerParser:
        """A parser of one answer."""
        return self.chat.new_parser(self.body.include_reasoning is not False)

    def chunk(
        self,
        choices: list[ChatChunkChoice],
        used: Usage | UnsetType | None = UNSET,
        prompt_ids: list[int] | UnsetType = UNSET,
    ) -> ChatChunk:
        """A chunk of a stream."""
        return ChatChunk(
            self.id,
            self.created,
            answering_name(self.state, self.chat.request),
            choices,
            system_fingerprint=self.state.fingerprint,
            usage=used,
            prompt_token_ids=prompt_ids,
        )


async def create_chat_completion(request: Request) -> Response:
    """Handle POST /v1/chat/completions."""
    state = state_of(request)
    check_serving(state)
    body = await read_body(request, ChatCompletionRequest, state, images=IMAGES)
    body.check()
    check_model(state, body.model)
    check_generates(state.engine.config.model.pooler)
    context = await _prepare(state, body, external_id(request, "chatcmpl", body.request_id))
    if body.stream:
        generation = await Generation(state, [context.chat.request], [None]).start()
        return EventStream(generation, _Events(context))
    return await unless_disconnected(request, _complete(context))


async def _prepare(state: ServerState, body: ChatCompletionRequest, response_id: str) -> ChatRequestContext:
    messages = await read_messages(state, body.messages)
    body.messages = []  # images are not kept as long as the answer takes
    if body.stream and body.prompt_logprobs is not None:
        message = "prompt_logprobs are not available in streams; drop stream or prompt_logprobs"
        raise bad_request(message, "prompt_logprobs")
    limit = body.token_limit()
    logprobs = TopLogprobs((body.top_logprobs or 0) if body.logprobs else None, "top_logprobs")
    params = sampling_params(state, body.sampling_fields(), limit, logprobs, bool(body.stream))
    conversation = body.conversation(messages)
    chat = await prepare_chat(
        state,
        conversation,
        params,
        body.prompt_options(add_special_tokens=False),
        limit,
        partial(constraint_of, body),
        keep_special_tokens=body.skip_special_tokens is None,
    )
    continued = body.continue_final_message or not conversation.opens_answer
    role = messages[-1]["role"] if continued else state.args.response_role
    echo = messages[-1]["content"] if body.echo and messages[-1]["role"] == role else ""
    return ChatRequestContext(state, body, response_id, int(time.time()), chat, role, echo)


async def _complete(context: ChatRequestContext) -> Response:
    with Generation(context.state, [context.chat.request], [None]) as generation:
        await generation.start()
        final = (await generation.final_outputs())[0]
    state, body = context.state, context.body
    choices = await encode_choices(
        state,
        [(partial(_choice, context, completion), encoding_cost(completion, final)) for completion in final.outputs],
    )
    used = _usage(final, sum(len(completion.token_ids) for completion in final.outputs))
    response = ChatCompletion(
        context.id,
        context.created,
        answering_name(state, context.chat.request),
        choices,
        used,
        system_fingerprint=state.fingerprint,
    )
    if body.prompt_logprobs is not None and final.prompt_logprobs is not None:
        response.prompt_logprobs = prompt_logprobs(final.prompt_logprobs)
    if body.return_token_ids:
        response.prompt_token_ids = final.prompt_token_ids
    return JSON(response)


def _choice(context: ChatRequestContext, completion: CompletionOutput) -> ChatChoice:
    parser = context.new_parser()
    answer = parser.parse(completion)
    calls = [ToolCall(call.id or "", FunctionCall(call.name, call.arguments)) for call in answer.calls]
    content = context.echo + answer.content
    message = ChatMessage(
        content if content or not calls else None,
        context.role,
        tool_calls=calls or UNSET,
        reasoning=answer.reasoning or None,
        reasoning_content=answer.reasoning or None,
    )
    return ChatChoice(
        completion.index,
        message,
        _logprobs(context, completion),
        parser.finish_reason(completion.finish_reason),
        completion.stop_reason,
        completion.token_ids if context.body.return_token_ids else None,
    )


def _usage(output: RequestOutput, completion_tokens: int) -> Usage:
    return usage(len(output.prompt_token_ids), completion_tokens, output.num_cached_tokens)


def _logprobs(context: ChatRequestContext, completion: CompletionOutput) -> ChatLogprobs | None:
    if completion.logprobs is None or not context.body.logprobs:
        return None
    formatter = LogprobsFormatter(context.state, context.body.return_tokens_as_token_ids)
    return formatter.chat(completion.token_ids, completion.logprobs, context.body.top_logprobs or 0)


class _Events(ChunkEvents):
    """The chunks of a streamed answer."""

    def __init__(self, context: ChatRequestContext) -> None:
        super().__init__(context.state, context.body)
        self._context = context
        self._parsers: dict[int, AnswerParser] = {}
        self._completion_tokens = 0
        self._last: RequestOutput | None = None
        self._templates: dict[int, EventTemplate] = {}  # by choice, for pieces that are text and nothing else
        more = context.body.logprobs or context.body.return_token_ids or self.continuous_usage
        self._only_text = not more and context.chat.is_plain

    def write(self, item: tuple[int, RequestOutput]) -> bytes:
        """The chunks of one output; empty if all of its text is held back."""
        _, output = item
        self._last = output
        context = self._context
        events = b""
        for completion in output.outputs:
            if completion.index not in self._parsers:
                events += self._open(completion.index, output)  # before the first token is counted
            self._completion_tokens += len(completion.token_ids)
            template = self._templates.get(completion.index)
            if template is not None and completion.finish_reason is None:
                if completion.text:
                    events += template.fill(completion.text)
                continue
            if piece := _piece(context, completion, self._parsers[completion.index]):
                events += event(context.chunk([piece], self.chunk_usage()))
        return events

    def _open(self, index: int, output: RequestOutput) -> bytes:
        """The chunk with the role, before an answer's first token."""
        context = self._context
        self._parsers[index] = context.new_parser()
        if self._only_text:
            self._templates[index] = EventTemplate(partial(_text_only, context, index, self.no_usage))
        opening = ChatChunkChoice(index, ChatDelta(role=context.role, content=context.echo))
        prompt_ids = output.prompt_token_ids if context.body.return_token_ids else UNSET
        return event(context.chunk([opening], self.chunk_usage(), prompt_ids))

    def usage(self) -> Usage:
        """The usage so far."""
        assert self._last is not None
        return _usage(self._last, self._completion_tokens)

    def end(self) -> bytes:
        """The usage, if the client wants it, and the end."""
        if self._last is None or not self.include_usage:
            return DONE
        return event(self._context.chunk([], self.usage())) + DONE


def _text_only(context: ChatRequestContext, index: int, used: UnsetType | None, text: str) -> ChatChunk:
    return context.chunk([ChatChunkChoice(index, ChatDelta(content=text))], used)


def _piece(context: ChatRequestContext, completion: CompletionOutput, parser: AnswerParser) -> ChatChunkChoice | None:
    """What is new in one choice; None if all of it is held back."""
    logprobs = _logprobs(context, completion)
    ids = completion.token_ids if context.body.return_token_ids else UNSET
    delta = _delta(parser.feed(completion))
    if not (delta or completion.finish_reason or logprobs is not None or (ids is not UNSET and ids)):
        return None
    piece = ChatChunkChoice(
        completion.index,
        delta or ChatDelta(),
        logprobs,
        parser.finish_reason(completion.finish_reason),
        token_ids=ids,
    )
    if completion.finish_reason is not None:
        piece.stop_reason = completion.stop_reason
    return piece


def _delta(new: AnswerDelta) -> ChatDelta | None:
    """None if there is nothing new."""
    if not (new.reasoning or new.content or new.calls):
        return None
    calls = [
        ToolCallDelta(call.index, FunctionCall(UNSET, call.arguments))
        if call.id is None
        else ToolCallDelta(call.index, FunctionCall(call.name, call.arguments), call.id, "function")
        for call in new.calls
    ]
    thoughts = new.reasoning or UNSET
    return ChatDelta(
        content=new.content or UNSET, tool_calls=calls or UNSET, reasoning=thoughts, reasoning_content=thoughts
    )
