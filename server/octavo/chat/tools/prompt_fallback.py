"""Tools for models whose chat template knows none, or writes calls in an unknown format: described in the system
message, in Hermes' format. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

_INSTRUCTIONS = """You can call functions. These are described inside <tools></tools>, one JSON object a line:
<tools>
{tools}
</tools>
To call one, write its name and arguments as JSON inside <tool_call></tool_call>, and nothing else:
<tool_call>
{{"name": "function name", "arguments": {{"argument": "value"}}}}
</tool_call>
You are given the results inside <tool_response></tool_response>."""


def inject_tool_prompt(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the tools described in the system message, and earlier calls and results as text."""
    lines = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    instructions = _INSTRUCTIONS.format(tools=lines)
    rendered = [_as_text(message) for message in messages]
    if rendered and rendered[0]["role"] in ("system", "developer"):
        return [{**rendered[0], "content": f"{rendered[0]['content']}\n\n{instructions}"}, *rendered[1:]]
    return [{"role": "system", "content": instructions}, *rendered]


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] in ("tool", "function"):
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [
        "<tool_call>\n"
        + json.dumps({key: call["function"][key] for key in ("name", "arguments")}, ensure_ascii=False)
        + "\n</tool_call>"
        for call in message.get("tool_calls") or ()
    ]
    if not calls:
        return message
    return {**message, "content": "\n".join(([message["content"]] if message["content"] else []) + calls)}
