"""JSON schemas and grammars of tool calls, so that output can be parsed into calls. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from octavo.chat.structured import CallGrammar, Constraint, TokenId, grammar_parts, quoted
from octavo.chat.tools.call_frames import Calls, Member, Numbers, assembled, written_header
from octavo.chat.tools.formats.row import Elements, Format, Harmony, Json, JsonKey, Named, Params, Python, Typed
from octavo.chat.tools.python_grammar import is_python_name, python_calls
from octavo.chat.tools.scalars import ANY_ARGUMENTS, parameters_of
from octavo.chat.tools.tagged_grammar import keeps_schema, tagged_calls
from octavo.chat.tools.value_grammar import element_calls, keeps_values, typed_calls
from octavo.chat.tools.value_sizes import Room, size_of_arguments
from octavo.interface.json_schema import moved
from octavo.interface.structured_output import StructuredOutputsParams

Functions = list[dict[str, Any]]


def call_grammar(
    row: Format,
    functions: Functions,
    max_calls: int | None,
    token_id: TokenId,
    strict: bool = True,
    numbers: Numbers | None = None,
) -> CallGrammar:
    """The grammar of calls in a format. Raises FieldError.

    ``token_id`` gives the id of a text that is one token of the vocabulary, else None. ``strict`` as for `to_grammar`.
    ``numbers``: those of the calls, and their ids, where the format writes them; None: any.
    """

    def grammar(schema: dict[str, Any]) -> str:
        return _spaced(constraint_of(schema, "tools").grammar(strict))

    several = max_calls != 1
    match row.arguments:
        case Harmony():
            return _harmony_calls(functions, grammar)
        case Params():
            made = tagged_calls(row, functions, token_id, grammar)
        case Python() as python:
            return python_calls(row, _within_room(python, functions), several, token_id)
        case Typed() as typed:
            made = typed_calls(row, _within_room(typed, functions), token_id)
        case Elements():
            made = element_calls(row, functions, token_id)
        case Json() | JsonKey() if not row.around[0]:  # `or_calls` tells no texts apart that begin as JSON does
            made = _bare_objects(row, functions, grammar)
        case Named(or_listed=True) if token_id("[ARGS]") is None:
            listed = replace(row, section=(row.call, ""), call="", arguments=Json(listed=True))
            made, row = _json_calls(listed, functions, token_id, grammar), listed
        case Named() | Json() | JsonKey():
            made = _json_calls(row, functions, token_id, grammar)
    return assembled(row, made, several, token_id, numbers)


def _spaced(grammar: str) -> str:
    """A grammar of JSON with the spaces that chat templates write, so that a call which comes back as history is the
    same tokens again."""
    parts = grammar_parts(grammar)
    for part in parts:
        if isinstance(schema := part.get("json_schema"), dict):
            lenient = schema.get("x-guidance", {}).get("lenient", False)
            spaces = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
            part["json_schema"] = {**schema, "x-guidance": {**spaces, "lenient": lenient}}
    return json.dumps({"grammars": parts})


def _json_calls(
    row: Format, functions: Functions, token_id: TokenId, grammar: Callable[[dict[str, Any]], str]
) -> Calls:
    """Calls with their arguments as one object of JSON, its texts around it."""
    members, parts = [], {}
    for i, function in enumerate(functions):
        name, kind = function["name"], row.arguments
        if row.layout:
            name = json.dumps(name, ensure_ascii=False)
            before, _, behind = row.layout.partition("{arguments}")
        else:
            lead, tail = (kind.lead, kind.tail) if isinstance(kind, Named) else ("", "")
            before, behind = row.call + written_header(row) + lead, tail + row.call_end
        parts[f"args{i}"] = grammar(parameters_of(function))
        members.append(Member(before, name, f"@args{i}", behind))
    return Calls(members, parts)


def _bare_objects(row: Format, functions: Functions, grammar: Callable[[dict[str, Any]], str]) -> Calls:
    kind = row.arguments
    assert isinstance(kind, Json)
    return Calls(
        [Member("", "", "@call", "")], {"call": grammar(_one_call(functions, kind.arguments_key, kind.name_key))}
    )


def keeps_schemas(row: Format, functions: Functions) -> bool:
    """True if calls in a format can be made to keep to the schemas, to their last keyword."""
    kind = row.arguments
    schemas = [parameters_of(function) for function in functions]
    if isinstance(kind, Params):
        return all(keeps_schema(kind, schema) for schema in schemas)
    if isinstance(kind, Python) and not all(is_python_name(function["name"]) for function in functions):
        return False
    if isinstance(kind, Typed | Elements | Python) and not all(keeps_values(kind, schema) for schema in schemas):
        return False
    if isinstance(kind, Typed | Python):
        return Room().takes(sum(size_of_arguments(kind, schema) for schema in schemas))
    return not row.begun


def _within_room(kind: Typed | Python, functions: Functions) -> Functions:
    """The functions, of which those take any arguments whose schemas would make the grammar too large."""
    room = Room()
    return [
        function
        if room.takes(size_of_arguments(kind, parameters_of(function)))
        else {**function, "parameters": ANY_ARGUMENTS}
        for function in functions
    ]


def _harmony_calls(functions: Functions, grammar: Callable[[dict[str, Any]], str]) -> CallGrammar:
    """A call ends the answer."""
    to = [
        f'{quoted(" to=functions." + f["name"] + " ")} {{<|constrain|>}} "json" {{<|message|>}} @args{i}'
        for i, f in enumerate(functions)
    ]
    rule = f'({{<|channel|>}} "commentary" ({" | ".join(to)}) {{<|call|>}})'
    return CallGrammar(rule, {f"args{i}": grammar(parameters_of(f)) for i, f in enumerate(functions)})


# Schemas of calls as JSON.


def constraint_of(schema: dict[str, Any], field: str) -> Constraint:
    """A lenient constraint: a keyword that no grammar can express is no reason to refuse a tool."""
    return Constraint(StructuredOutputsParams(json=json.dumps(schema)), field, lenient=True)


def any_call(
    functions: list[dict[str, Any]], max_calls: int | None, key: str, name_key: str = "name"
) -> dict[str, Any]:
    """The schema of a list of at least one call, with its arguments under ``key``."""
    return _list_of(_one_call(functions, key, name_key), max_calls)


def _list_of(call: dict[str, Any], max_calls: int | None) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": call, "$defs": call.pop("$defs")}
    if max_calls is not None:
        schema["maxItems"] = max_calls
    return schema


def _one_call(functions: list[dict[str, Any]], key: str, name_key: str = "name") -> dict[str, Any]:
    calls, definitions = [], {}
    for i, function in enumerate(functions):
        definitions[f"tool{i}"] = moved(parameters_of(function), f"#/$defs/tool{i}")
        calls.append(
            {
                "type": "object",
                "properties": {name_key: {"const": function["name"]}, key: {"$ref": f"#/$defs/tool{i}"}},
                "required": [name_key, key],
                "additionalProperties": False,
            }
        )
    return {"anyOf": calls, "$defs": definitions}
