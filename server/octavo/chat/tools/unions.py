"""Arguments between tags that may be a text or something else: told apart as the reader does. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.chat.tools.parsers.values import json_of, kinds_of
from octavo.chat.tools.scalars import BOUNDS, OF_ANY

_OF_KINDS: dict[str, frozenset[str]] = {
    "string": frozenset({"maxLength"}),
    "integer": BOUNDS,
    "number": BOUNDS,
    "array": frozenset({"items"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
}
_OF_TEXTS = {"type", "enum", "const", "maxLength", *OF_ANY}
_LOOSE = {"null", "boolean", "integer", "number"}  # a text that looks like one of these is one


@dataclass(frozen=True)
class Branch:
    """A value of one of JSON's kinds: its schema, and the one by which a grammar of JSON makes it."""

    kind: str
    schema: Mapping[str, Any]
    made: dict[str, Any]


def branches_of(value: Mapping[str, Any], own: str, parameters: Mapping[str, Any]) -> list[Branch] | None:
    """The values that an argument may have, each of one kind; None where its schema says more than is known here.
    ``own`` is a reference to the schema, ``parameters`` the tool's."""
    if "enum" in value or "const" in value:
        options = [value["const"]] if "const" in value else value["enum"]
        if not value.keys() <= {"type", "nullable", "enum", "const", *OF_ANY} or not isinstance(options, list):
            return None
        kinds = kinds_of(value, parameters)
        found: dict[str, list[Any]] = {}
        for option in options:
            (kind,) = kinds_of({"const": option}, {})
            if kind in kinds or (kind == "integer" and "number" in kinds):
                found.setdefault(kind, []).append(option)
        return [Branch(kind, {"enum": some}, {"enum": some}) for kind, some in found.items()]
    if "type" in value:
        kinds = kinds_of(value, parameters)
        if not value.keys() <= {"type", "nullable", *OF_ANY}.union(*(_OF_KINDS.get(kind, ()) for kind in kinds)):
            return None
        one = len(kinds) == 1
        return [Branch(kind, _part(value, kind), _of_kind(kind, own, one)) for kind in sorted(kinds)]
    for key in ("anyOf", "oneOf"):
        if isinstance(several := value.get(key), list) and value.keys() <= {key, *OF_ANY}:
            return _alternatives(several, f"{own}/{key}", parameters)
    return None


def _part(value: Mapping[str, Any], kind: str) -> dict[str, Any]:
    said = _OF_KINDS.get(kind, frozenset())
    return {"type": kind, **{name: value[name] for name in value if name in said}}


def _of_kind(kind: str, own: str, one: bool) -> dict[str, Any]:
    if kind == "null":
        return {"type": "null"}
    return {"$ref": own} if one else {"allOf": [{"$ref": own}, {"type": kind}]}


def _alternatives(several: list[Any], own: str, parameters: Mapping[str, Any]) -> list[Branch] | None:
    found: list[Branch] = []
    for at, one in enumerate(several):
        if not isinstance(one, Mapping):
            return None
        kinds = kinds_of(one, parameters)
        if len(kinds) != 1:
            return None
        found.append(Branch(kinds.pop(), one, {"$ref": f"{own}/{at}"}))
    return found


def tells_texts(branches: Iterable[Branch], told: bool) -> bool:
    """True if a text among the branches can be written without quotes. ``told``: the model writes the kind of a
    value."""
    branches = list(branches)
    kinds = {branch.kind for branch in branches}
    for branch in branches:
        if branch.kind == "string":
            if not branch.schema.keys() <= _OF_TEXTS:
                return False
            options = options_of(branch) or ()
            if not told and not all(json_of(one, kinds) == json.dumps(one, ensure_ascii=False) for one in options):
                return False
        elif branch.kind in _LOOSE and not told and "string" in kinds:
            # A free text that looks like a number would have to keep to what the number's schema says.
            free = any(options_of(one) is None for one in branches if one.kind == "string")
            said_nothing = {"type", *OF_ANY} | ({"enum", "const"} if branch.kind == "null" else set())
            if free and not branch.schema.keys() <= said_nothing:
                return False
    return True


def options_of(branch: Branch) -> list[Any] | None:
    """The values of which a branch is one; None if it is any of its kind."""
    if "const" in branch.schema:
        return [branch.schema["const"]]
    options = branch.schema.get("enum")
    return options if isinstance(options, list) else None
