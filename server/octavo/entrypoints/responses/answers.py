"""Bodies and events of the Responses API. Events are dicts: most of their fields differ from one type to the next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType, field

from octavo.chat.parts import Part, Step
from octavo.entrypoints.generation.logprobs import ChatLogprob
from octavo.entrypoints.responses.logprobs import TextLogprobs
from octavo.entrypoints.responses.prepare import sealed
from octavo.entrypoints.responses.protocol import (
    AdditionalToolsParam,
    CallOutputParam,
    CustomCallParam,
    FunctionCallParam,
    ImagePartParam,
    Item,
    MessageParam,
    ReasoningParam,
    ReasoningTextParam,
    RefusalPartParam,
    TextPartParam,
)
from octavo.entrypoints.responses.tools import ToolName, custom_input
from octavo.entrypoints.transport.sse import EventTemplate

Status = Literal["in_progress", "completed", "incomplete", "failed"]
Event = dict[str, Any]


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


class CustomCallItem(Struct, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool as an item."""

    id: str
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem | CustomCallItem


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
    """Why a response failed."""

    message: str
    code: str = "server_error"


class IncompleteDetails(Struct):
    """Why a response is not whole."""

    reason: str


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
    status: Status = "in_progress"
    output: list[OutputItem] = field(default_factory=list)
    usage: ResponseUsage | None = None
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    completed_at: int | None = None
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


class ItemWriter:
    """Items and events of one answer. Items have ids of their own, made of the response's.

    ``names``: of the tools, by what the model calls them. ``summarized``: reasoning comes as its summary. ``seals``: it
    comes as encrypted_content too. ``logprobs``: of tokens in texts, added as the tokens come.
    """

    def __init__(
        self,
        response_id: str,
        names: Mapping[str, ToolName] | None = None,
        summarized: bool = False,
        seals: bool = False,
        logprobs: TextLogprobs | None = None,
    ) -> None:
        self._suffix = response_id.partition("_")[2]
        self._names = names or {}
        self._summarized, self._seals = summarized, seals
        self._logprobs = logprobs
        self._logprobs_of: dict[int, list[ChatLogprob]] = {}  # of parts, by index

    def id_of(self, part: Part) -> str:
        """The item's id."""
        prefix = {"text": "msg", "reasoning": "rs", "call": "ctc" if self._tool(part).custom else "fc"}[part.kind]
        return f"{prefix}_{self._suffix}{part.index:02x}"

    def _tool(self, part: Part) -> ToolName:
        return self._names.get(part.name) or ToolName(part.name)

    def item(self, part: Part, status: Status) -> OutputItem:
        """A part, as far as it has come, as an item."""
        if part.kind == "text":
            text = OutputText(part.text, logprobs=list(self._logprobs_of.get(part.index, ())))
            return OutputMessage(self.id_of(part), status, [text])
        if part.kind == "reasoning":
            sealed_text = sealed(part.text) if self._seals and status != "in_progress" else UNSET
            if self._summarized:
                return ReasoningItem(self.id_of(part), status, [], [SummaryText(part.text)], sealed_text)
            return ReasoningItem(self.id_of(part), status, [ReasoningText(part.text)], [], sealed_text)
        tool = self._tool(part)
        namespace = tool.namespace or UNSET
        if tool.custom:
            return CustomCallItem(self.id_of(part), part.call_id, tool.name, custom_input(part.text), namespace)
        return FunctionCallItem(self.id_of(part), status, part.call_id, tool.name, part.text, namespace)

    def kept(self, part: Part) -> Item:
        """The same as an item of a later request's input."""
        if part.kind == "text":
            content: list[TextPartParam | RefusalPartParam] = [TextPartParam(type="output_text", text=part.text)]
            return MessageParam.model_construct(role="assistant", content=content, id=self.id_of(part))
        if part.kind == "reasoning":
            text = ReasoningTextParam(type="reasoning_text", text=part.text)
            return ReasoningParam(type="reasoning", content=[text], id=self.id_of(part))
        tool = self._tool(part)
        shared: dict[str, Any] = {"call_id": part.call_id, "name": tool.name, "id": self.id_of(part)}
        shared["namespace"] = tool.namespace
        if tool.custom:
            return CustomCallParam(type="custom_tool_call", input=custom_input(part.text), **shared)
        return FunctionCallParam(type="function_call", arguments=part.text, **shared)

    def take(self, steps: Iterable[Step]) -> None:
        """Note which tokens the texts of an answer have that is not streamed."""
        for action, part, text in steps:
            if action == "add":
                self._take(part, text)

    def _take(self, part: Part, text: str) -> list[ChatLogprob]:
        if self._logprobs is None:
            return []
        taken = self._logprobs.take(text)
        if part.kind == "text":
            self._logprobs_of.setdefault(part.index, []).extend(taken)
        return taken

    def events(self, step: Step, cut: bool = False) -> list[Event]:
        """The events of one step, without their numbers. ``cut``: the part that closes is not whole."""
        action, part, text = step
        where = {"item_id": self.id_of(part), "output_index": part.index}
        if action == "add":
            return self._deltas(part, where, text, self._take(part, text))
        if action == "open":
            item = self.item(replace(part, pieces=[]), "in_progress")  # clients add the deltas to it
            events: list[Event] = [{"type": "response.output_item.added", "output_index": part.index, "item": item}]
            if isinstance(item, OutputMessage | ReasoningItem):
                events += _content_events("added", item, where)
                item.content = []
            if isinstance(item, ReasoningItem):
                item.summary = []
            return events
        item = self.item(part, "incomplete" if cut else "completed")
        done: Event = {"type": "response.output_item.done", "output_index": part.index, "item": item}
        return [*self._done(item, where), done]

    def text_template(self, part: Part) -> EventTemplate:
        """The event of new text of a part, without its number, for texts without log-probabilities."""
        where = {"item_id": self.id_of(part), "output_index": part.index}
        return EventTemplate(lambda text: self._deltas(part, where, text, [])[0], f"{_TEXT}.delta")

    def _deltas(self, part: Part, where: dict[str, Any], text: str, logprobs: list[ChatLogprob]) -> list[Event]:
        if part.kind == "text":
            return [{"type": f"{_TEXT}.delta", **where, "content_index": 0, "delta": text, "logprobs": logprobs}]
        if part.kind == "reasoning":
            if self._summarized:
                return [{"type": f"{_SUMMARY}_text.delta", **where, "summary_index": 0, "delta": text}]
            return [{"type": f"{_REASONING}.delta", **where, "content_index": 0, "delta": text}]
        if self._tool(part).custom:  # which comes whole: the model writes it as JSON
            return []
        return [{"type": "response.function_call_arguments.delta", **where, "delta": text}]

    def _done(self, item: OutputItem, where: dict[str, Any]) -> list[Event]:
        """What ends the content of an item."""
        if isinstance(item, FunctionCallItem):
            return [{"type": "response.function_call_arguments.done", **where, "arguments": item.arguments}]
        if isinstance(item, CustomCallItem):
            kind = "response.custom_tool_call_input"
            delta: list[Event] = [{"type": f"{kind}.delta", **where, "delta": item.input}] if item.input else []
            return [*delta, {"type": f"{kind}.done", **where, "input": item.input}]
        ended: Event
        if isinstance(item, OutputMessage):
            (content,) = item.content
            said = {"text": content.text, "logprobs": content.logprobs}
            ended = {"type": f"{_TEXT}.done", **where, "content_index": 0, **said}
        elif item.summary:
            ended = {"type": f"{_SUMMARY}_text.done", **where, "summary_index": 0, "text": item.summary[0].text}
        else:
            ended = {"type": f"{_REASONING}.done", **where, "content_index": 0, "text": item.content[0].text}
        return [ended, *_content_events("done", item, where)]


_TEXT, _REASONING = "response.output_text", "response.reasoning_text"
_SUMMARY = "response.reasoning_summary"


def _content_events(action: str, item: OutputMessage | ReasoningItem, where: dict[str, Any]) -> list[Event]:
    """The event of the one part of an item, which is added or done."""
    if isinstance(item, ReasoningItem) and item.summary:
        part = item.summary[0]
        return [{"type": f"{_SUMMARY}_part.{action}", **where, "summary_index": 0, "part": part}]
    return [{"type": f"response.content_part.{action}", **where, "content_index": 0, "part": item.content[0]}]


def size_of(item: Item) -> int:
    """Characters of an item as JSON, roughly where it has images: encoding these would take long."""
    parts = item.content if isinstance(item, MessageParam) else item.output if isinstance(item, CallOutputParam) else []
    images = [part for part in parts if isinstance(part, ImagePartParam)]
    if not images:
        return len(item.model_dump_json())
    return sum(len(part.image_url if isinstance(part, ImagePartParam) else part.model_dump_json()) for part in parts)


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
