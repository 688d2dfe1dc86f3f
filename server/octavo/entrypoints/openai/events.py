"""Streams of completions and chat completions."""

from __future__ import annotations

from functools import partial

from msgspec import UNSET, Struct, UnsetType

from octavo.chat.answer import AnswerDelta, AnswerParser
from octavo.entrypoints.errors import APIError, ErrorResponse
from octavo.entrypoints.generation.logprobs import ChatLogprobs
from octavo.entrypoints.openai.answers import (
    SERVED_TIER,
    ChoicePieces,
    Completion,
    CompletionChoice,
    FunctionCall,
    Usage,
    chat_logprobs,
    chat_usage,
    completion_of,
    thought_names,
    usage,
)
from octavo.entrypoints.openai.prepare import PreparedChatCompletion, PreparedCompletion
from octavo.entrypoints.openai.protocol import GenerationRequest
from octavo.entrypoints.state import ServerState
from octavo.entrypoints.transport.sse import EventTemplate, event
from octavo.interface.outputs import CompletionOutput, LogprobsTable, RequestOutput

DONE = b"data: [DONE]\n\n"


class ToolCallDelta(Struct):
    """A piece of a tool call: id, type and name come with its first piece."""

    index: int
    function: FunctionCall
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatDelta(Struct):
    """New content of a message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChatChunkChoice(Struct):
    """New content of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct):
    """A chunk of a streamed chat completion."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: str = "chat.completion.chunk"
    service_tier: str | UnsetType = UNSET
    system_fingerprint: str = ""
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChunkEvents:
    """Writes chunks. As in vLLM, options of the request and flags say which of them have the usage."""

    def __init__(self, state: ServerState, body: GenerationRequest) -> None:
        forced, options = state.args.enable_force_include_usage, body.stream_options
        self.include_usage = forced or (options is not None and bool(options.include_usage))
        continuous = options is not None and bool(options.continuous_usage_stats)
        self.continuous_usage = forced or (self.include_usage and continuous)
        self.no_usage: UnsetType | None = None if self.include_usage else UNSET

    def usage(self) -> Usage:
        """The usage so far."""
        raise NotImplementedError

    def chunk_usage(self) -> Usage | UnsetType | None:
        """The usage field of a chunk with content."""
        return self.usage() if self.continuous_usage else self.no_usage

    def error(self, error: APIError) -> bytes:
        """An error event, and the end."""
        return event(ErrorResponse(error.detail)) + DONE


class ChatEvents(ChunkEvents):
    """The chunks of a streamed answer."""

    def __init__(self, prepared: PreparedChatCompletion) -> None:
        super().__init__(prepared.state, prepared.body)
        self._prepared = prepared
        self._parsers: dict[int, AnswerParser] = {}
        self._completion_tokens = 0
        self._last: RequestOutput | None = None
        self._templates: dict[int, EventTemplate] = {}  # by choice, for pieces that are text and nothing else
        more = prepared.body.logprobs or prepared.body.return_token_ids or self.continuous_usage
        self._only_text = not more and prepared.rendered.is_plain

    def write(self, item: tuple[int, RequestOutput]) -> bytes:
        """The chunks of one output; empty if all of its text is held back."""
        _, output = item
        self._last = output
        prepared = self._prepared
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
            if piece := _piece(prepared, completion, self._parsers[completion.index]):
                events += event(_chunk(prepared, [piece], self.chunk_usage()))
        return events

    def _open(self, index: int, output: RequestOutput) -> bytes:
        """The chunk with the role, before an answer's first token."""
        prepared = self._prepared
        self._parsers[index] = prepared.new_parser()
        if self._only_text:
            self._templates[index] = EventTemplate(partial(_text_chunk, prepared, index, self.no_usage))
        opening = ChatChunkChoice(index, ChatDelta(role=prepared.role, content=prepared.echo))
        prompt_ids = output.prompt_token_ids if prepared.body.return_token_ids else UNSET
        return event(_chunk(prepared, [opening], self.chunk_usage(), prompt_ids))

    def usage(self) -> Usage:
        """The usage so far."""
        assert self._last is not None
        return chat_usage(self._prepared, self._last, self._completion_tokens)

    def end(self) -> bytes:
        """The usage, if the client wants it, and the end."""
        if self._last is None or not self.include_usage:
            return DONE
        used = chat_usage(self._prepared, self._last, self._completion_tokens, self._parsers.values())
        return event(_chunk(self._prepared, [], used)) + DONE


def _text_chunk(prepared: PreparedChatCompletion, index: int, used: UnsetType | None, text: str) -> ChatChunk:
    return _chunk(prepared, [ChatChunkChoice(index, ChatDelta(content=text))], used)


def _piece(
    prepared: PreparedChatCompletion, completion: CompletionOutput, parser: AnswerParser
) -> ChatChunkChoice | None:
    """Make the chunk of what is new in one choice; None if all of it is held back."""
    logprobs = chat_logprobs(prepared, completion)
    ids = completion.token_ids if prepared.body.return_token_ids else UNSET
    delta = _delta(prepared, parser.feed(completion))
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


def _delta(prepared: PreparedChatCompletion, new: AnswerDelta) -> ChatDelta | None:
    """Make the delta of new text and calls; None without any."""
    if not (new.reasoning or new.content or new.calls):
        return None
    calls = [
        ToolCallDelta(call.index, FunctionCall(UNSET, call.arguments))
        if call.id is None
        else ToolCallDelta(call.index, FunctionCall(call.name, call.arguments), call.id, "function")
        for call in new.calls
    ]
    delta = ChatDelta(content=new.content or UNSET, tool_calls=calls or UNSET)
    for name in thought_names(prepared) if new.reasoning else ():
        setattr(delta, name, new.reasoning)
    return delta


def _chunk(
    prepared: PreparedChatCompletion,
    choices: list[ChatChunkChoice],
    used: Usage | UnsetType | None = UNSET,
    prompt_ids: list[int] | UnsetType = UNSET,
) -> ChatChunk:
    return ChatChunk(
        prepared.id,
        prepared.created,
        prepared.answering_name,
        choices,
        service_tier=UNSET if prepared.body.service_tier is None else SERVED_TIER,
        system_fingerprint=prepared.state.fingerprint,
        usage=used,
        prompt_token_ids=prompt_ids,
    )


class CompletionEvents(ChunkEvents):
    """The chunks of a streamed completion."""

    def __init__(self, prepared: PreparedCompletion) -> None:
        super().__init__(prepared.state, prepared.body)
        self._prepared = prepared
        self._choices: dict[tuple[int, int], ChoicePieces] = {}
        self._templates: dict[ChoicePieces, EventTemplate] = {}  # for pieces that are text and nothing else
        self._prompt_logprobs: dict[int, LogprobsTable | None] = {}  # by position; each choice has them
        self._prompt_tokens = sum(len(request.prompt_token_ids) for request in prepared.requests)
        self._completion_tokens = 0
        self._cached = [0] * len(prepared.requests)
        more = prepared.body.logprobs is not None or prepared.body.return_token_ids or self.continuous_usage
        self._only_text = not (more or prepared.prompt_only)

    def write(self, item: tuple[int, RequestOutput]) -> bytes:
        """The chunks of one output of one prompt; empty if all of its text is held back."""
        position, output = item
        prepared = self._prepared
        self._cached[position] = output.num_cached_tokens
        output.prompt_logprobs = self._prompt_logprobs.setdefault(position, output.prompt_logprobs)
        events = b""
        for completion in output.outputs:
            choice = self._choices.get((position, completion.index))
            if choice is None:
                choice = self._choices[position, completion.index] = ChoicePieces(prepared, position, completion.index)
            self._completion_tokens += 0 if prepared.prompt_only else len(completion.token_ids)
            template = self._templates.get(choice)
            if template is not None and completion.finish_reason is None:
                if completion.text:
                    events += template.fill(completion.text)
                continue
            piece = choice.take(completion, output)
            if _worth_sending(piece):
                events += event(completion_of(prepared, [piece], self.chunk_usage()))
            if self._only_text:  # from now on
                text_only = partial(_text_only, prepared, CompletionChoice(piece.index, ""), self.no_usage)
                self._templates[choice] = EventTemplate(text_only)
        return events

    def end(self) -> bytes:
        """The usage, if the client wants it, and the end."""
        return event(completion_of(self._prepared, [], self.usage())) + DONE if self.include_usage else DONE

    def usage(self) -> Usage:
        """The usage so far."""
        return usage(self._prompt_tokens, self._completion_tokens, sum(self._cached))


def _text_only(prepared: PreparedCompletion, choice: CompletionChoice, used: UnsetType | None, text: str) -> Completion:
    choice.text = text
    return completion_of(prepared, [choice], used)


def _worth_sending(piece: CompletionChoice) -> bool:
    """False for a piece whose text is held back, unless the client wants the tokens themselves."""
    return bool(
        piece.text
        or piece.finish_reason
        or piece.logprobs is not None
        or piece.prompt_logprobs is not UNSET
        or (piece.token_ids is not UNSET and piece.token_ids)
    )
