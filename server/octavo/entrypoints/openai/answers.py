"""Bodies of responses. msgspec structs: fast to encode, and a source of JSON schemas.

What is always null is there because OpenAI's or vLLM's objects always have it: clients read it without asking. Chunks
of streams have what they bring.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from octavo.entrypoints.generation.logprobs import ChatLogprobs, CompletionLogprobs, PromptLogprobs

FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]


class PromptTokensDetails(Struct):
    """Prompt tokens that were not computed."""

    cached_tokens: int


class Usage(Struct):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    """Usage with its total."""
    return Usage(
        prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, PromptTokensDetails(cached_tokens)
    )


class CompletionChoice(Struct):
    """One completion, or new text of one."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET


class Completion(Struct):
    """The response of /v1/completions, and a chunk of its stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]  # or encoded: msgspec.Raw
    object: str = "text_completion"
    service_tier: UnsetType | None = UNSET
    system_fingerprint: str = ""
    usage: Usage | UnsetType | None = UNSET
    kv_transfer_params: UnsetType | None = UNSET


class FunctionCall(Struct):
    """Name and arguments (JSON text) of a call."""

    name: str | UnsetType | None
    arguments: str


class ToolCall(Struct):
    """A call of a tool."""

    id: str
    function: FunctionCall
    type: str = "function"


class ChatMessage(Struct):
    """The model's message."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning: str | None = None
    reasoning_content: str | None = None


class ChatChoice(Struct):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletion(Struct):
    """The response of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]  # or encoded: msgspec.Raw
    usage: Usage
    object: str = "chat.completion"
    service_tier: None = None
    system_fingerprint: str = ""
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    kv_transfer_params: None = None


class ToolCallDelta(Struct):
    """A piece of a tool call: id, type and name come with its first piece."""

    index: int
    function: FunctionCall
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatDelta(Struct):
    """What is new in a message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChatChunkChoice(Struct):
    """What is new in one answer."""

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
    system_fingerprint: str = ""
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ModelCard(Struct):
    """One name of the served model."""

    id: str
    created: int
    root: str
    max_model_len: int
    default_sampling_params: dict[str, Any]  # what the model's files recommend: of requests that set none
    input_modalities: list[str]  # what prompts may hold: "text", "image"
    object: str = "model"
    owned_by: str = "octavo"
    parent: str | None = None


class ModelList(Struct):
    """The response of /v1/models."""

    data: list[ModelCard]
    object: str = "list"
