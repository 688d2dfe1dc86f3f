"""Types and shapes of the values that keywords of JSON schemas take, for those that grammars read. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo.interface.json_schema import Steps

_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")


def _is_type(value: Any) -> bool:
    return value in _TYPES if isinstance(value, str) else isinstance(value, list) and all(map(_is_type_name, value))


def _is_type_name(value: Any) -> bool:
    return isinstance(value, str) and value in _TYPES


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _are_schemas(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_schema, value))


def _are_named_schemas(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_schema, value.values()))


def _are_definitions(value: Any) -> bool:
    return value is None or isinstance(value, dict)


def _are_items(value: Any) -> bool:
    return _is_schema(value) or _are_schemas(value)  # a list in drafts before 2020


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_step(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_limit(value: Any) -> bool:
    return isinstance(value, int | float)  # true and false in draft 4


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_Shape = tuple[Callable[[Any], bool], str]
_SHAPES: dict[str, _Shape] = {
    "type": (_is_type, f"one of {', '.join(_TYPES)}, or a list of these"),
    "enum": (_is_list, "a list"),
    "required": (_are_names, "a list of names"),
    "items": (_are_items, "a schema"),
    **dict.fromkeys(("additionalProperties", "unevaluatedProperties", "unevaluatedItems"), (_is_schema, "a schema")),
    **dict.fromkeys(("prefixItems", "anyOf", "oneOf", "allOf"), (_are_schemas, "a list of schemas")),
    **dict.fromkeys(("properties", "patternProperties"), (_are_named_schemas, "an object of schemas")),
    "$defs": (_are_definitions, "an object of schemas"),
    **dict.fromkeys(("pattern", "format", "$ref"), (_is_text, "a string")),
    **dict.fromkeys(("minimum", "maximum"), (_is_number, "a number")),
    "multipleOf": (_is_step, "a number above 0"),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), (_is_limit, "a number")),
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        (_is_count, "an integer from 0"),
    ),
}


def check_shapes(schema: dict[str, Any], path: Steps) -> None:
    """Raises ValueError that names a keyword of the schema, which stands at ``path``, whose value is none of its."""
    for key, value in schema.items():
        fits, expected = _SHAPES.get(key, (None, ""))
        if fits is not None and not fits(value):
            raise ValueError(f"{'.'.join((*path, key))} must be {expected}, got {_shown(value)}")


def _shown(value: Any) -> str:
    return f"{str(value)[:80]!r}" if isinstance(value, str | int | float) else f"a value of type {type(value).__name__}"
