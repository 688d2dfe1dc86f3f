"""Messages that answer. msgspec structs: fast to encode, and a source of JSON schemas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from octavo.chat.answer import AnswerParser
from octavo.chat.parts import Part, PartSplitter
from octavo.entrypoints.anthropic.diagnostics import CacheDiagnostics
from octavo.entrypoints.anthropic.prepare import AppliedEdit, PreparedMessage
from octavo.entrypoints.generation.retention import use_of
from octavo.entrypoints.sealing import Seal
from octavo.interface.outputs import CompletionOutput, RequestOutput
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


class CacheCreation(Struct):
    """Prompt tokens that are kept for five minutes or an hour."""

    ephemeral_5m_input_tokens: int = 0
    ephemeral_1h_input_tokens: int = 0


class ThinkingTokens(Struct):
    """Tokens of reasoning, shown or not."""

    thinking_tokens: int


class MessageUsage(Struct):
    """Token counts. The prompt has input_tokens + cache_read_input_tokens + cache_creation_input_tokens."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_creation: CacheCreation | UnsetType = UNSET  # not at a stream's end
    output_tokens_details: ThinkingTokens | UnsetType = UNSET  # of models whose reasoning is told from text


class AppliedEdits(Struct):
    """The edits that have cleared something of the conversation."""

    applied_edits: list[AppliedEdit]


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
    context_management: AppliedEdits | UnsetType = UNSET
    diagnostics: CacheDiagnostics | UnsetType = UNSET


class UneditedCount(Struct):
    """Tokens that a prompt would have without edits."""

    original_input_tokens: int


class TokenCount(Struct):
    """The response of /v1/messages/count_tokens."""

    input_tokens: int
    context_management: UneditedCount | UnsetType = UNSET


class StopDelta(Struct):
    """The reason why an answer ended."""

    stop_reason: StopReason
    stop_sequence: str | None


async def whole(prepared: PreparedMessage, outputs: list[RequestOutput]) -> AnthropicMessage:
    """Make the message of a request's final output."""
    (output,) = outputs
    (completion,) = output.outputs
    if prepared.only_warms:
        message = message_of(prepared, output, 0)
        message.stop_reason = "max_tokens"
        return message
    parser, splitter = prepared.new_parser(), PartSplitter()
    splitter.feed(parser.parse(completion))
    splitter.finish()
    message = message_of(prepared, output, len(completion.token_ids))
    message.usage.output_tokens_details = thinking_of(prepared, parser)
    blocks = BlockWriter(prepared.state.seal, prepared.omits_thoughts)
    message.content = [blocks.block(part) for part in splitter.parts]
    is_call = parser.finish_reason(completion.finish_reason) == "tool_calls"
    stop = stop_of(completion, is_call, prepared.body.max_tokens, len(completion.token_ids))
    message.stop_reason, message.stop_sequence = stop.stop_reason, stop.stop_sequence
    return message


def message_of(prepared: PreparedMessage, output: RequestOutput, num_tokens: int) -> AnthropicMessage:
    """Make a message of ``num_tokens`` without its content and its end."""
    use = use_of(prepared.requests[0], output.num_cached_tokens)
    created = CacheCreation(use.written_short, use.written_long)
    used = MessageUsage(use.rest, use.read, num_tokens, use.written, created)
    diagnosis = prepared.diagnosis
    told = UNSET if diagnosis is None else diagnosis.told(output.num_cached_tokens)
    edits = applied_edits(prepared)
    return AnthropicMessage(prepared.id, prepared.answering_name, [], used, context_management=edits, diagnostics=told)


def thinking_of(prepared: PreparedMessage, parser: AnswerParser) -> ThinkingTokens | UnsetType:
    """Count the tokens of the reasoning that a parser has read."""
    return ThinkingTokens(parser.num_thinking_tokens) if prepared.rendered.may_think else UNSET


def applied_edits(prepared: PreparedMessage) -> AppliedEdits | UnsetType:
    """Return what was cleared, for clients that asked for edits."""
    management = prepared.body.context_management
    return UNSET if management is None or not management.clears else AppliedEdits(prepared.edits)


@dataclass(frozen=True)
class BlockWriter:
    """Makes blocks of parts. A block of reasoning always has its seal as signature, by which the reasoning comes back;
    ``omits_thoughts``: its text is left out."""

    seal: Seal
    omits_thoughts: bool = False

    def block(self, part: Part) -> Block:
        """A complete part as a block."""
        if part.kind == "text":
            return TextBlock(part.text)
        if part.kind == "reasoning":
            return ThinkingBlock("" if self.omits_thoughts else part.text, self.signature(part))
        arguments = object_of(part.text)  # {} or as far as they go, if they were cut
        return ToolUseBlock(call_id(part), part.name, arguments if isinstance(arguments, dict) else {})

    def signature(self, part: Part) -> str:
        """The seal of reasoning that is complete."""
        return self.seal.close(part.text)


def stop_of(completion: CompletionOutput, is_call: bool, asked_tokens: int, num_tokens: int) -> StopDelta:
    """Say why an answer of ``num_tokens`` ended, where ``asked_tokens`` is the client's limit."""
    if is_call:
        return StopDelta("tool_use", None)
    if completion.finish_reason == "length":
        return StopDelta("max_tokens" if num_tokens >= asked_tokens else "model_context_window_exceeded", None)
    if isinstance(completion.stop_reason, str):
        return StopDelta("stop_sequence", completion.stop_reason)
    return StopDelta("end_turn", None)


def call_id(part: Part) -> str:
    """The id of a call; it begins as Anthropic's do where the model has not chosen it."""
    return f"toolu_{part.call_id.removeprefix('call_')}" if part.call_id.startswith("call_") else part.call_id
