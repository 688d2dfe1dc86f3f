"""The lengths of grammars of values, told before they are made: each optional property makes them longer by all that
follow, and so do objects inside of objects. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.chat.tools.formats.row import Python, Typed
from octavo.chat.tools.parsers.values import kinds_of
from octavo.chat.tools.scalars import BOUNDS
from octavo.chat.tools.value_grammar import MAX_DEPTH, alternatives_of

MAX_LARK = 300_000  # characters for all tools of a request: of so many, llguidance makes a grammar in 0.3 s
_AROUND = 26  # characters that at most stand around a member, an option or an item
_KIND = 8  # of the rule of a kind, and what separates it from the next


@dataclass
class Room:
    """The characters that the values of a request's tools may still take."""

    left: int = MAX_LARK

    def takes(self, size: int) -> bool:
        """True if there is room for so many characters, which are then taken."""
        if size > self.left:
            return False
        self.left -= size
        return True


def size_of_arguments(kind: Typed | Python, parameters: Mapping[str, Any]) -> int:
    """Return a bound on the characters of the grammar of a function's arguments."""
    return _AROUND + _members(kind, parameters, parameters, 0)


def size_of_value(kind: Typed | Python, schema: Any, parameters: Mapping[str, Any], depth: int = 0) -> int:
    """Return a bound on the characters of the grammar of a value. ``parameters`` has the schema's $defs."""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return _KIND
    if isinstance(several := alternatives_of(schema), list):
        return sum(_KIND + size_of_value(kind, one, parameters, depth + 1) for one in several)
    options = [schema["const"]] if "const" in schema else schema.get("enum")
    around = _AROUND + (8 * len(kind.quote) if isinstance(kind, Typed) else 0)  # a token's number is longer than it
    size = sum(around + _quoted(option) for option in options) if isinstance(options, list) else 0
    kinds = kinds_of(schema, parameters)
    limits = {name: schema[name] for name in schema.keys() & BOUNDS}
    size += _KIND + len(kinds) * (_KIND + (_AROUND + _quoted(limits) if limits else 0))
    if "array" in kinds:
        size += _AROUND + 2 * size_of_value(kind, schema.get("items"), parameters, depth + 1)
    if "object" in kinds:
        size += _AROUND + _members(kind, schema, parameters, depth + 1)
    return size


def _members(kind: Typed | Python, schema: Mapping[str, Any], parameters: Mapping[str, Any], depth: int) -> int:
    """The characters of members as `with_any_start` writes them: from each up to the first required one to the last."""
    found, required = schema.get("properties"), schema.get("required")
    properties = found if isinstance(found, Mapping) else {}
    keys = sorted(properties, key=lambda key: f"{key}:") if isinstance(kind, Typed) else properties
    needed = {key for key in required if isinstance(key, str)} if isinstance(required, list) else set()
    size, starts, met = 0, 0, False
    for key in keys:
        starts += not met
        met = met or key in needed
        size += starts * (_AROUND + _quoted(key) + size_of_value(kind, properties[key], parameters, depth))
    return size


def _quoted(value: Any) -> int:
    return 2 * len(json.dumps(json.dumps(value)))  # in both spellings of a text
