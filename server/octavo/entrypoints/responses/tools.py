"""Tools of the Responses API as functions that a model calls, and its calls as items again. Pure."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from octavo.entrypoints.errors import bad_request, shown
from octavo.entrypoints.responses.protocol import (
    AdditionalToolsParam,
    CustomToolParam,
    FunctionToolParam,
    HostedToolParam,
    Item,
    NamespaceToolParam,
    ToolParam,
)
from octavo.system.logging_setup import log_once
from octavo.text.messages import object_of

logger = logging.getLogger(__name__)

_INPUT = "input"  # the parameter of the function that a custom tool becomes


@dataclass(frozen=True)
class ToolName:
    """The client's name of a tool. ``custom``: its input is a text, not JSON."""

    name: str
    namespace: str | None = None
    custom: bool = False


@dataclass
class Toolbox:
    """All tools of a request as functions, in the form of chat completions."""

    functions: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)  # of the functions, in the request
    names: dict[str, ToolName] = field(default_factory=dict)  # by those of the functions
    given: list[dict[str, Any]] = field(default_factory=list)  # the client's tools that the model is told of
    _hosted: list[tuple[str, str]] = field(default_factory=list)

    def add(self, tools: Iterable[ToolParam], path: str) -> None:
        """Add the tools of the field ``path``."""
        for number, tool in enumerate(tools):
            where = f"{path}.{number}"
            if isinstance(tool, HostedToolParam):
                self._hosted.append((where, tool.type))
                continue
            self.given.append(_echo(tool))
            if not isinstance(tool, NamespaceToolParam):
                self._add(tool, where)
                continue
            for at, inner in enumerate(tool.tools):
                self._add(inner, f"{where}.tools.{at}", tool.name)

    def check(self) -> None:
        """Refuse tools that only OpenAI's servers have, unless there are others beside them: agents send them with
        every request, and a model that is not told of a tool does not miss it. Raises APIError."""
        if self._hosted and not self.functions:
            where, kind = self._hosted[0]
            raise bad_request(
                f"{where}.type {shown(kind)} is not supported: this server does not run tools; send functions",
                f"{where}.type",
            )
        for _, kind in self._hosted:
            message = "leaving out tools of type %s: this server does not run tools"
            log_once(logger, logging.WARNING, message, kind)

    def function_of(self, name: str) -> str:
        """The function of a tool that the client names, with or without its namespace."""
        return next((ours for ours, known in self.names.items() if name in (ours, known.name)), name)

    def _add(self, tool: FunctionToolParam | CustomToolParam, where: str, namespace: str | None = None) -> None:
        name = function_name(tool.name, namespace)
        known = ToolName(tool.name, namespace, isinstance(tool, CustomToolParam))
        self.names[name] = known
        self.paths.append(where)
        if isinstance(tool, CustomToolParam):
            schema = {"type": "object", "properties": {_INPUT: {"type": "string"}}, "required": [_INPUT]}
            given: dict[str, Any] = {"description": _description(tool), "parameters": schema}
        else:
            given = {"description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
        function = {"name": name, **{key: value for key, value in given.items() if value is not None}}
        self.functions.append({"type": "function", "function": function})


def toolbox_of(tools: Iterable[ToolParam] | None, items: Iterable[Item], earlier: int = 0) -> Toolbox:
    """The tools of a request and of the items that bring further ones, of which the first ``earlier`` are of earlier
    responses. Raises APIError."""
    found = Toolbox()
    found.add(tools or (), "tools")
    for number, item in enumerate(items):
        if isinstance(item, AdditionalToolsParam):
            found.add(item.tools, f"input.{number - earlier}.tools" if number >= earlier else "previous_response_id")
    found.check()
    return found


def function_name(name: str, namespace: str | None) -> str:
    """Return the model's name of a tool."""
    if not namespace:
        return name
    return namespace + name if namespace.endswith("__") else f"{namespace}__{name}"


def custom_arguments(text: str) -> str:
    """The input of a custom tool as arguments."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """The input of a custom tool, as far as it goes where the arguments were cut off."""
    value = object_of(arguments)
    found = value.get(_INPUT, "") if isinstance(value, dict) else arguments
    return found if isinstance(found, str) else json.dumps(found)


def _description(tool: CustomToolParam) -> str | None:
    if tool.format is None or tool.format.type == "text":
        return tool.description
    form = f"The input must follow this {tool.format.syntax} grammar:\n{tool.format.definition}"
    return f"{tool.description}\n\n{form}" if tool.description else form


def _echo(tool: ToolParam) -> dict[str, Any]:
    given = tool.model_dump(exclude_none=True)
    if isinstance(tool, FunctionToolParam):
        return {"description": None, "parameters": None, "strict": None, **given}
    if isinstance(tool, NamespaceToolParam):
        return {"description": "", **given, "tools": [_echo(inner) for inner in tool.tools]}
    return given
