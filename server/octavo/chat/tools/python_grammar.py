"""Grammars of calls as Python writes them. Pure."""

from __future__ import annotations

import json
import re
from typing import Any

from octavo.chat.structured import CallGrammar, TokenId, lark_of
from octavo.chat.tools.formats.row import Format, Python
from octavo.chat.tools.tagged_grammar import BOUNDS, NUMBERS, bounded, integer_and_number, parameters_of, takes_any
from octavo.errors import FieldError

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DOTTED = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_DOUBLE = r'/"([^"\\\n]|\\["\'\\nrt])*"/'
_SINGLE = r"/'([^'\\\n]|\\[\"'\\nrt])*'/"
_JSON = r'/"([^"\\\x00-\x1f]|\\["\\nrt])*"/'
# As Python's repr writes texts: between double quotes where they hold single ones alone.
_ONE, _OTHER = r"([^'\\\x00-\x1f]|\\[\\nrt])", r"""([^"\\\x00-\x1f]|\\[\\nrt])"""
_BOTH = r"([^'\\\x00-\x1f]|\\['\\nrt])*"
_REPR = rf"""/'{_ONE}*'/ | /"{_OTHER}*'{_OTHER}*"/ | /'{_BOTH}(\\'{_BOTH}"|"{_BOTH}\\'){_BOTH}'/"""
_PYTHON_VALUES = r"""
NAMED: /[A-Za-z_][A-Za-z0-9_]{0,63}=/
value: STRING | NUMBER | bool | none | list | dict
list: "[" (value (", " value)*)? "]"
dict: "{" (STRING ": " value (", " STRING ": " value)*)? "}"
"""


def is_python_name(name: str) -> bool:
    """True if Python can call a function of this name."""
    return _DOTTED.fullmatch(name) is not None


def python_calls(row: Format, functions: list[dict[str, Any]], several: bool, token_id: TokenId) -> CallGrammar:
    """``[f(a=1, b="x"), g()]``: arguments by their names, in the order of the schema. Raises FieldError."""
    kind = row.arguments
    assert isinstance(kind, Python)
    rules, names = [_PYTHON_VALUES + "\n".join(f"{name}: {lark}" for name, lark in _words(row).items())], []
    for i, function in enumerate(functions):
        schema = parameters_of(function)
        properties, required = schema.get("properties") or {}, set(schema.get("required") or ())
        usable = {name: _python_value(value, row) for name, value in properties.items() if _IDENTIFIER.fullmatch(name)}
        if not is_python_name(function["name"]) or not required <= usable.keys():
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
        if takes_any(schema):
            firsts.append('NAMED value (", " NAMED value)*')
        rules.append(f"args{i}: " + " | ".join(firsts))
    if not names:
        raise FieldError("tools must have Python identifiers as names for this model; rename them", "tools")
    rules.append("call: " + " | ".join(names))
    begin, end = (lark_of(mark, token_id) for mark in row.around)
    more = ("+" if kind.lines else ' (", " call)*') if several else ""
    calls = f'("\\n" call){more} "\\n"' if kind.lines else f'"[" call{more} "]"'
    return CallGrammar(f"({begin} {calls} {end})", {}, "\n".join(rules))


def _words(row: Format) -> dict[str, str]:
    """Lark for texts and for Python's words, in the template's spelling where that is known."""
    as_json = isinstance(row.arguments, Python) and row.arguments.as_json
    text = _JSON if as_json else f"{_DOUBLE} | {_SINGLE}" if row.gaps is None else _REPR
    words = ("true", "false", "null") if as_json else ("True", "False", "None")
    yes, no, none = map(json.dumps, words)
    integer, number = integer_and_number(row)
    return {"STRING": text, "INTEGER": integer, "NUMBER": number, "bool": f"{yes} | {no}", "none": none}


def _python_value(schema: Any, row: Format) -> str:
    """Lark for a value of this schema; any value if the schema is more than this understands."""
    if not isinstance(schema, dict):
        return "value"
    options = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(options, list) and options and all(isinstance(option, (str, int, float)) for option in options):
        return " | ".join(json.dumps(literal) for option in options for literal in _literals(option, row))
    simple = {
        "string": "STRING",
        "integer": "INTEGER",
        "number": "NUMBER",
        "boolean": "bool",
        "null": "none",
        "object": "dict",
    }
    kinds = schema.get("type")
    if kinds in NUMBERS and schema.keys() & BOUNDS:
        return bounded(kinds, schema)
    if isinstance(kinds, list) and kinds and all(kind in simple for kind in kinds):
        return " | ".join(simple[kind] for kind in kinds)
    if kinds == "array":
        item = _python_value(schema.get("items"), row)
        return f'"[" (({item}) (", " ({item}))*)? "]"'
    return simple.get(kinds, "value") if isinstance(kinds, str) else "value"


def _literals(value: str | int | float, row: Format) -> list[str]:
    as_json = isinstance(row.arguments, Python) and row.arguments.as_json
    own, other = repr(value), json.dumps(value, ensure_ascii=False)
    if as_json:
        return [other]
    return sorted({own, other}) if row.gaps is None and isinstance(value, str) else [own]
