"""Grammars of calls whose arguments stand between tags, as bare text. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.chat.structured import TokenId, lark_of
from octavo.chat.tools.call_frames import Calls, Member, lark_of_gap
from octavo.chat.tools.formats.row import Format, Params, Python
from octavo.chat.tools.parsers.values import kinds_of
from octavo.chat.tools.python_grammar import PythonValues, python_rules
from octavo.chat.tools.scalars import parameters_of, takes_any
from octavo.chat.tools.unions import Branch, branches_of, options_of, tells_texts
from octavo.chat.tools.value_grammar import keeps_values
from octavo.chat.tools.value_sizes import Room, size_of_value
from octavo.errors import FieldError
from octavo.interface.json_schema import moved

_OF_OBJECTS = {"type", "properties", "required", "additionalProperties", "description", "title", "$defs", "$schema"}
_OF_TEXTS = {"type", "enum", "const", "maxLength", "description", "title", "default", "examples"}
_WORDED = {"boolean": (0, 1), "null": (2,)}  # the places of their words
_WRITABLE = re.compile(r"[^<>\"\s=]+")


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
        if kinds != {"string"} and (not kinds or "string" in kinds):
            branches = branches_of(value, "", schema)
            if branches is None and not tags.kind_end:
                return False  # quotes around a text would be read as its own
            if branches is not None and not tells_texts(branches, bool(tags.kind_end)):
                return False
    return True


def tagged_calls(
    row: Format, functions: list[dict[str, Any]], token_id: TokenId, grammar: Callable[[dict[str, Any]], str]
) -> Calls:
    """Calls with the arguments in the order of the schema. Raises FieldError for required arguments whose names cannot
    stand in a tag."""
    rules = [python_rules(row)] if row.spaces.python else []
    parts: dict[str, str] = {}
    room = Room()
    members = []
    for i, function in enumerate(functions):
        schema = parameters_of(function)
        required = set(schema.get("required") or ())
        written = _Values(row, schema, token_id, grammar, rules, parts, room)
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
    room: Room  # for values in Python

    def argument(self, key: str, value: Any, named: str) -> str:
        """Lark for an argument with its tags."""
        tags = self.row.arguments
        assert isinstance(tags, Params)
        branches = branches_of(
            value, "#/$defs/tool/properties/" + key.replace("~", "~0").replace("/", "~1"), self.schema
        )
        if branches is None or (kinds := {branch.kind for branch in branches}) == {"string"}:
            return self._plain_argument(key, value, named)
        if not tags.kind_end:
            return f"{self._lead(key, '')} ({self._either(branches, kinds, named)})"
        ways = [
            f"{self._lead(key, _kind(tags, {kind}))} ({self._either(some, {kind}, f'{named}_{kind}')})"
            for kind in sorted(kinds)
            if (some := [branch for branch in branches if branch.kind == kind])
        ]
        return f"({' | '.join(ways)})"

    def _lead(self, key: str, kind: str) -> str:
        """Lark for what stands in front of an argument's value."""
        tags = self.row.arguments
        assert isinstance(tags, Params)
        key_end = tags.key_end + (kind + tags.kind_end if tags.kind_end else "")
        return f"{self._text(tags.key + self.row.attribute(key) + key_end)} {self._before_value(tags)}"

    def _plain_argument(self, key: str, value: Any, named: str) -> str:
        """Lark for an argument that is a text, or of which nothing is understood."""
        tags = self.row.arguments
        assert isinstance(tags, Params)
        kinds = kinds_of(value, self.schema)
        lead = self._lead(key, _kind(tags, kinds) if tags.kind_end else "")
        end = self._text(("\n" if tags.trims else "") + tags.value_end)
        if kinds != {"string"}:
            step = key.replace("~", "~0").replace("/", "~1")
            return f"{lead} {self._json(named, {'$ref': f'#/$defs/tool/properties/{step}'})} {end}"
        options = [value["const"]] if "const" in value else value.get("enum")
        if isinstance(options, list):
            either = " | ".join(json.dumps(option, ensure_ascii=False) for option in options)
            return f"{lead} ({either}) {end}"
        return f"{lead} {self._free_text(tags, named, _length(value))}"

    def _either(self, branches: list[Branch], kinds: set[str], named: str) -> str:
        """Lark for a value of one of several kinds, and its end."""
        tags = self.row.arguments
        assert isinstance(tags, Params)
        end = self._text(("\n" if tags.trims else "") + tags.value_end)
        closed, found, made = list[str](), list[str](), list[dict[str, Any]]()
        for at, branch in enumerate(branches):
            options = options_of(branch)
            if branch.kind == "string" and options is None:
                nested = kinds & {"array", "object"}
                found.append(self._free_text(tags, f"{named}_{at}", _length(branch.schema), bool(nested)))
            elif options is not None and branch.kind not in ("array", "object"):
                closed += [json.dumps(self._literal(option), ensure_ascii=False) for option in options]
            elif branch.kind in _WORDED:
                closed += [json.dumps(self.row.spaces.words[place]) for place in _WORDED[branch.kind]]
            elif self._in_python(branch.schema):
                closed.append(f"({PythonValues(self.schema, self.row).value(branch.schema, 1)})")
            else:
                made.append(branch.made)
        if made:
            closed.append(self._json(named, made[0] if len(made) == 1 else {"anyOf": made}))
        return " | ".join([*found, *([f"({' | '.join(closed)}) {end}"] if closed else [])])

    def _in_python(self, schema: Mapping[str, Any]) -> bool:
        """True if a list or an object is written as Python does: in JSON, where it would make the grammar too large."""
        if not self.row.spaces.python or not keeps_values(Python(), schema, 1):
            return False
        return self.room.takes(size_of_value(Python(), schema, self.schema, 1))

    def _literal(self, value: Any) -> str:
        if isinstance(value, str):
            return value
        if value is None or isinstance(value, bool):
            return self.row.spaces.words[(True, False, None).index(value)]
        return json.dumps(value)

    def _json(self, named: str, schema: dict[str, Any]) -> str:
        """Lark for a value as JSON."""
        definitions = {"tool": moved(self.schema, "#/$defs/tool")}
        self.parts[f"value{named}"] = self.grammar({**schema, "$defs": definitions})
        return f"@value{named}"

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

    def _free_text(self, tags: Params, named: str, length: str, opens: bool = False) -> str:
        """The rule for a text and its end, which it makes. ``opens``: one that begins as a list or an object is one."""
        trimmed = "\n" if tags.trims else ""
        closing = self._text(tags.value_end)
        if tags.cdata and self.row.gaps is not None and length == "*":
            self.rules.append(f'text{named}: /[^<&\\n]*/ {closing} | "<![CDATA[" cdata{named}')
            self.rules.append(f'cdata{named}[suffix="]]>{tags.value_end}"]: /(.|\\n)*[<&\\n](.|\\n)*/')
            return f"text{named}"
        if closing.startswith("<["):  # a text never holds a token
            before = "\\n" if tags.trims else ""
            self.rules.append(f"text{named}: /{_free(length, opens)}{before}/ {closing}")
        else:
            self.rules.append(f"text{named}[suffix={json.dumps(trimmed + tags.value_end)}]: /{_free(length, opens)}/")
        return f"text{named}"

    def _text(self, literal: str) -> str:
        return lark_of(literal, self.token_id)


def _length(schema: Mapping[str, Any]) -> str:
    most = schema.get("maxLength")
    return f"{{0,{most}}}" if isinstance(most, int) else "*"


def _free(length: str, opens: bool) -> str:
    """A pattern of texts."""
    if not opens or length == "{0,0}":
        return rf"(.|\n){length}"
    least = length if length == "*" else f"{{0,{max(0, int(length[3:-1]) - 1)}}}"
    return rf"([^\s\[{{(](.|\n){least})?"


def _kind(tags: Params, kinds: set[str]) -> str:
    """The word for a value's kind."""
    if kinds == {"string"}:
        return tags.text_kind
    if tags.text_kind == "true":
        return "false"
    told = kinds - {"string"}
    return min(told - {"null"} or told, default="object").replace("integer", "number")
