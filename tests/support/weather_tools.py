"""Two tools, calls of them in Hermes' format, and what a stream of calls adds up to."""

from __future__ import annotations

import json

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 8},
                "unit": {"enum": ["celsius", "fahrenheit"]},
                "near": {"type": "array", "items": {"$ref": "#/$defs/place"}, "maxItems": 2},
            },
            "required": ["city", "unit", "near"],
            "additionalProperties": False,
            "$defs": {
                "place": {
                    "type": "object",
                    "properties": {"x": {"type": "boolean"}},
                    "required": ["x"],
                    "additionalProperties": False,
                }
            },
        },
    },
}


NOW = {"type": "function", "function": {"name": "now"}}


CALLS = [("get_weather", {"city": '}"{ 日本', "unit": "celsius"}), ("now", {})]


def hermes(calls=CALLS, before="") -> str:
    return before + "\n".join(
        "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) + "\n</tool_call>"
        for name, arguments in calls
    )


def added_up(stream):
    """A stream as (role, content, calls, finish_reason)."""
    role, content, calls, finish = None, "", [], None
    for chunk in stream:
        for choice in chunk.choices:
            delta = choice.delta
            role = delta.role or role
            content += delta.content or ""
            finish = choice.finish_reason or finish
            for piece in delta.tool_calls or []:
                if piece.id:
                    assert piece.index == len(calls) and piece.type == "function" and piece.function.name
                    calls.append({"id": piece.id, "name": piece.function.name, "arguments": ""})
                calls[piece.index]["arguments"] += piece.function.arguments or ""
    return role, content, calls, finish
