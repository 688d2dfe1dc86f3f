"""JSON schemas and grammars of tool calls, so that output can be parsed into calls. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from octavo.chat.structured import MARKS, CallGrammar, Constraint, TokenId, grammar_parts, lark_of, quoted
from octavo.chat.tools.formats.row import Elements, Format, Harmony, Json, JsonKey, Named, Params, Python, Typed
from octavo.chat.tools.parsers.format_reader import header_parts
from octavo.chat.tools.tagged_grammar import keeps_schema, parameters_of, tagged_calls
from octavo.chat.tools.value_grammar import element_calls, typed_calls
from octavo.errors import FieldError
from octavo.interface.json_schema import moved
from octavo.interface.structured_output import StructuredOutputsParams

Functions = list[dict[str, Any]]


def call_grammar(
    row: Format, functions: Functions, max_calls: int | None, token_id: TokenId, strict: bool = True
) -> CallGrammar:
    """The grammar of calls in a format. Raises FieldError.

    ``token_id`` gives the id of a text that is one token of the vocabulary, else None. ``strict`` as for `to_grammar`.
    """

    def grammar(schema: dict[str, Any]) -> str:
        return _spaced(constraint_of(schema, "tools").grammar(strict))

    more = "" if max_calls == 1 else "+"
    begin, end = (lark_of(mark, token_id) for mark in row.section)
    match row.arguments:
        case Harmony():
            return _harmony_calls(functions, grammar)
        case Params():
            return tagged_calls(row, functions, more, token_id, grammar)
        case Python(lines=lines):
            calls = _python_calls(functions, more, lines)
            rule = calls.rule if row.begins else f"({begin} {calls.rule} {end})"
            return CallGrammar(rule, {}, calls.rules)
        case Typed():
            return typed_calls(row, functions, more, token_id)
        case Elements():
            return element_calls(row, functions, more, token_id)
        case Named(or_listed=True) if token_id("[ARGS]") is None:
            listed = any_call(functions, max_calls, "arguments")
            return CallGrammar(f"{_marked(row.call)} @calls", {"calls": grammar(listed)})
        case Named():
            return _named_calls(row, functions, more, grammar)
        case Json() | JsonKey():
            return _json_calls(row, functions, max_calls, token_id, grammar)


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
    row: Format,
    functions: Functions,
    max_calls: int | None,
    token_id: TokenId,
    grammar: Callable[[dict[str, Any]], str],
) -> CallGrammar:
    begin, end = (lark_of(mark, token_id) for mark in row.section)
    kind, more = row.arguments, "" if max_calls == 1 else "+"
    if isinstance(kind, Json) and not kind.listed:
        call = {"call": grammar(_one_call(functions, kind.arguments_key, kind.name_key))}
        if not row.each:
            following = f" ({quoted(row.between)} @call)*" if more else ""
            return CallGrammar(f"(@call{following})", call)
        if row.exact:
            gap = quoted(row.between) if row.between else ""
            one = f"{begin} {gap} @call {gap} {end}"
            return CallGrammar(f"(/\\n?/ {one}{f' ({gap} {one})*' if more else ''})", call)
        return CallGrammar(f"(/\\n?/ {begin} /\\n?/ @call /\\n?/ {end}){more}", call)
    if isinstance(kind, Json):
        listed = any_call(functions, max_calls, kind.arguments_key, kind.name_key)
    else:
        listed = _list_of(_keyed_call(functions), max_calls)
    loose = "" if row.exact else "/\\n?/"
    closing = f"{loose} {end}" if row.ends_section else ""
    return CallGrammar(f"({begin} {loose} @calls {closing})", {"calls": grammar(listed)})


def keeps_schemas(row: Format, functions: Functions) -> bool:
    """True if calls in a format can be made to keep to the schemas, to their last keyword."""
    kind = row.arguments
    if isinstance(kind, Params):
        return all(keeps_schema(kind, parameters_of(function)) for function in functions)
    return isinstance(kind, Json | JsonKey | Named | Harmony) and not row.begun


def _harmony_calls(functions: Functions, grammar: Callable[[dict[str, Any]], str]) -> CallGrammar:
    """A call ends the answer."""
    to = [
        f'{quoted(" to=functions." + f["name"] + " ")} {{<|constrain|>}} "json" {{<|message|>}} @args{i}'
        for i, f in enumerate(functions)
    ]
    rule = f'({{<|channel|>}} "commentary" ({" | ".join(to)}) {{<|call|>}})'
    return CallGrammar(rule, {f"args{i}": grammar(parameters_of(f)) for i, f in enumerate(functions)})


def _named_calls(row: Format, functions: Functions, more: str, grammar: Callable[[dict[str, Any]], str]) -> CallGrammar:
    kind = row.arguments
    assert isinstance(kind, Named)
    named = [
        f"{_named_header(row, f['name'])} @args{i} {_marked(kind.tail + row.call_end)}" for i, f in enumerate(functions)
    ]
    begin, end = (_marked(mark) for mark in row.section)
    arguments = {f"args{i}": grammar(parameters_of(function)) for i, function in enumerate(functions)}
    return CallGrammar(f"({begin} ({' | '.join(named)}){more} {end})", arguments)


def _named_header(row: Format, name: str) -> str:
    """Lark for what stands in front of a call's JSON; a name is text, whatever it looks like."""
    kind = row.arguments
    assert isinstance(kind, Named)
    parts, plain = [], ""
    for part in (row.call, *header_parts(row.header), kind.lead):
        if part in ("{id}", "{index}"):
            parts += [quoted(plain), "/[0-9]{1,9}/" if part == "{index}" else "/[A-Za-z0-9]{1,64}/"]
            plain = ""
            continue
        if part.endswith(")?"):
            part = "" if "{" in part else part[1:-2]
        for text in [name] if part == "{name}" else MARKS.split(part):
            if part != "{name}" and MARKS.fullmatch(text):
                parts += [quoted(plain), f"{{{text}}}"]
                plain = ""
            else:
                plain += text
    return " ".join(part for part in (*parts, quoted(plain)) if part != '""')


def _marked(text: str) -> str:
    """Lark for a text, with its marks as `with_tokens` finds them."""
    parts = (f"{{{part}}}" if MARKS.fullmatch(part) else quoted(part) for part in MARKS.split(text) if part)
    return " ".join(parts)


def _keyed_call(functions: Functions) -> dict[str, Any]:
    calls, definitions = [], {}
    for i, function in enumerate(functions):
        definitions[f"tool{i}"] = moved(parameters_of(function), f"#/$defs/tool{i}")
        name, schema = function["name"], {"$ref": f"#/$defs/tool{i}"}
        calls.append(
            {"type": "object", "properties": {name: schema}, "required": [name], "additionalProperties": False}
        )
    return {"anyOf": calls, "$defs": definitions}


_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DOTTED = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_PYTHON_VALUES = r"""
value: STRING | NUMBER | "True" | "False" | "None" | list | dict
list: "[" (value (", " value)*)? "]"
dict: "{" (STRING ": " value (", " STRING ": " value)*)? "}"
STRING: /"([^"\\\n]|\\["'\\nrt])*"/ | /'([^'\\\n]|\\["'\\nrt])*'/
INTEGER: /-?(0|[1-9][0-9]{0,18})/
NUMBER: /-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,2})?/
"""


def _python_calls(functions: Functions, more: str, lines: bool = False) -> CallGrammar:
    """``[f(a=1, b="x"), g()]``: arguments by their names, in the order of the schema."""
    rules, names = [_PYTHON_VALUES], []
    for i, function in enumerate(functions):
        schema = parameters_of(function)
        properties, required = schema.get("properties") or {}, set(schema.get("required") or ())
        usable = {name: _python_value(value) for name, value in properties.items() if _IDENTIFIER.fullmatch(name)}
        if not _DOTTED.fullmatch(function["name"]) or not required <= usable.keys():
            continue  # not expressible as a Python call
        names.append(f"call{i}")
        rules.append(f'call{i}: "{function["name"]}(" args{i} ")"')
        arguments = [(f'"{name}=" ({value})', name in required) for name, value in usable.items()]
        firsts = []
        for j, (argument, is_required) in enumerate(arguments):
            others = [f'(", " {a})' + ("" if needed else "?") for a, needed in arguments[j + 1 :]]
            firsts.append(" ".join([argument, *others]))
            if is_required:
                break
        else:
            firsts.append('""')
        rules.append(f"args{i}: " + " | ".join(firsts))
    if not names:
        raise FieldError("tools must have Python identifiers as names for this model; rename them", "tools")
    rules.append("call: " + " | ".join(names))
    if lines:
        return CallGrammar(f'("\\n" call){more} "\\n"', {}, "\n".join(rules))
    repeated = '(", " call)*' if more else ""
    return CallGrammar(f'"[" call {repeated} "]"', {}, "\n".join(rules))


def _python_value(schema: Any) -> str:
    """Lark for a value of this schema; any value if the schema is more than this understands."""
    if not isinstance(schema, dict):
        return "value"
    options = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(options, list) and options and all(isinstance(option, (str, int, float)) for option in options):
        return " | ".join(json.dumps(_python_literal(option)) for option in options)
    simple = {
        "string": "STRING",
        "integer": "INTEGER",
        "number": "NUMBER",
        "boolean": '"True" | "False"',
        "null": '"None"',
        "object": "dict",
    }
    kinds = schema.get("type")
    if isinstance(kinds, list) and kinds and all(kind in simple for kind in kinds):
        return " | ".join(simple[kind] for kind in kinds)
    if kinds == "array":
        item = _python_value(schema.get("items"))
        return f'"[" (({item}) (", " ({item}))*)? "]"'
    return simple.get(kinds, "value") if isinstance(kinds, str) else "value"


def _python_literal(value: str | int | float) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


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
