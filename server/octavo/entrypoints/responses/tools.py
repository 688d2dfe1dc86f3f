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
    MessageParam,
    NamespaceToolParam,
    ToolParam,
    ToolSearchOutputParam,
    ToolSearchParam,
)
from octavo.system.logging_setup import log_once
from octavo.text.messages import object_of

logger = logging.getLogger(__name__)

SEARCH = "tool_search"  # OpenAI's name of the search that a client runs
_INPUT = "input"  # the parameter of the function that a custom tool becomes


@dataclass(frozen=True)
class ToolName:
    """The client's name of a tool. ``custom``: its input is a text, not JSON. ``searches``: it finds further tools."""

    name: str
    namespace: str | None = None
    custom: bool = False
    searches: bool = False


@dataclass
class Toolbox:
    """All tools of a request as functions, in the form of chat completions. ``listed``: those that the prompt lists;
    ``told``: by the number of the item that brings them, those that it tells of there."""

    functions: list[dict[str, Any]] = field(default_factory=list)
    listed: list[dict[str, Any]] = field(default_factory=list)
    told: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    paths: list[str] = field(default_factory=list)  # of the functions, in the request
    names: dict[str, ToolName] = field(default_factory=dict)  # by those of the functions
    given: list[dict[str, Any]] = field(default_factory=list)  # the client's tools that the model is told of
    _hosted: list[tuple[str, str]] = field(default_factory=list)

    def add(self, tools: Iterable[ToolParam], path: str) -> None:
        """Add the tools of the field ``path``."""
        for number, tool in enumerate(tools):
            where = f"{path}.{number}"
            if isinstance(tool, HostedToolParam) or (isinstance(tool, ToolSearchParam) and tool.execution != "client"):
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

    def _add(
        self, tool: FunctionToolParam | CustomToolParam | ToolSearchParam, where: str, namespace: str | None = None
    ) -> None:
        searches = isinstance(tool, ToolSearchParam)
        own = SEARCH if isinstance(tool, ToolSearchParam) else tool.name
        name = function_name(own, namespace)
        self.names[name] = ToolName(own, namespace, isinstance(tool, CustomToolParam), searches)
        self.paths.append(where)
        if isinstance(tool, CustomToolParam):
            schema = {"type": "object", "properties": {_INPUT: {"type": "string"}}, "required": [_INPUT]}
            given: dict[str, Any] = {"description": _description(tool), "parameters": schema}
        else:
            strict = tool.strict if isinstance(tool, FunctionToolParam) else None
            given = {"description": tool.description, "parameters": tool.parameters, "strict": strict}
        function = {"name": name, **{key: value for key, value in given.items() if value is not None}}
        self.functions.append({"type": "function", "function": function})


def toolbox_of(
    tools: Iterable[ToolParam] | None, items: Iterable[Item], earlier: int = 0, lists_all: bool = False
) -> Toolbox:
    """The tools of a request and of the items that bring further ones, of which the first ``earlier`` are of earlier
    responses. What stands before all that is said is listed with the request's, what comes later is told of at its
    place, once; ``lists_all``: it is listed too. Raises APIError."""
    found = Toolbox()
    found.add(tools or (), "tools")
    begun = False
    for number, item in enumerate(items):
        if not isinstance(item, AdditionalToolsParam | ToolSearchOutputParam):
            begun = begun or not (isinstance(item, MessageParam) and item.role in ("system", "developer"))
            continue
        before = len(found.functions)
        known = {function["function"]["name"]: function for function in found.functions}
        found.add(item.tools, f"input.{number - earlier}.tools" if number >= earlier else "previous_response_id")
        new = found.functions[before:]
        if begun:  # a search may find what is known: it is one tool, unless it is another of the name
            kept = [at for at, function in enumerate(new) if known.get(function["function"]["name"]) != function]
            found.functions[before:] = [new[at] for at in kept]
            found.paths[before:] = [found.paths[before + at] for at in kept]
            if not lists_all:
                found.told[number] = found.functions[before:]
    told = [function for functions in found.told.values() for function in functions]
    found.listed = [function for function in found.functions if not any(function is one for one in told)]
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


def search_arguments(arguments: str) -> dict[str, Any]:
    """The arguments of a search, as far as they go where they were cut off."""
    value = object_of(arguments)
    return value if isinstance(value, dict) else {}


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
