"""POST /v1/messages and /v1/messages/count_tokens"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from octavo.chat.answer import AnswerParser
from octavo.chat.parts import PartSplitter, Step
from octavo.entrypoints.admission import check_model, check_serving
from octavo.entrypoints.anthropic.answers import (
    AnthropicMessage,
    BlockDelta,
    MessageDelta,
    MessageStart,
    MessageStop,
    Ping,
    StopDelta,
    TextDelta,
    TokenCount,
    block_of,
    events_of,
    message_usage,
    stop_of,
)
from octavo.entrypoints.anthropic.prepare import constraint_of, conversation_of
from octavo.entrypoints.anthropic.protocol import IMAGES, CountTokensRequest, MessagesRequest
from octavo.entrypoints.errors import APIError, in_anthropic_form
from octavo.entrypoints.generation.chat import PreparedChat, count_prompt, prepare_chat, read_messages
from octavo.entrypoints.generation.context import in_words_of, naming
from octavo.entrypoints.generation.run import (
    Generation,
    PromptOptions,
    TokenLimit,
    TopLogprobs,
    answering_name,
    external_id,
    sampling_params,
)
from octavo.entrypoints.generation.stream import EventStream
from octavo.entrypoints.state import ServerState, state_of
from octavo.entrypoints.transport.request_body import read_body
from octavo.entrypoints.transport.responses import JSON, unless_disconnected
from octavo.entrypoints.transport.sse import EventTemplate, named_event
from octavo.interface.outputs import CompletionOutput, RequestOutput
from octavo.interface.pooling_params import check_generates

_OPTIONS = PromptOptions(add_special_tokens=False)


@dataclass
class _Context:
    """One request, its conversation ready for the engine."""

    state: ServerState
    body: MessagesRequest
    id: str
    chat: PreparedChat

    def new_parser(self) -> AnswerParser:
        """A parser of the answer."""
        thinking = self.body.thinking
        return self.chat.new_parser(thinking is None or thinking.display != "omitted")

    def message(self, output: RequestOutput, num_tokens: int) -> AnthropicMessage:
        """The message without its content and its end."""
        used = message_usage(len(output.prompt_token_ids), output.num_cached_tokens, num_tokens)
        return AnthropicMessage(self.id, answering_name(self.state, self.chat.request), [], used)

    def stop(self, parser: AnswerParser, completion: CompletionOutput, num_tokens: int) -> StopDelta:
        """Why the answer ended."""
        is_call = parser.finish_reason(completion.finish_reason) == "tool_calls"
        return stop_of(completion, is_call, self.body.max_tokens, num_tokens)


async def create_message(request: Request) -> Response:
    """Handle POST /v1/messages."""
    state = state_of(request)
    check_serving(state)
    body = await read_body(request, MessagesRequest, state, images=IMAGES)
    body.check()
    check_model(state, body.model)
    check_generates(state.engine.config.model.pooler)
    context = _Context(state, body, external_id(request, "msg", between="_"), await _prepare(state, body))
    if body.stream:
        generation = await Generation(state, [context.chat.request], [None]).start()
        return EventStream(generation, _Events(context))
    return await unless_disconnected(request, _complete(context))


async def count_message_tokens(request: Request) -> Response:
    """Handle POST /v1/messages/count_tokens."""
    state = state_of(request)
    body = await read_body(request, CountTokensRequest, state, images=IMAGES)
    body.check()
    check_model(state, body.model)
    conversation = conversation_of(body)
    conversation.messages = await read_messages(state, conversation.messages)
    ids = await count_prompt(state, conversation, _OPTIONS, partial(constraint_of, body))
    return JSON(TokenCount(len(ids)))


async def _prepare(state: ServerState, body: MessagesRequest) -> PreparedChat:
    conversation = conversation_of(body)
    body.messages = []  # images are not kept as long as the answer takes
    conversation.messages = await read_messages(state, conversation.messages)
    # Agents ask for a fixed number of tokens, however long the conversation has become: the answer gets what is left.
    limit = TokenLimit(body.max_tokens, clamps=True)
    with naming({"stop": "stop_sequences"}):
        params = sampling_params(state, body.sampling_fields(), limit, TopLogprobs(None), bool(body.stream))
    # Agents shorten the conversation when they read these words.
    with in_words_of("messages", "prompt is too long: it has"):
        return await prepare_chat(state, conversation, params, _OPTIONS, limit, partial(constraint_of, body))


async def _complete(context: _Context) -> Response:
    with Generation(context.state, [context.chat.request], [None]) as generation:
        await generation.start()
        final = (await generation.final_outputs())[0]
    (completion,) = final.outputs
    parser, splitter = context.new_parser(), PartSplitter()
    splitter.feed(parser.parse(completion))
    splitter.finish()
    message = context.message(final, len(completion.token_ids))
    message.content = [block_of(part) for part in splitter.parts]
    stop = context.stop(parser, completion, len(completion.token_ids))
    message.stop_reason, message.stop_sequence = stop.stop_reason, stop.stop_sequence
    return JSON(message)


class _Events:
    """The events of a streamed answer."""

    def __init__(self, context: _Context) -> None:
        self._context = context
        self._parser = context.new_parser()
        self._splitter = PartSplitter()
        self._num_tokens = 0
        self._last: RequestOutput | None = None
        self._template: tuple[int, EventTemplate] | None = None  # of text of a block, by its index
        self._only_text = context.chat.is_plain

    def write(self, item: tuple[int, RequestOutput]) -> bytes:
        """The events of one output; empty if all of its text is held back."""
        _, output = item
        (completion,) = output.outputs
        self._num_tokens += len(completion.token_ids)
        if self._only_text and self._template is not None and completion.finish_reason is None:
            self._last = output
            return self._template[1].fill(completion.text) if completion.text else b""
        events = b""
        if self._last is None:
            start = MessageStart(self._context.message(output, self._num_tokens))
            events += named_event("message_start", start) + named_event("ping", Ping())
        self._last = output
        steps = self._splitter.feed(self._parser.feed(completion))
        if completion.finish_reason is not None:
            steps += self._splitter.finish()
        return events + b"".join(map(self._write_step, steps))

    def _write_step(self, step: Step) -> bytes:
        action, part, text = step
        if action == "add" and part.kind == "text":
            if self._template is None or self._template[0] != part.index:
                self._template = part.index, EventTemplate(partial(_text_delta, part.index), "content_block_delta")
            return self._template[1].fill(text)
        return b"".join(named_event(name, event) for name, event in events_of(step))

    def end(self) -> bytes:
        """Why the answer ended, its usage, and the end."""
        assert self._last is not None
        (completion,) = self._last.outputs
        stop = self._context.stop(self._parser, completion, self._num_tokens)
        delta = MessageDelta(stop, self._context.message(self._last, self._num_tokens).usage)
        return named_event("message_delta", delta) + named_event("message_stop", MessageStop())

    def error(self, error: APIError) -> bytes:
        """An error event, which is the last."""
        return named_event("error", in_anthropic_form(error))


def _text_delta(index: int, text: str) -> BlockDelta:
    return BlockDelta(index, TextDelta(text))
