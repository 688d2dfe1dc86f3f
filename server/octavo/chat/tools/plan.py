"""The tools of a chat request: checked, and how the model is made to call them and its calls are parsed."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.chat.messages import Conversation, FieldNames
from octavo.chat.options import ChatOptions
from octavo.chat.structured import CallGrammar, Constraint
from octavo.chat.tools.call_frames import MAX_NUMBERED, Numbers
from octavo.chat.tools.choice import format_of
from octavo.chat.tools.formats.row import Format, Harmony
from octavo.chat.tools.formats.table import TOOL_FORMATS
from octavo.chat.tools.free_answer import FreeAnswer, free_answer
from octavo.chat.tools.grammars import any_call, call_grammar, constraint_of, keeps_schemas
from octavo.chat.tools.harmony import speaks_harmony
from octavo.chat.tools.parsers import JsonListParser, NamedCallParser, ToolParser, reader_of
from octavo.chat.tools.scalars import ANY_ARGUMENTS, parameters_of
from octavo.errors import FieldError
from octavo.interface.json_schema import closed, sets_engine_options
from octavo.interface.schema_keywords import held, with_evaluated
from octavo.interface.schema_references import resolved
from octavo.text.shown import shown

MAX_TOOLS = 1_024
MAX_TOOL_NAME = 256  # characters
_ID_CHARACTERS = string.ascii_letters + string.digits


@dataclass
class ToolPlan:
    """The format of an answer's calls, and the constraint that forces them."""

    format: Format
    names: tuple[str, ...]
    max_calls: int | None  # further ones are dropped
    constraint: Constraint | None = None
    functions: list[dict[str, Any]] = field(default_factory=list)
    strict: bool = True  # as for `to_grammar`
    or_calls: CallGrammar | None = None  # grammar of calls that may replace the constrained output
    forced: type[ToolParser] | None = None  # parser of what the constraint demands, where that is not the format
    first: int = 0  # the number of calls before this answer, for grammars
    ids: tuple[str, ...] = ()  # of the first calls, where a grammar has the model write them
    one_only: bool = False  # a grammar has one call, for the template takes no more of a turn
    held: list[dict[str, Any]] = field(default_factory=list)  # functions as calls that are free must keep to them
    free: FreeAnswer | None = None  # the grammar of an answer with such calls

    @property
    def name(self) -> str:
        """The format's name in metrics."""
        return self.format.name if self.forced is None else "json"

    def new_parser(self) -> ToolParser:
        """A parser of one answer."""
        schemas = {function["name"]: parameters_of(function) for function in self.functions}
        if self.forced is not None:
            return self.forced(schemas)
        reader = reader_of(self.format, schemas)
        reader.demanded = self.constraint is not None and not self.format.thoughts[0]
        return reader

    def new_id(self, index: int = -1) -> str:
        """The id of the ``index``-th call of the answer, which is random."""
        if 0 <= index < len(self.ids):
            return self.ids[index]
        made = "".join(secrets.choice(_ID_CHARACTERS) for _ in range(self.format.id_length or 24))
        return made if self.format.id_length else "call_" + made

    @property
    def harmony(self) -> bool:
        """True if answers are in the format of gpt-oss."""
        return isinstance(self.format.arguments, Harmony)


def plan_tools(conversation: Conversation, options: ChatOptions, template: str) -> ToolPlan | None:
    """None if the answer is to have no calls. Raises FieldError naming the field."""
    tools = conversation.tools or []
    if len(tools) > MAX_TOOLS:
        raise FieldError(f"tools takes at most {MAX_TOOLS}, got {len(tools)}", "tools")
    fields = conversation.fields
    functions = [_function(tool, i, fields) for i, tool in enumerate(tools)]
    names = tuple(function["name"] for function in functions)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise FieldError(f"tools must have unique names, got {shown(twice)} twice", "tools")
    choice = conversation.tool_choice
    if choice is None:
        choice = "auto" if names else "none"
    if choice == "none" or (choice == "auto" and not names):
        return None
    if not names:
        raise FieldError("tool_choice needs tools; send tools or drop it", "tool_choice")
    if not options.reads_calls:
        if choice == "auto":
            return None
        raise FieldError(
            'tool_choice demands a call, and the server reads none (--tool-call-parser none); use "auto" or drop it',
            "tool_choice",
        )
    max_calls = 1 if conversation.parallel_tool_calls is False else None
    harmony = speaks_harmony(options, template)
    found = None if harmony else format_of(template, options.call_format)
    row = TOOL_FORMATS["openai"] if found is None else found.row
    counts_on = row.gaps is None or row.gaps.counts_on
    first = sum(len(message.get("tool_calls") or ()) for message in conversation.messages) if counts_on else 0
    numbers: Any = {"first": first, "one_only": found is not None and found.one_only}
    if choice == "auto":
        if not options.enable_auto_tool_choice:
            raise FieldError(
                'tool_choice "auto" is disabled (--no-enable-auto-tool-choice); use '
                f'"{fields.required}" or a named one',
                "tool_choice",
            )
        held = _held(functions, options)
        strict = options.strict_json_schema
        return ToolPlan(row, names, max_calls, functions=functions, strict=strict, held=held, **numbers)
    functions = [
        _enforced(function, options.strict_json_schema, fields.of_function(at, "parameters"))
        if choice == "required" or function["name"] == _named(choice)
        else function
        for at, function in enumerate(functions)
    ]
    if choice == "required":
        most = 1 if numbers["one_only"] else max_calls
        constraint = constraint_of(any_call(functions, most, "parameters"), "tools")
        listed = None if harmony else JsonListParser
        strict = options.strict_json_schema
        return ToolPlan(row, names, max_calls, constraint, functions, strict, forced=listed, **numbers)
    name = _named(choice)
    if name not in names:
        raise FieldError(
            f"{fields.choice} must be one of the tools ({', '.join(names)}), got {shown(name)}", fields.choice
        )
    index = names.index(name)
    constraint = constraint_of(parameters_of(functions[index]), fields.of_function(index, "parameters"))
    named = None if harmony else NamedCallParser
    strict = options.strict_json_schema
    return ToolPlan(row, (name,), 1, constraint, [functions[index]], strict, forced=named, **numbers)


def combine_constraints(
    asked: Constraint | None, plan: ToolPlan, token_id: Callable[[str], int | None]
) -> Constraint | None:
    """The constraint of an answer with tools: a demanded call has no text to which the form of a text could apply.

    Raises FieldError if the client's constraint is on all of the output, and that of tool_choice is another.
    """
    if asked is not None and plan.constraint is not None:
        if not asked.allows_calls:
            raise FieldError(
                f"{asked.field} cannot be combined with a tool_choice that demands a call; drop one of them",
                asked.field,
            )
        asked = None
    if asked is None and plan.held:
        most = 1 if plan.one_only else plan.max_calls
        plan.free = free_answer(plan.format, plan.held, most, token_id, plan.strict)
        return None
    demanded = plan.constraint is not None and keeps_schemas(plan.format, plan.functions)  # in the model's own format
    if asked is not None and asked.allows_calls:
        plan.functions = [_offered(function, plan.strict) for function in plan.functions]
    if demanded:
        plan.forced = None
    if demanded or (asked is not None and asked.allows_calls):
        most = 1 if plan.one_only else plan.max_calls
        if "{id}" in plan.format.header + plan.format.layout and plan.format.gaps is not None:
            plan.ids = tuple(plan.new_id() for _ in range(MAX_NUMBERED))
        numbers = Numbers(plan.first, plan.ids)
        plan.or_calls = call_grammar(plan.format, plan.functions, most, token_id, plan.strict, numbers)
    return asked or plan.constraint


def with_allowed_tools(conversation: Conversation) -> Conversation:
    """The conversation with the mode of a `tool_choice` of type "allowed_tools" instead of it, and with the allowed
    tools instead of all: the model is told of those alone. Raises FieldError."""
    choice = conversation.tool_choice
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return conversation
    allowed = choice.get("allowed_tools", choice)  # the Responses API has no inner object
    where = conversation.fields.allowed
    mode, listed = (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, dict) else (None, None)
    if mode not in ("auto", "required"):
        raise FieldError(f'{where}.mode must be "auto" or "required", got {shown(mode)}', f"{where}.mode")
    if not isinstance(listed, list) or not listed:
        raise FieldError(f"{where}.tools must be a list of at least one tool, got {shown(listed)}", f"{where}.tools")
    names = {_tool_name(tool) for tool in listed}
    known = {_tool_name(tool) for tool in conversation.tools or []}
    for name in names - known:
        raise FieldError(f"{where}.tools must name tools of the request, got {shown(name)}", f"{where}.tools")
    kept = [(at, tool) for at, tool in enumerate(conversation.tools or []) if _tool_name(tool) in names]
    fields = replace(conversation.fields, tools=[conversation.fields.tool(at) for at, _ in kept])
    told = conversation.listed
    told = told if told is None else [tool for tool in told if _tool_name(tool) in names]
    return replace(conversation, tools=[tool for _, tool in kept], listed=told, tool_choice=mode, fields=fields)


def _enforced(function: dict[str, Any], closes: bool, field: str) -> dict[str, Any]:
    """A function that is to be called, its parameters as a grammar holds them. Raises FieldError for parameters that
    are no schema and, where the function is strict, for a keyword that no grammar holds."""
    if not function.get("parameters"):
        return function
    try:
        parameters = with_evaluated(resolved(function["parameters"]))
        parameters = closed(parameters) if closes else parameters
        held(parameters, strict=function.get("strict") is True)
    except ValueError as error:
        raise FieldError(f"{field} is not valid: {error}", field) from None
    return {**function, "parameters": parameters}


def _held(functions: list[dict[str, Any]], options: ChatOptions) -> list[dict[str, Any]]:
    """Functions as their calls are held where the model is free to call; none where nothing is held."""
    level, closes = options.tool_strict_level, options.strict_json_schema
    if level == "auto" and not any(function.get("strict") for function in functions):
        return []

    return [
        _offered(function, closes)
        if function.get("strict") or level == "parameter"
        else {**function, "parameters": ANY_ARGUMENTS}
        for function in functions
    ]


def _offered(function: dict[str, Any], closes: bool) -> dict[str, Any]:
    """A function that may be called: what is wrong with it is no reason to refuse an answer without a call."""
    try:
        return _enforced({**function, "strict": False}, closes, "tools")
    except FieldError:
        return {**function, "parameters": {"type": "object"}}


def _tool_name(tool: Any) -> str | None:
    """The name in a tool, or in a reference to one."""
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _function(tool: dict[str, Any], index: int, fields: FieldNames) -> dict[str, Any]:
    where = fields.tool(index)
    if tool.get("type", "function") != "function":
        raise FieldError(f'{where}.type must be "function", got {shown(tool["type"])}', f"{where}.type")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise FieldError(f'{where}.function must be an object with a "name", got {shown(function)}', where)
    name = function.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_TOOL_NAME:
        field = fields.of_function(index, "name")
        raise FieldError(f"{field} must be a string of 1 to {MAX_TOOL_NAME} characters, got {shown(name)}", field)
    for key, kinds, what in (
        ("description", str, "a string"),
        ("parameters", dict, "a JSON schema (an object)"),
        ("strict", bool, "true or false"),
    ):
        value = function.get(key)
        if value is not None and not isinstance(value, kinds):
            field = fields.of_function(index, key)
            raise FieldError(f"{field} must be {what}, got {shown(value)}", field)
    if sets_engine_options(function.get("parameters")):
        field = fields.of_function(index, "parameters")
        raise FieldError(f'{field} must not contain "x-guidance" (options of the grammar engine); remove it', field)
    return function


def _named(choice: Any) -> str:
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise FieldError(
            'tool_choice must be "none", "auto", "required", {"type": "function", "function": {"name": ...}} or '
            '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}, '
            f"got {shown(choice)}",
            "tool_choice",
        )
    return name
