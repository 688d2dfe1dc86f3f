"""Responses and items, as clients get and list them. msgspec structs: fast to encode, and a source of JSON schemas."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType, field

from octavo.entrypoints.responses.protocol import (
    AdditionalToolsParam,
    CallOutputParam,
    CustomCallParam,
    FunctionCallParam,
    ImagePartParam,
    Item,
    ReasoningParam,
    TextPartParam,
    ToolSearchCallParam,
    ToolSearchOutputParam,
)

Status = Literal["in_progress", "completed", "incomplete", "failed"]
ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(Struct, tag_field="type", tag="output_text"):
    """Text of an answer."""

    text: str
    annotations: list[Any] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    """Text of reasoning."""

    text: str


class SummaryText(Struct, tag_field="type", tag="summary_text"):
    """Text of reasoning, for clients that asked for a summary."""

    text: str


class OutputMessage(Struct, tag_field="type", tag="message"):
    """The text of an answer as an item."""

    id: str
    status: Status
    content: list[OutputText]
    role: str = "assistant"


class ReasoningItem(Struct, tag_field="type", tag="reasoning"):
    """The reasoning of an answer as an item."""

    id: str
    status: Status
    content: list[ReasoningText] = field(default_factory=list)
    summary: list[SummaryText] = field(default_factory=list)
    encrypted_content: str | UnsetType = UNSET


class FunctionCallItem(Struct, tag_field="type", tag="function_call"):
    """A call as an item."""

    id: str
    status: Status
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


class ToolSearchItem(Struct, tag_field="type", tag="tool_search_call"):
    """A search for tools, which the client runs, as an item."""

    id: str
    call_id: str
    status: Status
    arguments: dict[str, Any]
    execution: str = "client"


class CustomCallItem(Struct, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool as an item."""

    id: str
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem | CustomCallItem | ToolSearchItem


class InputTokensDetails(Struct):
    """Prompt tokens that were not computed."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct):
    """Tokens of the reasoning's text."""

    reasoning_tokens: int


class ResponseUsage(Struct):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(Struct):
    """The error of a response that failed."""

    message: str
    code: str = "server_error"


class IncompleteDetails(Struct):
    """The reason why a response is not whole."""

    reason: str


class ConversationReference(Struct):
    """The conversation that a response belongs to."""

    id: str


class ResponseObject(Struct):
    """The response of /v1/responses."""

    id: str
    created_at: int
    model: str
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    presence_penalty: float
    frequency_penalty: float
    store: bool
    reasoning: dict[str, Any]
    safety_identifier: str | None
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_p: float
    user: str | None
    status: ResponseStatus = "in_progress"
    output: list[OutputItem] = field(default_factory=list)
    usage: ResponseUsage | None = None
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    completed_at: int | None = None
    conversation: ConversationReference | None = None
    background: bool = False
    object: str = "response"
    service_tier: str = "default"
    top_logprobs: int = 0
    truncation: str = "disabled"


class ResponseItems(Struct):
    """The response of /v1/responses/{response_id}/input_items."""

    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool
    object: str = "list"


class DeletedResponse(Struct):
    """The response of DELETE /v1/responses/{response_id}."""

    id: str
    object: str = "response"
    deleted: bool = True


class InputTokenCount(Struct):
    """The response of /v1/responses/input_tokens."""

    input_tokens: int
    object: str = "response.input_tokens"


def listed(item: Item, number: int) -> dict[str, Any]:
    """An input item as it is listed; ``number`` makes an id for one that came without."""
    shared = {"id": item.id or f"item_{number}", "status": "completed"}
    if isinstance(item, ReasoningParam):
        content = [{"type": "reasoning_text", "text": part.text} for part in item.content or []]
        summary = [{"type": "summary_text", "text": part.text} for part in item.summary or []]
        return {**shared, "type": "reasoning", "summary": summary, "content": content}
    if isinstance(item, FunctionCallParam | CustomCallParam | AdditionalToolsParam):
        given = item.model_dump(exclude_none=True)
        return {**given, **shared, **({"role": "developer"} if isinstance(item, AdditionalToolsParam) else {})}
    if isinstance(item, ToolSearchCallParam | ToolSearchOutputParam):
        given = item.model_dump(exclude_none=True)
        return {"call_id": None, "arguments": {}, **given, **shared, "execution": "client"}
    if isinstance(item, CallOutputParam):
        output = [
            part.model_dump() if isinstance(part, ImagePartParam) else {"type": "input_text", "text": part.text}
            for part in item.output
        ]
        return {**shared, "type": item.type, "call_id": item.call_id, "output": output}
    parts: list[dict[str, Any]] = []
    for part in item.content:
        if isinstance(part, ImagePartParam):
            parts.append(part.model_dump())
        elif not isinstance(part, TextPartParam):
            parts.append({"type": "refusal", "refusal": part.refusal})
        elif item.role == "assistant":
            parts.append({"type": "output_text", "text": part.text, "annotations": []})
        else:
            parts.append({"type": "input_text", "text": part.text})
    return {**shared, "type": "message", "role": item.role, "content": parts}
