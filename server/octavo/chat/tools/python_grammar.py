"""Grammars of calls as Python writes them. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from octavo.chat.structured import CallGrammar, TokenId, lark_of
from octavo.chat.tools.formats.row import JSON_WORDS, PYTHON_WORDS, Format, Python
from octavo.chat.tools.scalars import integer_and_number, parameters_of, takes_any
from octavo.chat.tools.value_grammar import Values, is_open, with_any_start
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
_ANY_VALUES = r"""
value: text | num | bool | null | list | object
list: "[" (value (", " value)*)? "]"
object: "{" (text ": " value (", " text ": " value)*)? "}"
"""
_NAMED = "NAMED: /[A-Za-z_][A-Za-z0-9_]{0,63}=/\n"


def is_python_name(name: str) -> bool:
    """True if Python can call a function of this name."""
    return _DOTTED.fullmatch(name) is not None


def python_calls(row: Format, functions: list[dict[str, Any]], several: bool, token_id: TokenId) -> CallGrammar:
    """``[f(a=1, b="x"), g()]``: arguments by their names, in the order of the schema. Raises FieldError."""
    kind = row.arguments
    assert isinstance(kind, Python)
    rules, names = [_NAMED + python_rules(row)], []
    for i, function in enumerate(functions):
        schema = parameters_of(function)
        properties, required = schema.get("properties") or {}, set(schema.get("required") or ())
        values = PythonValues(schema, row)
        usable = {name: values.value(value) for name, value in properties.items() if _IDENTIFIER.fullmatch(name)}
        if not is_python_name(function["name"]) or not required <= usable.keys():
            continue  # not expressible as a Python call
        names.append(f"call{i}")
        rules.append(f'call{i}: "{function["name"]}(" args{i} ")"')
        arguments = [(f'"{name}=" ({value})', name in required) for name, value in usable.items()]
        firsts = with_any_start(arguments, ", ")
        if takes_any(schema):
            firsts += ' | NAMED value (", " NAMED value)*'
        rules.append(f"args{i}: {firsts}")
    if not names:
        raise FieldError("tools must have Python identifiers as names for this model; rename them", "tools")
    rules.append("call: " + " | ".join(names))
    begin, end = (lark_of(mark, token_id) for mark in row.around)
    more = ("+" if kind.lines else ' (", " call)*') if several else ""
    calls = f'("\\n" call){more} "\\n"' if kind.lines else f'"[" call{more} "]"'
    return CallGrammar(f"({begin} {calls} {end})", {}, "\n".join(rules))


def python_rules(row: Format) -> str:
    """Rules for values in Python, in the template's spelling where that is known."""
    as_json = _as_json(row)
    text = _JSON if as_json else f"{_DOUBLE} | {_SINGLE}" if row.gaps is None else _REPR
    words = JSON_WORDS if as_json else PYTHON_WORDS
    yes, no, none = map(json.dumps, words)
    integer, number = integer_and_number(row)
    rules = {"text": text, "int": integer, "num": number, "bool": f"{yes} | {no}", "null": none}
    return _ANY_VALUES + "\n".join(f"{name}: {lark}" for name, lark in rules.items())


def _as_json(row: Format) -> bool:
    return isinstance(row.arguments, Python) and row.arguments.as_json


class PythonValues(Values):
    """Lark for values as Python writes them, beside `python_rules`."""

    def __init__(self, parameters: Mapping[str, Any], row: Format) -> None:
        super().__init__(parameters)
        self.row = row

    def literal(self, value: Any) -> str:
        """Lark for one value."""
        return " | ".join(json.dumps(text, ensure_ascii=False) for text in _literals(value, self.row))

    def items(self, item: str) -> str:
        """Lark for a list."""
        return f'"[" ({item} (", " {item})*)? "]"'

    def members(self, schema: Mapping[str, Any], depth: int) -> str:
        """Lark for an object, its keys in the order of the schema."""
        if is_open(schema):
            return "object"
        needed = set(schema.get("required") or ())
        properties = schema.get("properties") or {}
        written = [
            (f'({self.literal(key)}) ": " ({self.value(value, depth)})', key in needed)
            for key, value in properties.items()
        ]
        return f'"{{" ({with_any_start(written, ", ")}) "}}"'


def _literals(value: Any, row: Format) -> list[str]:
    own, other = repr(value), json.dumps(value, ensure_ascii=False)
    if _as_json(row):
        return [other]
    return sorted({own, other}) if row.gaps is None and isinstance(value, str) else [own]
