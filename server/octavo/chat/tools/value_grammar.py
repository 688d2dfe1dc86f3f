"""Grammars of calls whose values are spelled neither as JSON nor as bare text. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from octavo.chat.structured import TokenId, lark_of
from octavo.chat.tools.call_frames import Calls, Member
from octavo.chat.tools.formats.row import Elements, Format, Python, Typed
from octavo.chat.tools.parsers.values import kinds_of
from octavo.chat.tools.scalars import BOUNDS, NUMBERS, OF_ANY, bounded, integer_and_number, parameters_of, takes_any
from octavo.errors import FieldError

_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_RULES = {"integer": "int", "number": "num", "boolean": "bool", "null": "null"}
MAX_DEPTH = 12  # of a schema; what is deeper may be any value

_SAID = {
    "type": frozenset({"type", "enum", "const", *OF_ANY}),
    "array": frozenset({"items"}),
    **dict.fromkeys(NUMBERS, BOUNDS),
    "object": frozenset({"properties", "required", "additionalProperties", "$schema", "$defs"}),
}


def keeps_values(kind: Typed | Elements | Python, schema: Any, depth: int = 0) -> bool:
    """True if the grammar of values in a spelling of its own holds all that a schema demands."""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return False
    if isinstance(several := alternatives_of(schema), list):
        apart = isinstance(kind, Typed | Python) or _are_apart(several)
        return apart and all(keeps_values(kind, one, depth + 1) for one in several)
    scalar = "enum" in schema or "const" in schema
    kinds = schema.get("type", "string" if scalar else None)
    if not isinstance(kinds, str) or not schema.keys() <= _SAID["type"] | _SAID.get(kinds, frozenset()):
        return False
    options = [schema["const"]] if "const" in schema else schema.get("enum", [])
    if any(isinstance(option, dict | list) for option in options):
        return False
    if scalar:
        return True
    if kinds == "array":
        return "items" not in schema or keeps_values(kind, schema["items"], depth + 1)
    if kinds != "object":
        return True
    properties = schema.get("properties") or {}
    if depth and not isinstance(kind, Elements) and is_open(schema):
        return True
    closed = schema.get("additionalProperties") is False or depth == 0  # arguments are those that are named
    written = all(_writable(kind, key, depth) for key in properties)
    return closed and written and all(keeps_values(kind, value, depth + 1) for value in properties.values())


def alternatives_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """The schemas of which a value keeps to one, where its schema says no more; None where it says one thing."""
    for key in ("anyOf", "oneOf"):
        if schema.keys() <= {key, *OF_ANY} and isinstance(several := schema.get(key), list) and several:
            return several
    kinds = schema.get("type")
    if not isinstance(kinds, list) or not kinds or not all(isinstance(kind, str) for kind in kinds):
        return None
    if "enum" not in schema and "const" not in schema:
        said = {name for kind in kinds for name in _SAID.get(kind, ())}
        return [
            {name: schema[name] for name in schema if name not in said or name in _SAID.get(kind, ())} | {"type": kind}
            for kind in dict.fromkeys(kinds)
        ]
    return None


def _are_apart(several: Iterable[Any]) -> bool:
    """True if what is written without quotes is one of these values as it is read: a text that looks like a number is
    one."""
    schemas = [one for one in several if isinstance(one, Mapping)]
    if all(one.get("type", "string") != "string" for one in schemas):
        return True
    return all(one.get("type") in ("string", *_RULES) and one.keys() <= {"type", *OF_ANY} for one in schemas)


def is_open(schema: Mapping[str, Any]) -> bool:
    """True if a schema of objects says nothing of their properties."""
    return schema.get("additionalProperties", True) is True and not schema.keys() & {"properties", "required"}


def _writable(kind: Typed | Elements | Python, key: str, depth: int) -> bool:
    if isinstance(kind, Python):
        return depth > 0 or key.isidentifier()
    return _KEY.fullmatch(key) is not None


def with_any_start(written: Sequence[tuple[str, bool]], comma: str) -> str:
    """Lark for members in order, of each its Lark and whether it is required."""
    firsts = []
    for at, (member, needed) in enumerate(written):
        others = [f"({json.dumps(comma)} {other})" + ("" if wanted else "?") for other, wanted in written[at + 1 :]]
        firsts.append(" ".join([member, *others]))
        if needed:
            return " | ".join(firsts)
    return " | ".join([*firsts, '""'])


class Values:
    """Lark for values by their schemas."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self.parameters = parameters

    def value(self, schema: Any, depth: int = 0) -> str:
        """Lark for a value; any value where the schema says more than this understands."""
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
            return "value"
        if isinstance(several := alternatives_of(schema), list):
            return " | ".join(self.value(one, depth + 1) for one in several)
        options = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(options, list) and options and not any(isinstance(option, dict | list) for option in options):
            return " | ".join(self.literal(option) for option in options)
        kinds = kinds_of(schema, self.parameters)
        if not kinds:
            return "value"
        return " | ".join(self.of_kind(kind, schema, depth) for kind in sorted(kinds))

    def of_kind(self, kind: str, schema: Mapping[str, Any], depth: int) -> str:
        """Lark for a value of one of JSON's kinds."""
        if kind in NUMBERS and schema.keys() & BOUNDS:
            return bounded(kind, schema)
        if kind in _RULES:
            return _RULES[kind]
        if kind == "array":
            return self.items(f"({self.value(schema.get('items'), depth + 1)})")
        if kind == "object":
            return self.members(schema, depth + 1)
        return "text"

    def literal(self, value: Any) -> str:
        """Lark for one value."""
        raise NotImplementedError

    def items(self, item: str) -> str:
        """Lark for a list."""
        raise NotImplementedError

    def members(self, schema: Mapping[str, Any], depth: int) -> str:
        """Lark for an object."""
        raise NotImplementedError

    def properties(self, schema: Mapping[str, Any]) -> Iterable[tuple[str, Any, bool]]:
        """The properties that can be written. Raises FieldError if a required one cannot."""
        required = set(schema.get("required") or ())
        properties = schema.get("properties") or {}
        if bad := next((key for key in required if not _KEY.fullmatch(key)), None):
            raise FieldError(
                f"tools must have arguments with names of letters for this model, got {bad!r}; rename it", "tools"
            )
        return [(key, value, key in required) for key, value in properties.items() if _KEY.fullmatch(key)]


def _scalars(row: Format) -> str:
    """Rules for values that are no text, list or object."""
    integer, number = integer_and_number(row)
    yes, no, none = map(json.dumps, row.spaces.words)
    return f"int: {integer}\nnum: {number}\nbool: {yes} | {no}\nnull: {none}"


class _TypedValues(Values):
    def __init__(self, parameters: Mapping[str, Any], quote: str, words: Sequence[str]) -> None:
        super().__init__(parameters)
        self.quote, self.words = quote, words

    def literal(self, value: Any) -> str:
        if value is None or isinstance(value, bool):
            return _quoted(self.words[(True, False, None).index(value)])
        return f"{self.quote} {_quoted(value)} {self.quote}" if isinstance(value, str) else _quoted(json.dumps(value))

    def items(self, item: str) -> str:
        return f'"[" ({item} ("," {item})*)? "]"'

    def members(self, schema: Mapping[str, Any], depth: int) -> str:
        written = [(f'"{key}:" ({self.value(value, depth)})', needed) for key, value, needed in self.properties(schema)]
        written.sort()  # as the templates sort them
        if not written:
            if takes_any(schema):
                return "object"
            return '"{}"' if schema.get("additionalProperties") is False or depth == 0 else "object"
        return f'"{{" ({with_any_start(written, ",")}) "}}"'


def typed_calls(row: Format, functions: list[dict[str, Any]], token_id: TokenId) -> Calls:
    """``<|tool_call>call:f{k:<|"|>text<|"|>}<tool_call|>``. Raises FieldError."""
    assert isinstance(row.arguments, Typed)
    quote = lark_of(row.arguments.quote, token_id)
    rules = [
        _scalars(row),
        "value: text | num | bool | null | list | object",
        'list: "[" (value ("," value)*)? "]"',
        'object: "{" (member ("," member)*)? "}"',
        'member: /[A-Za-z_][A-Za-z0-9_]{0,63}/ ":" value',
        _text_rule("text", quote, row.arguments.quote, opening=quote),
    ]
    members = []
    for i, function in enumerate(functions):
        schema = parameters_of(function)
        rules.append(f"arguments{i}: {_TypedValues(schema, quote, row.spaces.words).members(schema, 0)}")
        members.append(Member(row.call + row.header, function["name"], f"arguments{i}", row.call_end))
    return Calls(members, rules=rules)


class _ElementValues(Values):
    def __init__(self, parameters: Mapping[str, Any], mark: str, writes_null: bool) -> None:
        super().__init__(parameters)
        self.mark, self.writes_null = mark, writes_null

    def literal(self, value: Any) -> str:
        text = value if isinstance(value, str) else "" if value is None else json.dumps(value)
        return _quoted(text)

    def items(self, item: str) -> str:
        return f'({self.mark} "<item>" {item} {self.mark} "</item>")*'

    def of_kind(self, kind: str, schema: Mapping[str, Any], depth: int) -> str:
        return '""' if kind == "null" else super().of_kind(kind, schema, depth)

    def members(self, schema: Mapping[str, Any], depth: int) -> str:
        written = []
        for key, value, needed in self.properties(schema):
            own = value if needed or self.writes_null else _without_null(value)
            if own is not None:
                element = f'({self.mark} "<{key}>" ({self.value(own, depth)}) {self.mark} "</{key}>")'
                written.append(element + ("" if needed else "?"))
        return " ".join(written) or ("elements" if takes_any(schema) else '""')


def _without_null(schema: Any) -> Any:
    """The schema of values that are not null; None if it has no others."""
    if not isinstance(schema, Mapping):
        return schema
    if schema.get("type") == "null":
        return None
    if isinstance(several := alternatives_of(schema), list):
        kept = [own for one in several if (own := _without_null(one)) is not None]
        return {"anyOf": kept} if kept else None
    if isinstance(options := schema.get("enum"), list):
        return {**schema, "enum": kept} if (kept := [one for one in options if one is not None]) else None
    return schema


def element_calls(row: Format, functions: list[dict[str, Any]], token_id: TokenId) -> Calls:
    """Calls whose arguments are nested tags. Raises FieldError."""
    assert isinstance(row.arguments, Elements)
    mark = lark_of(row.arguments.mark, token_id)
    any_text = r"/(.|\n)*/" if mark.startswith("<[") else r"/[^\]]*/"
    name = "[A-Za-z_][A-Za-z0-9_.-]{0,63}"
    rules = [
        _scalars(row),
        "value: text",
        f"text: {any_text}",
        "elements: element*",
        f"element: {mark} /<{name}>/ (text | element+) {mark} /<\\/{name}>/",
    ]
    members = []
    for i, function in enumerate(functions):
        schema = parameters_of(function)
        rules.append(f"arguments{i}: {_ElementValues(schema, mark, row.spaces.writes_null).members(schema, 0)}")
        members.append(Member(row.call + row.header, function["name"], f"arguments{i}", row.call_end))
    return Calls(members, rules=rules)


def _text_rule(name: str, closing: str, end: str, opening: str = "") -> str:
    """A rule for free text up to its end, which is a token or a text."""
    if closing.startswith("<["):  # a text never holds a token
        return rf"{name}: {opening} /(.|\n)*/ {closing}"
    return f"{name}: {opening} {name}_rest\n{name}_rest[suffix={json.dumps(end)}]: /(.|\\n)*/"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
