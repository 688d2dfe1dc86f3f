"""Events of streamed messages."""

from __future__ import annotations

from functools import partial

from msgspec import UNSET, Struct, UnsetType

from octavo.chat.parts import Part, PartSplitter, Step
from octavo.entrypoints.anthropic.answers import (
    AnthropicMessage,
    AppliedEdits,
    Block,
    BlockWriter,
    MessageUsage,
    StopDelta,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
    call_id,
    message_of,
    stop_of,
    thinking_of,
)
from octavo.entrypoints.anthropic.prepare import PreparedMessage
from octavo.entrypoints.errors import APIError, in_anthropic_form
from octavo.entrypoints.transport.sse import EventTemplate, named_event
from octavo.interface.outputs import RequestOutput


class MessageStart(Struct, tag_field="type", tag="message_start"):
    """The first event."""

    message: AnthropicMessage


class Ping(Struct, tag_field="type", tag="ping"):
    """Says that the connection lives."""


PING = named_event("ping", Ping())


class BlockStart(Struct, tag_field="type", tag="content_block_start"):
    """A block begins."""

    index: int
    content_block: Block


class TextDelta(Struct, tag_field="type", tag="text_delta"):
    """New text."""

    text: str


class ThinkingDelta(Struct, tag_field="type", tag="thinking_delta"):
    """New reasoning."""

    thinking: str


class SignatureDelta(Struct, tag_field="type", tag="signature_delta"):
    """The signature of reasoning that ends."""

    signature: str


class InputJsonDelta(Struct, tag_field="type", tag="input_json_delta"):
    """New JSON text of a call's arguments."""

    partial_json: str


class BlockDelta(Struct, tag_field="type", tag="content_block_delta"):
    """New content of a block."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class BlockStop(Struct, tag_field="type", tag="content_block_stop"):
    """A block ends."""

    index: int


class MessageDelta(Struct, tag_field="type", tag="message_delta"):
    """The answer's end and its usage."""

    delta: StopDelta
    usage: MessageUsage
    context_management: AppliedEdits | UnsetType = UNSET


class MessageStop(Struct, tag_field="type", tag="message_stop"):
    """The last event."""


Event = BlockStart | BlockDelta | BlockStop


def events_of(step: Step, blocks: BlockWriter) -> list[tuple[str, Event]]:
    """The events, each with its name, of one step of a streamed answer."""
    action, part, text = step
    if action == "add" and part.kind == "reasoning" and blocks.omits_thoughts:
        return []
    if action == "open":
        return [("content_block_start", BlockStart(part.index, _empty(part)))]
    if action == "add":
        return [("content_block_delta", BlockDelta(part.index, _delta(part, text)))]
    events: list[tuple[str, Event]] = [("content_block_stop", BlockStop(part.index))]
    if part.kind == "reasoning":
        signature = BlockDelta(part.index, SignatureDelta(blocks.signature(part)))
        events.insert(0, ("content_block_delta", signature))
    return events


def _empty(part: Part) -> Block:
    if part.kind == "text":
        return TextBlock("")
    return ThinkingBlock("", "") if part.kind == "reasoning" else ToolUseBlock(call_id(part), part.name, {})


def _delta(part: Part, text: str) -> TextDelta | ThinkingDelta | InputJsonDelta:
    if part.kind == "text":
        return TextDelta(text)
    return ThinkingDelta(text) if part.kind == "reasoning" else InputJsonDelta(text)


class MessageEvents:
    """Writes the events of a streamed answer."""

    def __init__(self, prepared: PreparedMessage) -> None:
        self._prepared = prepared
        self._parser = prepared.new_parser()
        self._splitter = PartSplitter()
        self._blocks = BlockWriter(prepared.state.seal, prepared.omits_thoughts)
        self._num_tokens = 0
        self._last: RequestOutput | None = None
        self._template: tuple[int, EventTemplate] | None = None  # of text of a block, by its index
        self._only_text = prepared.rendered.is_plain

    def write(self, item: tuple[int, RequestOutput]) -> bytes:
        """Write the events of one output; none if all of its text is held back."""
        _, output = item
        (completion,) = output.outputs
        if self._prepared.only_warms:  # the token is one that nobody asked for
            self._last = output
            return self._start(output)
        self._num_tokens += len(completion.token_ids)
        if self._only_text and self._template is not None and completion.finish_reason is None:
            self._last = output
            return self._template[1].fill(completion.text) if completion.text else b""
        events = b""
        if self._last is None:
            events += self._start(output)
        self._last = output
        steps = self._splitter.feed(self._parser.feed(completion))
        if completion.finish_reason is not None:
            steps += self._splitter.finish()
        return events + b"".join(map(self._write_step, steps))

    def _start(self, output: RequestOutput) -> bytes:
        start = MessageStart(message_of(self._prepared, output, self._num_tokens))
        return named_event("message_start", start) + PING

    def _write_step(self, step: Step) -> bytes:
        action, part, text = step
        if action == "add" and part.kind == "text":
            if self._template is None or self._template[0] != part.index:
                self._template = part.index, EventTemplate(partial(_text_delta, part.index), "content_block_delta")
            return self._template[1].fill(text)
        return b"".join(named_event(name, event) for name, event in events_of(step, self._blocks))

    def end(self) -> bytes:
        """Write why the answer ended, its usage, and the end."""
        assert self._last is not None
        (completion,) = self._last.outputs
        is_call = self._parser.finish_reason(completion.finish_reason) == "tool_calls"
        stop = stop_of(completion, is_call, self._prepared.body.max_tokens, self._num_tokens)
        if self._prepared.only_warms:
            stop = StopDelta("max_tokens", None)
        message = message_of(self._prepared, self._last, self._num_tokens)
        message.usage.cache_creation = UNSET
        message.usage.output_tokens_details = thinking_of(self._prepared, self._parser)
        delta = MessageDelta(stop, message.usage, message.context_management)
        return named_event("message_delta", delta) + named_event("message_stop", MessageStop())

    def error(self, error: APIError) -> bytes:
        """Write an error event, which is the last."""
        return named_event("error", in_anthropic_form(error))


def _text_delta(index: int, text: str) -> BlockDelta:
    return BlockDelta(index, TextDelta(text))
