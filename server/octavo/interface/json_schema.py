"""JSON schemas as data: finding nested schemas, moving references, closing objects. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

Schema = Any  # a dict, or True or False

_DATA = frozenset({"const", "enum", "default", "example", "examples", "required", "type", "dependentRequired"})
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
# Keywords by which other schemas describe a schema's own value.
_ALL_HOLD = ("allOf",)
_ONE_HOLDS = ("anyOf", "oneOf")
_CONDITIONS = frozenset({"if", "not"})


def sets_engine_options(schema: Schema) -> bool:
    """True if a schema, or one inside it, has the keyword with which llguidance is given options."""
    return isinstance(schema, dict) and any("x-guidance" in one for one in all_schemas(schema))


def moved(schema: Schema, where: str) -> Schema:
    """A schema that stands at ``where`` (a JSON pointer, "#/$defs/x") of another one: its references into itself
    follow."""
    if not isinstance(schema, dict):
        return schema
    copy = mapped(schema, lambda part, _: moved(part, where))
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        copy["$ref"] = where + reference[1:]
    return copy


def closed(schema: Schema) -> Schema:
    """The schema with ``additionalProperties: false`` for every object that names its properties and is silent on
    others.

    Left open is an object without named properties, one that says something on further ones (also by ``propertyNames``,
    or by requiring one that it does not name), and one whose properties come from several schemas at once (``allOf`` of
    two objects, properties beside ``anyOf`` with others): none of those knows what all of them are.
    """
    return _Closing(schema).copy if isinstance(schema, dict) else schema


_BUDGET = 20_000  # schemas looked at to find what objects require; a schema that needs more is left as it is


class _Closing:
    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._schemas = list(all_schemas(root))
        self._in_place = {id(schema): list(self._find_in_place(schema)) for schema in self._schemas}
        self._naming = self._find_naming()
        self._shared: set[int] = set()  # ids of schemas beside which others describe the same object
        for schema in self._schemas:
            self._find_shared(schema)
        self._budget = _BUDGET
        self.copy = self._close(root)

    def _find_naming(self) -> set[int]:
        """Ids of schemas that speak of properties, by themselves or by one that holds for the same value."""
        users: dict[int, list[int]] = {}
        for schema in self._schemas:
            for alternatives in self._in_place[id(schema)]:
                for part in alternatives:
                    users.setdefault(id(part), []).append(id(schema))
        todo = [id(schema) for schema in self._schemas if _speaks_of_properties(schema)]
        found = set(todo)
        while todo:
            new = [user for user in users.get(todo.pop(), ()) if user not in found]
            found.update(new)
            todo += new
        return found

    def _find_shared(self, schema: dict[str, Any]) -> None:
        parts = self._in_place[id(schema)]
        naming = sum(any(id(part) in self._naming for part in alternatives) for alternatives in parts)
        if naming + _speaks_of_properties(schema) > 1:
            self._share([schema])
        self._share([schema[key] for key in _CONDITIONS if key in schema])

    def _share(self, todo: list[Schema]) -> None:
        """Share everything that holds for the same value as these, too."""
        while todo:
            schema = todo.pop()
            if isinstance(schema, dict) and id(schema) not in self._shared:
                self._shared.add(id(schema))
                todo += [part for alternatives in self._in_place.get(id(schema), ()) for part in alternatives]

    def _find_in_place(self, schema: dict[str, Any]) -> Iterator[list[Schema]]:
        """The schemas that hold for the same value as this one, as groups of which one holds at a time."""
        for key in _ALL_HOLD:
            if isinstance(schema.get(key), list):
                yield from ([part] for part in schema[key])
        for key in _ONE_HOLDS:
            if isinstance(schema.get(key), list):
                yield schema[key]
        if "if" in schema:
            yield [schema["if"]]
            yield [schema.get("then"), schema.get("else")]
        if isinstance(schema.get("dependentSchemas"), dict):
            yield from ([part] for part in schema["dependentSchemas"].values())
        if isinstance(schema.get("$ref"), str):
            yield [self._resolve(schema["$ref"])]

    def _resolve(self, reference: str) -> Schema:
        """None for what is not there: that is for the grammar to refuse."""
        try:
            return at_pointer(self._root, unquote(reference[1:])) if reference.startswith("#") else None
        except KeyError:
            return None

    def _close(self, schema: Schema) -> Schema:
        if not isinstance(schema, dict):
            return schema
        copy = mapped(schema, lambda part, steps: part if steps[0] in _CONDITIONS else self._close(part))
        if id(schema) not in self._shared and _is_silent(schema) and self._names_what_it_requires(schema):
            copy["additionalProperties"] = False
        return copy

    def _names_what_it_requires(self, schema: dict[str, Any]) -> bool:
        names = schema.get("properties") or {}
        found, todo = set(), [schema]
        while todo and self._budget > 0:
            one = todo.pop()
            if isinstance(one, dict) and id(one) not in found:
                self._budget -= 1
                found.add(id(one))
                required = one.get("required")
                if isinstance(required, list) and not all(isinstance(name, str) and name in names for name in required):
                    return False
                todo += [part for alternatives in self._in_place.get(id(one), ()) for part in alternatives]
        return not todo


_FURTHER = frozenset({"additionalProperties", "unevaluatedProperties"})


def _speaks_of_properties(schema: dict[str, Any]) -> bool:
    return not schema.keys().isdisjoint({"properties", "patternProperties", *_FURTHER})


def _is_silent(schema: dict[str, Any]) -> bool:
    names, patterns = schema.get("properties"), schema.get("patternProperties")
    if not isinstance(names, dict) and not isinstance(patterns, dict):
        return False
    if not schema.keys().isdisjoint(_FURTHER | {"propertyNames"}):
        return False
    least = schema.get("minProperties", 0)
    return bool(patterns) or (isinstance(least, int) and least <= len(names or ()))


def all_schemas(root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schema and all that stand in it, once each."""
    found: set[int] = set()
    todo: list[Schema] = [root]

    def take(part: Schema, _: Steps) -> None:
        todo.append(part)

    while todo:
        schema = todo.pop()
        if isinstance(schema, dict) and id(schema) not in found:
            found.add(id(schema))
            yield schema
            mapped(schema, take)


def at_pointer(root: Schema, pointer: str) -> Any:
    """Return the value at a pointer ("/$defs/x"). Raises KeyError."""
    found = root
    for step in pointer.split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found[step]
        elif isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        else:
            raise KeyError(step)
    return found


Steps = tuple[str, ...]  # from a schema to one in it: the keyword, and a name or number where it has several


def mapped(schema: dict[str, Any], change: Callable[[Schema, Steps], Schema]) -> dict[str, Any]:
    """A copy with ``change(part, steps)`` for every schema in it. Data stays as it is. What is under keywords that
    JSON schema does not know may be referred to, and counts as schemas."""
    copy = {}
    for key, value in schema.items():
        if key in _DATA or key.startswith("x-"):
            copy[key] = value
        elif key in _BY_NAME and isinstance(value, dict):
            copy[key] = {name: change(part, (key, name)) for name, part in value.items()}
        elif isinstance(value, list):
            copy[key] = [change(part, (key, str(at))) for at, part in enumerate(value)]
        else:
            copy[key] = change(value, (key,))
    return copy
