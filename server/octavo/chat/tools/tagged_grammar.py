"""Grammars of calls whose arguments stand between tags, as bare text. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.chat.structured import TokenId, lark_of
from octavo.chat.tools.call_frames import Calls, Member, lark_of_gap
from octavo.chat.tools.formats.row import JSON_WORDS, Format, Params
from octavo.chat.tools.parsers.values import kinds_of
from octavo.errors import FieldError
from octavo.interface.json_schema import moved

_OF_OBJECTS = {"type", "properties", "required", "additionalProperties", "description", "title", "$defs", "$schema"}
_OF_TEXTS = {"type", "enum", "const", "maxLength", "description", "title", "default", "examples"}
NUMBERS = ("integer", "number")
BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_OF_ANY = ("description", "title", "default", "examples")
_WORDED = {"boolean": (0, 1), "null": (2,)}  # the places of their words
_WRITABLE = re.compile(r"[^<>\"\s=]+")


def parameters_of(function: dict[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments, which are always an object."""
    schema = function.get("parameters")
    if not schema:
        return {"type": "object", "additionalProperties": False}
    return schema if "type" in schema or "$ref" in schema else {"type": "object", **schema}


def takes_any(schema: Any) -> bool:
    """True if a schema says nothing of an object's properties, and allows them."""
    return schema.get("additionalProperties") is True and not schema.get("properties") and not schema.get("required")


def integer_and_number(row: Format) -> tuple[str, str]:
    """Lark for an integer and a number: as a template writes them, which is as Python does, or in any way of JSON where
    the template is unknown."""
    if row.gaps is None:
        return "/-?(0|[1-9][0-9]{0,18})/", r"/-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,2})?/"
    large = r"-?[1-9][0-9]{0,7}\.(0|[0-9]{0,6}[1-9])|-?[1-9][0-9]{8,10}\.(0|[0-9]{0,3}[1-9])"
    small = r"0\.0|-?0\.0{0,3}[1-9]([0-9]{0,9}[1-9])?"
    exponent = r"-?[1-9](\.[0-9]{0,8}[1-9])?e(-(0[5-9]|[1-9][0-9])|\+(1[6-9]|[2-9][0-9]))"
    return "/0|-?[1-9][0-9]{0,18}/", f"/0|-?[1-9][0-9]{{0,14}}|{large}|{small}|{exponent}/"


def bounded(kind: str, schema: Mapping[str, Any]) -> str:
    """Lark for a number within the limits of its schema."""
    return "%json " + json.dumps({"type": kind, **{name: schema[name] for name in sorted(schema.keys() & BOUNDS)}})


def keeps_schema(tags: Params, schema: dict[str, Any]) -> bool:
    """True if the grammar of these tags holds all that a tool's schema demands: what it does not know is in texts."""
    properties = schema.get("properties") or {}
    if not schema.keys() <= _OF_OBJECTS or schema.get("additionalProperties", False) is not False:
        return False
    if not (properties or schema.get("additionalProperties") is False):
        return False
    for key, value in properties.items():
        kinds = kinds_of(value, schema)
        if not _WRITABLE.fullmatch(key) or not isinstance(value, dict):
            return False
        if kinds == {"string"} and not value.keys() <= _OF_TEXTS:
            return False
        if kinds != {"string"} and not tags.kind_end and (not kinds or "string" in kinds):
            return False  # quotes around a text would be read as its own
    return True


def tagged_calls(
    row: Format, functions: list[dict[str, Any]], token_id: TokenId, grammar: Callable[[dict[str, Any]], str]
) -> Calls:
    """Calls with the arguments in the order of the schema. Raises FieldError for required arguments whose names cannot
    stand in a tag."""
    rules: list[str] = []
    parts: dict[str, str] = {}
    members = []
    for i, function in enumerate(functions):
        schema = parameters_of(function)
        required = set(schema.get("required") or ())
        written = _Values(row, schema, token_id, grammar, rules, parts)
        arguments = []
        for j, (key, value) in enumerate((schema.get("properties") or {}).items()):
            if _WRITABLE.fullmatch(key):
                rules.append(f"argument{i}_{j}: {written.argument(key, value, f'{i}_{j}')}")
                arguments.append((f"argument{i}_{j}", key in required))
            elif key in required:
                raise FieldError(
                    f"tools must have arguments with names of letters for this model, got {key!r}; rename it", "tools"
                )
        in_order = _in_order(row, arguments, token_id)
        if takes_any(schema):
            rules.append(f"anything{i}: {written.any_argument(str(i))}")
            in_order = _repeated(row, f"anything{i}", token_id)
        rules.append(f"arguments{i}: {in_order}")
        name = row.attribute(function["name"])
        members.append(Member(row.call + row.header, name, f"arguments{i}", row.call_end, row.addressed))
    return Calls(members, parts, rules)


def _in_order(row: Format, arguments: list[tuple[str, bool]], token_id: TokenId) -> str:
    """Lark for arguments, of each its rule and whether it is required; for none where none is."""
    named, bare, after, ended = (lark_of_gap(row, name, token_id) for name in ("named", "bare", "after", "ended"))
    if not arguments:
        return bare or '""'
    firsts = []
    for j, (rule, needed) in enumerate(arguments):
        others = (f"({after} {other})" + ("" if wanted else "?") for other, wanted in arguments[j + 1 :])
        firsts.append(" ".join([named, rule, *others, ended]))
        if needed:
            return " | ".join(firsts)
    return " | ".join([*firsts, bare or '""'])


def _repeated(row: Format, rule: str, token_id: TokenId) -> str:
    """Lark for any number of arguments of one rule."""
    named, bare, after, ended = (lark_of_gap(row, name, token_id) for name in ("named", "bare", "after", "ended"))
    return f"{named} {rule} ({after} {rule})* {ended} | " + (bare or '""')


@dataclass(frozen=True)
class _Values:
    """Lark for the arguments of a function."""

    row: Format
    schema: dict[str, Any]
    token_id: TokenId
    grammar: Callable[[dict[str, Any]], str]
    rules: list[str]
    parts: dict[str, str]

    def argument(self, key: str, value: Any, named: str) -> str:
        """Lark for an argument with its tags."""
        tags = self.row.arguments
        assert isinstance(tags, Params)
        kinds = kinds_of(value, self.schema)
        key_end = tags.key_end + (_kind(tags, kinds) + tags.kind_end if tags.kind_end else "")
        trimmed = "\n" if tags.trims else ""
        lead = f"{self._text(tags.key + self.row.attribute(key) + key_end)} {self._before_value(tags)}"
        end = self._text(trimmed + tags.value_end)
        if kinds != {"string"}:
            step = key.replace("~", "~0").replace("/", "~1")
            words, rest = self._worded(value, {"$ref": f"#/$defs/tool/properties/{step}"})
            if rest is not None:
                definitions = {"tool": moved(self.schema, "#/$defs/tool")}
                self.parts[f"value{named}"] = self.grammar({**rest, "$defs": definitions})
                words.append(f"@value{named}")
            return f"{lead} ({' | '.join(words)}) {end}"
        options = [value["const"]] if "const" in value else value.get("enum")
        if isinstance(options, list):
            either = " | ".join(json.dumps(option, ensure_ascii=False) for option in options)
            return f"{lead} ({either}) {end}"
        most = value.get("maxLength")
        return f"{lead} {self._free_text(tags, named, f'{{0,{most}}}' if isinstance(most, int) else '*')}"

    def _worded(self, value: Any, own: dict[str, Any]) -> tuple[list[str], dict[str, Any] | None]:
        """Lark for true, false and null, where a value may be one of these and the template writes them as Python does,
        and the schema of other values, if there are any. ``own`` is that of all."""
        if (words := self.row.spaces.words) == JSON_WORDS:
            return [], own
        if value.keys() <= {"type", "items", "properties", *_OF_ANY, *BOUNDS}:
            told = value.get("type", [])
            kinds = {told} if isinstance(told, str) else {*told}
            others = sorted(kinds - _WORDED.keys())
            rest = {"allOf": [own, {"type": others}]} if others else None
        elif value.keys() <= {"anyOf", *_OF_ANY}:
            plain = [one.get("type") if one.keys() <= {"type", *_OF_ANY} else None for one in value["anyOf"]]
            kinds = {one for one in plain if isinstance(one, str)}
            places = [at for at, one in enumerate(plain) if one not in ("boolean", "null")]
            rest = {"anyOf": [{"$ref": f"{own['$ref']}/anyOf/{at}"} for at in places]} if places else None
        else:
            return [], own
        if not kinds & _WORDED.keys():
            return [], own
        return [json.dumps(words[at]) for kind in sorted(kinds & _WORDED.keys()) for at in _WORDED[kind]], rest

    def any_argument(self, named: str) -> str:
        """Lark for an argument of any name and value."""
        tags = self.row.arguments
        assert isinstance(tags, Params)
        key = [self._text(tags.key), '/[^<>"\\s=]+/', self._text(tags.key_end)]
        kind = ["/[a-z]+/", self._text(tags.kind_end)] if tags.kind_end else []
        return " ".join([*key, *kind, self._before_value(tags), self._free_text(tags, f"_any{named}", "*")])

    def _before_value(self, tags: Params) -> str:
        trimmed = "\n" if tags.trims else ""
        if not tags.value:
            return self._text(trimmed)
        return f"{lark_of_gap(self.row, 'valued', self.token_id)} {self._text(tags.value + trimmed)}"

    def _free_text(self, tags: Params, named: str, length: str) -> str:
        """The rule for a text and its end, which it makes."""
        trimmed = "\n" if tags.trims else ""
        closing = self._text(tags.value_end)
        if tags.cdata and self.row.gaps is not None and length == "*":
            self.rules.append(f'text{named}: /[^<&\\n]*/ {closing} | "<![CDATA[" cdata{named}')
            self.rules.append(f'cdata{named}[suffix="]]>{tags.value_end}"]: /(.|\\n)*[<&\\n](.|\\n)*/')
            return f"text{named}"
        if closing.startswith("<["):  # a text never holds a token
            before = "\\n" if tags.trims else ""
            self.rules.append(f"text{named}: /(.|\\n){length}{before}/ {closing}")
        else:
            self.rules.append(f"text{named}[suffix={json.dumps(trimmed + tags.value_end)}]: /(.|\\n){length}/")
        return f"text{named}"

    def _text(self, literal: str) -> str:
        return lark_of(literal, self.token_id)


def _kind(tags: Params, kinds: set[str]) -> str:
    """The word for a value's kind."""
    if kinds == {"string"}:
        return tags.text_kind
    if tags.text_kind == "true":
        return "false"
    return min(kinds - {"null", "string"}, default="object").replace("integer", "number")
