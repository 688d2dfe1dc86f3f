"""Tools for models whose chat template knows none: described in the system message, and earlier calls as text where the
template does not write them. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from octavo.chat.tools.formats.row import Format, Harmony
from octavo.chat.tools.formats.table import TOOL_FORMATS
from octavo.chat.tools.formats.writer import write_calls
from octavo.text.content_format import PARTS

_INSTRUCTIONS = """You can call functions. These are described inside <tools></tools>, one JSON object a line:
<tools>
{tools}
</tools>
To call one, write its name and arguments {how}, and nothing else:
{example}"""
_RESULTS = "\nYou are given the results inside <tool_response></tool_response>."


def tell_of_tools(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], row: Format, results: bool
) -> list[dict[str, Any]]:
    """The messages with the tools described in the system message. ``results``: those of calls come as text, too."""
    lines = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    example = write_calls(_writable(row), [("function name", {"argument": "value"})])
    how = "as JSON inside <tool_call></tool_call>" if row.name == "hermes" else "in this form"
    instructions = _INSTRUCTIONS.format(tools=lines, how=how, example=example) + (_RESULTS if results else "")
    if messages and messages[0]["role"] in ("system", "developer"):
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{instructions}"}, *messages[1:]]
    return [{"role": "system", "content": instructions}, *messages]


def with_calls_as_text(messages: Sequence[dict[str, Any]], row: Format) -> list[dict[str, Any]]:
    """The messages with their calls in their texts, as the format writes them."""
    row, found, number = _writable(row), [], 0
    for message in messages:
        calls = message.get("tool_calls")
        if calls:
            made = [(call["function"]["name"], _object(call["function"]["arguments"])) for call in calls]
            written = write_calls(row, made, number)
            number += len(made)
            kept = {key: value for key, value in message.items() if key != "tool_calls"}
            message = {**kept, "content": "\n".join(text for text in (message["content"], written) if text)}
        found.append(message)
    return found


def with_results_as_text(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the results of calls as the user's."""
    return [_as_text(message) if message["role"] in ("tool", "function") else message for message in messages]


def _as_text(result: dict[str, Any]) -> dict[str, Any]:
    parts = ["<tool_response>", *result.get(PARTS, [result["content"]]), "</tool_response>"]
    images = {PARTS: parts} if PARTS in result else {}
    return {"role": "user", "content": "\n".join(part for part in parts if isinstance(part, str)), **images}


def _writable(row: Format) -> Format:
    return TOOL_FORMATS["hermes"] if isinstance(row.arguments, Harmony) else row


def _object(arguments: Any) -> dict[str, Any]:
    return arguments if isinstance(arguments, dict) else {}
