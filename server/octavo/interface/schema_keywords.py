"""Keywords of JSON schemas that no grammar holds: said in others where that is the same, else refused or left out.
Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from octavo.interface.json_pattern import UnheldPatternError, translated
from octavo.interface.json_schema import Schema, Steps, at_pointer, mapped
from octavo.interface.schema_shapes import check_shapes

# Keywords of which a grammar cannot keep account. With one of these values a keyword holds always.
_UNHELD: dict[str, tuple[Any, ...]] = {
    "not": (False,),
    "if": (),
    "then": (),
    "else": (),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "propertyNames": (True, {}),
    "contains": (),
    "minContains": (),
    "maxContains": (),
    "uniqueItems": (False,),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "$dynamicRef": (),
    "$recursiveRef": (),
}
_COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)
_OTHERS = ("allOf", "anyOf", "oneOf", "$ref", "if", "then", "else", "dependentSchemas")  # what may evaluate items


def held(schema: Schema, strict: bool) -> Schema:
    """The schema in keywords that a grammar holds. Its references are pointers.

    What no grammar holds is left out, or with ``strict`` refused. Raises ValueError naming it and where it stands, also
    for a pattern that is none, and for a keyword's value that is none.
    """
    return _held(schema, strict, ()) if isinstance(schema, dict) else schema


def _held(schema: Schema, strict: bool, path: Steps) -> Schema:
    if not isinstance(schema, dict):
        return schema
    copy = mapped(schema, lambda part, steps: _held(part, strict, path + steps))
    for key, always in _UNHELD.items():
        if key in copy:
            if strict and copy.pop(key) not in always and not _alone(schema, key):
                raise ValueError(f"{_named(path, key)} cannot be enforced by a grammar; drop it, or strict")
            copy.pop(key, None)
    _hold_texts(copy, strict, path)
    if isinstance(patterns := copy.get("patternProperties"), dict):
        _translate_names(copy, patterns, strict, path)
    for key in _COUNTS & copy.keys():
        if isinstance(number := copy[key], float) and number.is_integer():
            copy[key] = int(number)
    # Encoders of other languages write null for what was not set.
    copy = {key: value for key, value in copy.items() if value is not None or key in ("const", "default", "example")}
    check_shapes(copy, path)
    return copy


def _hold_texts(copy: dict[str, Any], strict: bool, path: Steps) -> None:
    """References to other documents, formats and patterns."""
    reference = copy.get("$ref")
    if isinstance(reference, str) and not reference.startswith("#"):
        if strict:
            raise ValueError(f"{_named(path, '$ref')} {reference!r} refers to another document; have all in the schema")
        del copy["$ref"]
    found = copy.get("format")
    if isinstance(found, str) and found not in _FORMATS:
        if strict:
            raise ValueError(f"{_named(path, 'format')} {found!r} cannot be enforced by a grammar; drop it, or strict")
        del copy["format"]
    if isinstance(copy.get("pattern"), str):
        pattern = _translated(copy.pop("pattern"), strict, (*path, "pattern"))
        copy |= {} if pattern is None else {"pattern": pattern}


def _alone(schema: dict[str, Any], key: str) -> bool:
    """True if a keyword means nothing without another one, which is missing."""
    needed = {"if": ("then", "else"), "then": ("if",), "else": ("if",)}
    needed |= {"minContains": ("contains",), "maxContains": ("contains",)}
    return key in needed and schema.keys().isdisjoint(needed[key])


def _translated(pattern: str, strict: bool, path: Steps) -> str | None:
    """None: left out."""
    try:
        return translated(pattern)
    except UnheldPatternError as error:
        if not strict:
            return None
        raise ValueError(f"{_named(path)} has {error}, which a grammar cannot enforce; drop it, or strict") from None
    except ValueError as error:
        raise ValueError(f"{_named(path)} is no regular expression: {error}") from None


def _translate_names(copy: dict[str, Any], patterns: dict[str, Any], strict: bool, path: Steps) -> None:
    found = {}
    for name, part in patterns.items():
        pattern = _translated(name, strict, (*path, "patternProperties", name))
        if pattern is None:  # names that it would match are not to be forbidden
            copy.pop("additionalProperties", None)
        else:
            found[pattern] = part
    if not strict and len(found) > 1 and not _disjoint(list(found)):  # a name may have one schema
        found = {}
        copy.pop("additionalProperties", None)
    copy["patternProperties"] = found


_LITERAL = re.compile(r"\^([\w-]+)(?![\w-]|[*?{+])")


def _disjoint(patterns: list[str]) -> bool:
    """True if it is plain that no text matches two of the patterns: each begins with letters, and all with others."""
    found = [None if "|" in pattern else _LITERAL.match(pattern) for pattern in patterns]
    begins = sorted("" if begin is None else begin[1] for begin in found)
    return all(not later.startswith(earlier) for earlier, later in itertools.pairwise(begins))


def _named(path: Steps, *more: str) -> str:
    return ".".join((*path, *more))


def with_evaluated(root: Schema) -> Schema:
    """The schema with ``unevaluatedProperties`` as ``additionalProperties`` beside all properties that other schemas
    name for the same object, and ``unevaluatedItems`` as ``items``, where these say the same. Of alternatives each is
    closed by itself. References are pointers."""
    return _Evaluation(root).run(root) if isinstance(root, dict) else root


_BUDGET = 20_000  # schemas looked at to find what others evaluate; where that needs more, the keyword stays


class _Evaluation:
    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._budget = _BUDGET

    def run(self, schema: Schema) -> Schema:
        if not isinstance(schema, dict):
            return schema
        copy = mapped(schema, lambda part, _: self.run(part))
        if "unevaluatedItems" in copy and copy.keys().isdisjoint({"items", "contains", *_OTHERS}):
            copy["items"] = copy.pop("unevaluatedItems")
        if "unevaluatedProperties" not in copy or self._budget <= 0:
            return copy
        further = copy.pop("unevaluatedProperties")
        evaluated = self._evaluated(schema)
        choices = [key for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)]
        if evaluated is None:  # all of them
            return copy
        if len(choices) > 1:  # not to be said of each
            return {**copy, "unevaluatedProperties": further}
        for key in choices:
            pairs = zip(schema[key], copy[key], strict=True)
            copy[key] = [self._closed(part, made, further, evaluated) for part, made in pairs]
        return copy if choices else _with_further(copy, further, evaluated)

    def _closed(self, part: Schema, made: Schema, further: Schema, evaluated: _Names) -> Schema:
        """One of several alternatives, with what is evaluated beside it."""
        own = self._evaluated(part, alternatives=True) if isinstance(part, dict) else evaluated
        if own is None or made is False:
            return made
        names = _Names({**evaluated.properties, **own.properties}, {**evaluated.patterns, **own.patterns})
        return _with_further(made if isinstance(made, dict) else {}, further, names)

    def _evaluated(self, schema: dict[str, Any], alternatives: bool = False) -> _Names | None:
        """Collect the properties named by the schema and by schemas that hold for the same object whenever it does or
        under conditions, which no grammar holds; with ``alternatives`` by those too. None if one of them covers all
        properties."""
        names, found, todo = _Names({}, {}), set[int](), [schema]
        while todo:
            one: Schema = todo.pop()
            if not isinstance(one, dict) or id(one) in found:
                continue
            self._budget -= 1
            found.add(id(one))
            if "additionalProperties" in one or (one is not schema and "unevaluatedProperties" in one):
                return None
            names.properties |= dict.fromkeys(one.get("properties") or (), True)
            names.patterns |= dict.fromkeys(one.get("patternProperties") or (), True)
            todo += self._beside(one, alternatives or one is not schema)
        return names

    def _beside(self, schema: dict[str, Any], alternatives: bool) -> Iterator[Schema]:
        for key in ("allOf", *(("anyOf", "oneOf") if alternatives else ())):
            if isinstance(schema.get(key), list):
                yield from schema[key]
        yield from (schema[key] for key in ("if", "then", "else") if key in schema)
        if isinstance(dependent := schema.get("dependentSchemas"), dict):
            yield from dependent.values()
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            yield at_pointer(self._root, unquote(reference[1:]))


@dataclass
class _Names:
    """Properties, and patterns of properties, each with a schema that says nothing of it."""

    properties: dict[str, Schema]
    patterns: dict[str, Schema]


def _with_further(copy: dict[str, Any], further: Schema, evaluated: _Names) -> dict[str, Any]:
    made = {**copy, "additionalProperties": further}
    made["properties"] = {**evaluated.properties, **(copy.get("properties") or {})}
    if evaluated.patterns:
        made["patternProperties"] = {**evaluated.patterns, **(copy.get("patternProperties") or {})}
    return made
