"""Strict comparison of answers with an SDK's own types: nothing may be missing, of another type, or unknown to them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from functools import cache
from typing import Any

import httpx
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

# Of the Open Responses specification: fields that OpenAI's types do not have, and those that it requires, by the object
# or type that has them.
OPEN_RESPONSES = ("store", "presence_penalty", "frequency_penalty", "bytes")
_PART = "sequence_number item_id output_index"
_OF_TEXT, _OF_SUMMARY = f"{_PART} content_index", f"{_PART} summary_index"
_SNAPSHOTS = ("created", "in_progress", "completed", "failed", "incomplete")
REQUIRED = {
    "response": "id object created_at completed_at status incomplete_details model previous_response_id instructions "
    "output error tools tool_choice truncation parallel_tool_calls text top_p presence_penalty frequency_penalty "
    "top_logprobs temperature reasoning user usage max_output_tokens max_tool_calls store background service_tier "
    "metadata safety_identifier prompt_cache_key",
    "message": "id status role content",
    "function_call": "id call_id name arguments status",
    "reasoning": "id summary",
    "output_text": "text annotations",
    "function": "name description parameters strict",
    "json_schema": "name description schema strict",
    **dict.fromkeys((f"response.{name}" for name in _SNAPSHOTS), "sequence_number response"),
    **dict.fromkeys(("response.output_item.added", "response.output_item.done"), "sequence_number output_index item"),
    **dict.fromkeys(("response.content_part.added", "response.content_part.done"), f"{_OF_TEXT} part"),
    "response.output_text.delta": f"{_OF_TEXT} delta logprobs",
    "response.output_text.done": f"{_OF_TEXT} text logprobs",
    "response.reasoning_text.delta": f"{_OF_TEXT} delta",
    "response.reasoning_text.done": f"{_OF_TEXT} text",
    "response.reasoning_summary_part.added": f"{_OF_SUMMARY} part",
    "response.reasoning_summary_part.done": f"{_OF_SUMMARY} part",
    "response.reasoning_summary_text.delta": f"{_OF_SUMMARY} delta",
    "response.reasoning_summary_text.done": f"{_OF_SUMMARY} text",
    "response.function_call_arguments.delta": f"{_PART} delta",
    "response.function_call_arguments.done": f"{_PART} arguments",
}


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def fits(kind: Any, raw: str | bytes, extras: Collection[str] = ()) -> Any:
    """The value as a ``kind``. SDKs allow unknown fields, for newer servers: here they fail, but for ``extras`` and
    what Open Responses has beside OpenAI's types. What that requires must be there."""
    value, given = _adapter(kind).validate_json(raw, strict=True), json.loads(raw)
    extras = {*extras, *(OPEN_RESPONSES if kind in (Response, ResponseStreamEvent) else ())}
    unknown = [path for path in unknown_fields(value, given) if path.rpartition(".")[2] not in extras]
    assert not unknown, f"{unknown} in {raw!r}"
    lacking = [*lacking_fields(given)] if kind in (Response, ResponseStreamEvent) else []
    assert not lacking, f"{lacking} are not in {raw!r}"
    return value


def lacking_fields(given: Any, path: str = "") -> Iterator[str]:
    """The paths of the fields that Open Responses requires and ``given`` has not."""
    if isinstance(given, list):
        for at, item in enumerate(given):
            yield from lacking_fields(item, f"{path}.{at}")
    elif isinstance(given, dict):
        needed = REQUIRED.get(given.get("object") or given.get("type") or "", "").split()
        if "tool_choice" not in path:  # which refers to a function
            yield from (f"{path}.{name}" for name in needed if name not in given)
        for key, value in given.items():
            if key not in ("schema", "parameters"):
                yield from lacking_fields(value, f"{path}.{key}")


def unknown_fields(value: Any, given: Any, path: str = "") -> Iterator[str]:
    """The paths of the fields ``given`` that the types of the parsed ``value`` do not have."""
    if isinstance(value, BaseModel):
        names = {field.alias or name: name for name, field in type(value).model_fields.items()}
        for key, inner in given.items():
            if key not in names:
                yield f"{path}.{key}"
            else:
                yield from unknown_fields(getattr(value, names[key]), inner, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for i, (item, inner) in enumerate(zip(value, given, strict=True)):
            yield from unknown_fields(item, inner, f"{path}.{i}")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from unknown_fields(item, given[key], f"{path}.{key}")


def named_events(url: str, body: dict[str, Any], **options: Any) -> list[tuple[str, str]]:
    """The events of a stream as (name, data); each name is the type in its data."""
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=60, **options) as response:
        text = response.read().decode()
        assert response.status_code == 200, text
    *events, rest = text.split("\n\n")
    assert rest == ""
    found = []
    for event in events:
        name, data = event.split("\n")
        assert name.startswith("event: ") and data.startswith("data: ")
        assert json.loads(data[6:])["type"] == name[7:]
        found.append((name[7:], data[6:]))
    return found
