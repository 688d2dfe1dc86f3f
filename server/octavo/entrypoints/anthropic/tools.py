"""The tools of a Messages request: which of them the prompt lists, where it tells of the others, which are in force."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.chat.tools.told import described, offered, offered_again, withdrawn
from octavo.entrypoints.anthropic.protocol import (
    AnyTool,
    ToolAdditionBlockParam,
    ToolDefinitionParam,
    ToolParam,
    ToolReferenceBlockParam,
    ToolRemovalBlockParam,
)
from octavo.entrypoints.errors import bad_request, shown


class Tools:
    """The tools of one request, while its messages are read in order.

    A tool that the client defers is not listed: the prompt tells of it where a search has found it. ``lists_all``:
    every tool is listed from the beginning. Raises APIError for tools of Anthropic's servers alone; beside others they
    are left out: agents add them to their requests, and a model that is not told of a tool does not miss it.
    """

    def __init__(self, tools: Sequence[AnyTool], lists_all: bool) -> None:
        self._known = {tool.name: (tool, f"tools.{at}") for at, tool in enumerate(tools) if isinstance(tool, ToolParam)}
        own = [(tool, f"tools.{at}") for at, tool in enumerate(tools) if isinstance(tool, ToolParam)]
        if tools and not own:
            raise bad_request(
                f"tools.0.type {shown(tools[0].type)} is not supported: this server does not run tools; send tools of "
                "the client",
                "tools.0.type",
            )
        # A list, not by name: two of one name are refused where tools are checked.
        self._in_force = [(tool, path) for tool, path in own if lists_all or not tool.defer_loading]
        self._told = {tool.name for tool, _ in self._in_force}
        self.listed = [function_of(tool) for tool, _ in self._in_force]

    @property
    def functions(self) -> list[dict[str, Any]]:
        """The tools in force behind the messages that have been read."""
        return [function_of(tool) for tool, _ in self._in_force]

    @property
    def paths(self) -> list[str]:
        """Their fields in the request."""
        return [path for _, path in self._in_force]

    def found(self, references: Sequence[ToolReferenceBlockParam]) -> str:
        """The text of what a search has found: tools that the prompt has not told of yet are described, of others there
        are the names."""
        texts, new = [], []
        for name in (reference.tool_name for reference in references):
            if name not in self._known or name in self._told:
                texts.append(name)
                continue
            new.append(function_of(self._known[name][0]))
            self._add(name)
        return "\n".join([*texts, *([described(new)] if new else [])])

    def change(self, block: ToolAdditionBlockParam | ToolRemovalBlockParam, where: str) -> str:
        """The instructions that a change of the tools becomes; ``where`` is the block's field. Raises APIError."""
        if isinstance(block.tool, ToolDefinitionParam):
            definition = block.tool.definition
            self._known[definition.name] = definition, f"{where}.tool.definition"
            self._told.discard(definition.name)
            name = definition.name
        else:
            name = block.tool.name
        if name not in self._known:
            raise bad_request(
                f"{where}.tool.name must be a tool of the request ({', '.join(self._known)}), got {shown(name)}",
                f"{where}.tool.name",
            )
        if isinstance(block, ToolRemovalBlockParam):
            self._in_force = [(tool, path) for tool, path in self._in_force if tool.name != name]
            return withdrawn(name)
        told = name in self._told
        self._add(name)
        return offered_again(name) if told else offered([function_of(self._known[name][0])])

    def _add(self, name: str) -> None:
        """Put a tool in force, and note that the prompt has told of it."""
        self._told.add(name)
        self._in_force = [*((tool, path) for tool, path in self._in_force if tool.name != name), self._known[name]]


def function_of(tool: ToolParam) -> dict[str, Any]:
    """A tool as chat completions have it."""
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}
