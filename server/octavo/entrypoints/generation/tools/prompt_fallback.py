"""Tools for models whose chat template does not know them: told in the system message, in Hermes' form. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

_LESSON = """You can call functions. These are described inside <tools></tools>, one JSON object a line:
<tools>
{tools}
</tools>
To call one, write its name and arguments as JSON inside <tool_call></tool_call>, and nothing else:
<tool_call>
{{"name": "function name", "arguments": {{"argument": "value"}}}}
</tool_call>
You are given the results inside <tool_response></tool_response>."""


def knows_tools(template: str) -> bool:
    return "tools" in template


def teach(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with the tools explained, and earlier calls and results as text."""
    lines = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    lesson = _LESSON.format(tools=lines)
    told = [_told(message) for message in messages]
    if told and told[0]["role"] in ("system", "developer"):
        return [{**told[0], "content": f"{told[0]['content']}\n\n{lesson}"}, *told[1:]]
    return [{"role": "system", "content": lesson}, *told]


def _told(message: dict[str, Any]) -> dict[str, Any]:
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
