"""The tools of a chat request: checked, and how their calls are asked for and found."""

from __future__ import annotations

import json
import secrets
import string
from dataclasses import dataclass, field
from typing import Any

from octavo.entrypoints.args import ServerArgs
from octavo.entrypoints.openai.errors import bad_request, shown
from octavo.entrypoints.openai.protocol import ChatCompletionRequest
from octavo.entrypoints.openai.structured import CallGrammar, Constraint
from octavo.entrypoints.openai.tool_lessons import knows_tools
from octavo.entrypoints.openai.tool_parsers import TOOL_PARSERS, JsonListParser, NamedCallParser, ToolParser, detect
from octavo.entrypoints.openai.tool_parsers.formats import MistralParser
from octavo.structured_output import StructuredOutputsParams

MAX_TOOLS = 1_024
MAX_NAME = 256
_ID_CHARACTERS = string.ascii_letters + string.digits


@dataclass
class ToolPlan:
    """How the calls in an answer are found, and what makes sure that there are any."""

    parser: type[ToolParser]
    names: tuple[str, ...]
    max_calls: int | None  # later ones are left out
    short_ids: bool = False  # Mistral's templates insist on nine characters
    constraint: Constraint | None = None
    functions: list[dict[str, Any]] = field(default_factory=list)
    or_calls: CallGrammar | None = None  # calls may stand where the request demands a form of the answer

    def new_parser(self) -> ToolParser:
        return self.parser(self.names)

    def new_id(self) -> str:
        length = 9 if self.short_ids else 24
        made = "".join(secrets.choice(_ID_CHARACTERS) for _ in range(length))
        return made if self.short_ids else "call_" + made


def plan(body: ChatCompletionRequest, args: ServerArgs, template: str) -> ToolPlan | None:
    """None when the answer is to have no calls. Raises APIError naming the field."""
    functions = [_function(tool, f"tools.{i}") for i, tool in enumerate(_bounded(body.tools or []))]
    names = tuple(function["name"] for function in functions)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise bad_request(f"tools must have different names, got {shown(twice)} twice", "tools")
    choice = body.tool_choice
    if choice is None:
        choice = "auto" if names else "none"
    if choice == "none" or (choice == "auto" and not names):
        return None
    if not names:
        raise bad_request("tool_choice needs tools: send them, or drop it", "tool_choice")
    max_calls = 1 if body.parallel_tool_calls is False else None
    known = args.tool_call_parser or (detect(template) if knows_tools(template) else "hermes")
    short_ids = known is not None and TOOL_PARSERS[known] is MistralParser
    if choice == "auto":
        if not args.enable_auto_tool_choice:
            raise bad_request('tool_choice "auto" is turned off: --no-enable-auto-tool-choice', "tool_choice")
        if known is None:
            raise bad_request(
                'tool_choice "auto" needs to know how the model writes its calls, and its chat template does not say: '
                f"start the server with --tool-call-parser ({', '.join(TOOL_PARSERS)}), or use "
                'tool_choice "required" or a named one',
                "tool_choice",
            )
        return ToolPlan(TOOL_PARSERS[known], names, max_calls, short_ids, functions=functions)
    if choice == "required":
        constraint = _constraint(_any_call(functions, max_calls), "tools")
        return ToolPlan(JsonListParser, names, max_calls, short_ids, constraint)
    name = _named(choice)
    if name not in names:
        raise bad_request(
            f"tool_choice.function.name {shown(name)} is none of the tools: {', '.join(names)}",
            "tool_choice.function.name",
        )
    index = names.index(name)
    constraint = _constraint(_parameters(functions[index]), f"tools.{index}.function.parameters")
    return ToolPlan(NamedCallParser, (name,), 1, short_ids, constraint)


def combined(asked: Constraint | None, plan: ToolPlan) -> Constraint | None:
    """What an answer with tools must be like. Raises APIError when the request wants two things at once."""
    if asked is None or plan.constraint is None:
        if asked is not None and asked.field.startswith("response_format"):
            if plan.parser.call_grammar is None:
                raise bad_request(
                    f"{asked.field} leaves no room for calls in this model's format; "
                    'send tool_choice "none" with it, or drop one of them',
                    asked.field,
                )
            call = _one_call(plan.functions, plan.parser.arguments_key)
            grammar = _constraint(call, "tools").grammar()
            plan.or_calls = CallGrammar(plan.parser.call_grammar, grammar, plan.max_calls)
        return asked or plan.constraint  # a grammar of the client's own may spell calls out
    raise bad_request(
        f"{asked.field} cannot be combined with a tool_choice that demands a call; drop one of them", asked.field
    )


def _bounded(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if len(tools) > MAX_TOOLS:
        raise bad_request(f"tools takes at most {MAX_TOOLS}, got {len(tools)}", "tools")
    return tools


def _function(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type", "function") != "function":
        raise bad_request(f'{where}.type must be "function", got {shown(tool["type"])}', f"{where}.type")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise bad_request(f'{where}.function must be an object with a "name", got {shown(function)}', where)
    name = function.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        field = f"{where}.function.name"
        raise bad_request(f"{field} must be a text of 1 to {MAX_NAME} characters, got {shown(name)}", field)
    for key, kinds, what in (
        ("description", str, "a text"),
        ("parameters", dict, "a JSON schema (an object)"),
        ("strict", bool, "true or false"),
    ):
        value = function.get(key)
        if value is not None and not isinstance(value, kinds):
            field = f"{where}.function.{key}"
            raise bad_request(f"{field} must be {what}, got {shown(value)}", field)
    return function


def _named(choice: Any) -> str:
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise bad_request(
            'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}, '
            f"got {shown(choice)}",
            "tool_choice",
        )
    return name


# Grammars of calls.


def _constraint(schema: dict[str, Any], field: str) -> Constraint:
    schema = {**schema, "x-guidance": {"lenient": True}}  # a keyword that no grammar can hold is no reason to refuse
    return Constraint(StructuredOutputsParams(json=json.dumps(schema)), field)


def _parameters(function: dict[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object always."""
    schema = function.get("parameters")
    if not schema:
        return {"type": "object", "additionalProperties": False}
    return _closed(schema if "type" in schema or "$ref" in schema else {"type": "object", **schema})


def _closed(schema: Any) -> Any:
    """The schema without arguments that it does not name, where it does not say whether there may be others: a model
    that has to write JSON otherwise goes on inventing some."""
    return schema if _adds_up(schema) else _close(schema)


def _adds_up(schema: Any) -> bool:
    """Whether an object's properties may come from several places: then none of these says what all of them are."""
    if isinstance(schema, list):
        return any(map(_adds_up, schema))
    if not isinstance(schema, dict):
        return False
    together = "allOf" in schema or ("properties" in schema and schema.keys() & {"anyOf", "oneOf", "$ref", "if"})
    return bool(together) or any(map(_adds_up, schema.values()))


def _close(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_close(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: value if key in _DATA else _close(value) for key, value in schema.items()}
    properties, required = schema.get("properties"), schema.get("required") or []
    if (
        isinstance(properties, dict)
        and not schema.keys() & _MORE_PROPERTIES
        and isinstance(required, list)
        and all(isinstance(name, str) and name in properties for name in required)
    ):
        closed["additionalProperties"] = False
    return closed


_DATA = frozenset({"const", "enum", "default", "examples", "required"})
_MORE_PROPERTIES = frozenset({
    "additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames", "minProperties",
})  # fmt: skip


def _any_call(functions: list[dict[str, Any]], max_calls: int | None) -> dict[str, Any]:
    """The schema of a list of at least one call."""
    call = _one_call(functions, "parameters")
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": call, "$defs": call.pop("$defs")}
    if max_calls is not None:
        schema["maxItems"] = max_calls
    return schema


def _one_call(functions: list[dict[str, Any]], key: str) -> dict[str, Any]:
    calls, definitions = [], {}
    for i, function in enumerate(functions):
        definitions[f"tool{i}"] = _moved(_parameters(function), f"#/$defs/tool{i}")
        calls.append({
            "type": "object",
            "properties": {"name": {"const": function["name"]}, key: {"$ref": f"#/$defs/tool{i}"}},
            "required": ["name", key],
            "additionalProperties": False,
        })  # fmt: skip
    return {"anyOf": calls, "$defs": definitions}


def _moved(schema: Any, where: str) -> Any:
    """A schema that stands at ``where`` of another one: its references into itself follow."""
    if isinstance(schema, list):
        return [_moved(item, where) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, where) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = where + reference[1:]
    return moved
