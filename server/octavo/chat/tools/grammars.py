"""JSON schemas and grammars of tool calls, so that output can be parsed into calls. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from octavo.chat.structured import CallGrammar, Constraint, quoted
from octavo.chat.tools.parsers import ToolParser
from octavo.chat.tools.parsers.cohere import CohereParser
from octavo.chat.tools.parsers.deepseek import MarkedJsonParser
from octavo.chat.tools.parsers.harmony import HarmonyParser
from octavo.chat.tools.parsers.hermes import GraniteParser, HermesParser, HunyuanParser, NemotronV2Parser
from octavo.chat.tools.parsers.llama3 import Llama3JsonParser
from octavo.chat.tools.parsers.mistral import MistralParser
from octavo.chat.tools.parsers.pythonic import Lfm2Parser
from octavo.chat.tools.parsers.tagged import TaggedParser
from octavo.chat.tools.tagged_grammar import lark_of, parameters_of, tagged_calls
from octavo.errors import FieldError
from octavo.interface.json_schema import moved
from octavo.interface.structured_output import StructuredOutputsParams


def call_grammar(
    parser: type[ToolParser],
    functions: list[dict[str, Any]],
    max_calls: int | None,
    token_id: Callable[[str], int | None],
    strict: bool = True,
) -> CallGrammar:
    """The grammar of calls in a parser's format. Raises FieldError.

    ``token_id`` gives the id of a text that is one token of the vocabulary, else None. ``strict`` as for `to_grammar`.
    """

    def grammar(schema: dict[str, Any]) -> str:
        return constraint_of(schema, "tools").grammar(strict)

    more = "" if max_calls == 1 else "+"
    if issubclass(parser, TaggedParser):
        return tagged_calls(parser.TAGS, functions, more, token_id, grammar)
    if issubclass(parser, (HunyuanParser, NemotronV2Parser, GraniteParser)):
        end = "" if issubclass(parser, GraniteParser) else f" /\\n?/ {{{parser.END}}}"
        calls = {"calls": grammar(any_call(functions, max_calls, "arguments"))}
        return CallGrammar(f"({{{parser.BEGIN}}} /\\n?/ @calls{end})", calls)
    if issubclass(parser, HermesParser):
        rule = rf"(/\n?/ {{<tool_call>}} /\n?/ @call /\n?/ {{</tool_call>}}){more}"
        return CallGrammar(rule, {"call": grammar(_one_call(functions, "arguments"))})
    if issubclass(parser, CohereParser):
        calls = {"calls": grammar(any_call(functions, max_calls, "parameters", "tool_name"))}
        return CallGrammar(f"({{{parser.BEGIN}}} @calls {{{parser.END}}})", calls)
    if issubclass(parser, MarkedJsonParser):
        named = [
            f"{lark_of(parser.CALL + f['name'] + parser.HEADER, token_id)} @args{i} "
            f"{lark_of(parser.FOOTER + parser.CALL_END, token_id)}"
            for i, f in enumerate(functions)
        ]
        begin, end = (lark_of(mark, token_id) for mark in parser.SECTION)
        arguments = {f"args{i}": grammar(parameters_of(function)) for i, function in enumerate(functions)}
        return CallGrammar(f"({begin} ({' | '.join(named)}){more} {end})", arguments)
    if issubclass(parser, HarmonyParser):  # a call ends the answer
        to = [
            f'{quoted(" to=functions." + f["name"] + " ")} {{<|constrain|>}} "json" {{<|message|>}} @args{i}'
            for i, f in enumerate(functions)
        ]
        rule = f'({{<|channel|>}} "commentary" ({" | ".join(to)}) {{<|call|>}})'
        return CallGrammar(rule, {f"args{i}": grammar(parameters_of(f)) for i, f in enumerate(functions)})
    if issubclass(parser, Llama3JsonParser):
        return CallGrammar(f"(@call /(; )?/){more}", {"call": grammar(_one_call(functions, "parameters"))})
    if issubclass(parser, Lfm2Parser):
        calls_in_python = _python_calls(functions, more)
        rule = f"({{{parser.START}}} {calls_in_python.rule} {{{parser.END}}})"
        return CallGrammar(rule, {}, calls_in_python.rules)
    if not issubclass(parser, MistralParser):
        return _python_calls(functions, more)
    if token_id("[ARGS]") is None:
        return CallGrammar("{[TOOL_CALLS]} @calls", {"calls": grammar(any_call(functions, max_calls, "arguments"))})
    named = [f"{quoted(function['name'])} {{[ARGS]}} @args{i}" for i, function in enumerate(functions)]
    arguments = {f"args{i}": grammar(parameters_of(function)) for i, function in enumerate(functions)}
    return CallGrammar(f"({{[TOOL_CALLS]}} ({' | '.join(named)})){more}", arguments)


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


def _python_calls(functions: list[dict[str, Any]], more: str) -> CallGrammar:
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
    call = _one_call(functions, key, name_key)
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
