"""Tools that the prompt tells of where a conversation comes to them, not in the list at its beginning. Pure.

The list stays as it was, so that all that was computed behind it stays in the cache.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


def described(tools: Sequence[dict[str, Any]]) -> str:
    """A text that tells of tools: each with its name, description and parameters as JSON in a line of its own."""
    lines = "\n".join(json.dumps(_shown(tool), ensure_ascii=False) for tool in tools)
    return f"<tools>\n{lines}\n</tools>"


def offered(tools: Sequence[dict[str, Any]]) -> str:
    """Instructions that tell of new tools."""
    return f"From now on you can call these tools, too:\n{described(tools)}"


def offered_again(name: str) -> str:
    """Instructions that tell of a tool which was described before."""
    return f"From now on you can call the tool {name}."


def withdrawn(name: str) -> str:
    """Instructions that tell of a tool which is gone."""
    return f"From now on you cannot call the tool {name}."


def _shown(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function", tool)
    return {key: function[key] for key in ("name", "description", "parameters") if key in function}
