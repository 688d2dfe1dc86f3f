"""Bodies and events of Anthropic's answers. msgspec structs: fast to encode, and a source of JSON schemas."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

from msgspec import Struct

from octavo.chat.parts import Part, Step
from octavo.interface.outputs import CompletionOutput
from octavo.text.messages import object_of

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class TextBlock(Struct, tag_field="type", tag="text"):
    """Text."""

    text: str


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    """Reasoning."""

    thinking: str
    signature: str


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(Struct):
    """Token counts. The prompt has input_tokens + cache_read_input_tokens."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0


def message_usage(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> MessageUsage:
    """Usage from the engine's counts."""
    return MessageUsage(prompt_tokens - cached_tokens, cached_tokens, output_tokens)


class AnthropicMessage(Struct):
    """The response of /v1/messages."""

    id: str
    model: str
    content: list[Block]
    usage: MessageUsage
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    role: str = "assistant"
    type: str = "message"


class TokenCount(Struct):
    """The response of /v1/messages/count_tokens."""

    input_tokens: int


class MessageStart(Struct, tag_field="type", tag="message_start"):
    """The first event."""

    message: AnthropicMessage


class Ping(Struct, tag_field="type", tag="ping"):
    """Says that the connection lives."""


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
    """What is new in a block."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class BlockStop(Struct, tag_field="type", tag="content_block_stop"):
    """A block ends."""

    index: int


class StopDelta(Struct):
    """Why an answer ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct, tag_field="type", tag="message_delta"):
    """The answer's end and its usage."""

    delta: StopDelta
    usage: MessageUsage


class MessageStop(Struct, tag_field="type", tag="message_stop"):
    """The last event."""


Event = BlockStart | BlockDelta | BlockStop


def block_of(part: Part) -> Block:
    """A complete part as a block."""
    if part.kind == "text":
        return TextBlock(part.text)
    if part.kind == "reasoning":
        return ThinkingBlock(part.text, signature_of(part))
    arguments = object_of(part.text)  # {} or as far as they go, if they were cut
    return ToolUseBlock(_call_id(part), part.name, arguments if isinstance(arguments, dict) else {})


def events_of(step: Step) -> list[tuple[str, Event]]:
    """The events, each with its name, of one step of a streamed answer."""
    action, part, text = step
    if action == "open":
        return [("content_block_start", BlockStart(part.index, _empty(part)))]
    if action == "add":
        return [("content_block_delta", BlockDelta(part.index, _delta(part, text)))]
    events: list[tuple[str, Event]] = [("content_block_stop", BlockStop(part.index))]
    if part.kind == "reasoning":
        signature = BlockDelta(part.index, SignatureDelta(signature_of(part)))
        events.insert(0, ("content_block_delta", signature))
    return events


def signature_of(part: Part) -> str:
    """Not checked when it comes back, but clients send only reasoning that has one."""
    return hashlib.sha256(part.text.encode("utf-8", "surrogatepass")).hexdigest()


def stop_of(completion: CompletionOutput, is_call: bool, asked_tokens: int, num_tokens: int) -> StopDelta:
    """Why an answer of ``num_tokens`` ended, where ``asked_tokens`` is the client's limit."""
    if is_call:
        return StopDelta("tool_use", None)
    if completion.finish_reason == "length":
        return StopDelta("max_tokens" if num_tokens >= asked_tokens else "model_context_window_exceeded", None)
    if isinstance(completion.stop_reason, str):
        return StopDelta("stop_sequence", completion.stop_reason)
    return StopDelta("end_turn", None)


def _empty(part: Part) -> Block:
    if part.kind == "text":
        return TextBlock("")
    return ThinkingBlock("", "") if part.kind == "reasoning" else ToolUseBlock(_call_id(part), part.name, {})


def _call_id(part: Part) -> str:
    """As Anthropic's begin, where the model has not chosen it."""
    return f"toolu_{part.call_id.removeprefix('call_')}" if part.call_id.startswith("call_") else part.call_id


def _delta(part: Part, text: str) -> TextDelta | ThinkingDelta | InputJsonDelta:
    if part.kind == "text":
        return TextDelta(text)
    return ThinkingDelta(text) if part.kind == "reasoning" else InputJsonDelta(text)
