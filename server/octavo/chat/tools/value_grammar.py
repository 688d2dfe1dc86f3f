"""Grammars of calls whose values are spelled neither as JSON nor as bare text. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from octavo.chat.structured import CallGrammar, TokenId, lark_of
from octavo.chat.tools.formats.row import Elements, Format, Typed
from octavo.chat.tools.parsers.values import kinds_of
from octavo.chat.tools.tagged_grammar import parameters_of
from octavo.errors import FieldError

_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_SCALARS = r"""
int: /-?(0|[1-9][0-9]{0,18})/
num: /-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,2})?/
bool: "true" | "false"
null: "null"
"""
_RULES = {"integer": "int", "number": "num", "boolean": "bool", "null": "null"}
_MAX_DEPTH = 12  # of a schema; what is deeper may be any value


class _Values:
    """Lark for values by their schemas."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self.parameters = parameters

    def value(self, schema: Any, depth: int = 0) -> str:
        """Lark for a value; any value where the schema says more than this understands."""
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return "value"
        options = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(options, list) and options and not any(isinstance(option, dict | list) for option in options):
            return " | ".join(self.literal(option) for option in options)
        kinds = kinds_of(schema, self.parameters)
        if not kinds:
            return "value"
        return " | ".join(self.of_kind(kind, schema, depth) for kind in sorted(kinds))

    def of_kind(self, kind: str, schema: Mapping[str, Any], depth: int) -> str:
        """Lark for a value of one of JSON's kinds."""
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

    def _properties(self, schema: Mapping[str, Any]) -> Iterable[tuple[str, Any, bool]]:
        """The properties that can be written. Raises FieldError if a required one cannot."""
        required = set(schema.get("required") or ())
        properties = schema.get("properties") or {}
        if bad := next((key for key in required if not _KEY.fullmatch(key)), None):
            raise FieldError(
                f"tools must have arguments with names of letters for this model, got {bad!r}; rename it", "tools"
            )
        return [(key, value, key in required) for key, value in properties.items() if _KEY.fullmatch(key)]


class _TypedValues(_Values):
    def __init__(self, parameters: Mapping[str, Any], quote: str) -> None:
        super().__init__(parameters)
        self.quote = quote

    def literal(self, value: Any) -> str:
        return f"{self.quote} {_quoted(value)} {self.quote}" if isinstance(value, str) else _quoted(json.dumps(value))

    def items(self, item: str) -> str:
        return f'"[" ({item} ("," {item})*)? "]"'

    def members(self, schema: Mapping[str, Any], depth: int) -> str:
        written = [
            (f'"{key}:" ({self.value(value, depth)})', needed) for key, value, needed in self._properties(schema)
        ]
        written.sort()  # as the templates sort them
        if not written:
            return '"{}"' if schema.get("additionalProperties") is False or depth == 0 else "object"
        firsts = []
        for at, (member, needed) in enumerate(written):
            others = [f'("," {other})' + ("" if wanted else "?") for other, wanted in written[at + 1 :]]
            firsts.append(" ".join([member, *others]))
            if needed:
                break
        else:
            firsts.append('""')
        return f'"{{" ({" | ".join(firsts)}) "}}"'


def typed_calls(row: Format, functions: list[dict[str, Any]], more: str, token_id: TokenId) -> CallGrammar:
    """``<|tool_call>call:f{k:<|"|>text<|"|>}<tool_call|>``. Raises FieldError."""
    assert isinstance(row.arguments, Typed)
    quote = lark_of(row.arguments.quote, token_id)
    rules = [
        _SCALARS,
        "value: text | num | bool | null | list | object",
        'list: "[" (value ("," value)*)? "]"',
        'object: "{" (member ("," member)*)? "}"',
        'member: /[A-Za-z_][A-Za-z0-9_]{0,63}/ ":" value',
        _text_rule("text", quote, row.arguments.quote, opening=quote),
    ]
    for i, function in enumerate(functions):
        schema = parameters_of(function)
        begin = lark_of(row.call + row.header.replace("{name}", function["name"]), token_id)
        body = _TypedValues(schema, quote).members(schema, 0)
        rules.append(f"call{i}: {begin} {body} {lark_of(row.call_end, token_id)}")
    rules.append("call: " + " | ".join(f"call{i}" for i in range(len(functions))))
    return CallGrammar(f"(call{more})", {}, "\n".join(rules))


class _ElementValues(_Values):
    def __init__(self, parameters: Mapping[str, Any], mark: str) -> None:
        super().__init__(parameters)
        self.mark = mark

    def literal(self, value: Any) -> str:
        text = value if isinstance(value, str) else "" if value is None else json.dumps(value)
        return _quoted(text)

    def items(self, item: str) -> str:
        return f'({self.mark} "<item>" {item} {self.mark} "</item>")*'

    def of_kind(self, kind: str, schema: Mapping[str, Any], depth: int) -> str:
        return '""' if kind == "null" else super().of_kind(kind, schema, depth)

    def members(self, schema: Mapping[str, Any], depth: int) -> str:
        written = [
            f'({self.mark} "<{key}>" ({self.value(value, depth)}) {self.mark} "</{key}>")' + ("" if needed else "?")
            for key, value, needed in self._properties(schema)
        ]
        return " ".join(written) or '""'


def element_calls(row: Format, functions: list[dict[str, Any]], more: str, token_id: TokenId) -> CallGrammar:
    """Calls whose arguments are nested tags. Raises FieldError."""
    assert isinstance(row.arguments, Elements)
    mark = lark_of(row.arguments.mark, token_id)
    rules = [_SCALARS, "value: text", r"text: /[^\]]*/"]
    for i, function in enumerate(functions):
        schema = parameters_of(function)
        begin = lark_of(row.call + row.header.replace("{name}", function["name"]), token_id)
        body = _ElementValues(schema, mark).members(schema, 0)
        rules.append(f"call{i}: {begin} {body} {lark_of(row.call_end, token_id)}")
    rules.append("call: " + " | ".join(f"call{i}" for i in range(len(functions))))
    begin, end = (lark_of(part, token_id) for part in row.section)
    following = ' ("\\n" call)*' if more else ""
    return CallGrammar(f'({begin} "\\n" call{following} "\\n" {end})', {}, "\n".join(rules))


def _text_rule(name: str, closing: str, end: str, opening: str = "") -> str:
    """A rule for free text up to its end, which is a token or a text."""
    if closing.startswith("<["):  # a text never holds a token
        return rf"{name}: {opening} /(.|\n)*/ {closing}"
    return f"{name}: {opening} {name}_rest\n{name}_rest[suffix={json.dumps(end)}]: /(.|\\n)*/"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
