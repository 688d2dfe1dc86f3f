"""Dataclasses <-> OpenAPI v3 schemas of a CustomResourceDefinition <-> JSON.

A field is declared once: type and default in the dataclass, description and limits in the field's metadata
(`spec_field`), rules over several fields in the class's `RULES`. Names are snake_case here and camelCase in JSON.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, Union

T = TypeVar("T")
Json = Any

INT_OR_STRING: dict[str, Json] = {
    "x-kubernetes-int-or-string": True,
    "anyOf": [{"type": "integer"}, {"type": "string"}],
}
# Quantities are validated by rules, so that the error is a sentence instead of a pattern.
QUANTITY: dict[str, Json] = {  # 20Gi, 2, 500m
    **INT_OR_STRING,
    "maxLength": 32,
    "x-kubernetes-validations": [
        {
            "rule": "isQuantity(string(self)) && !quantity(string(self)).isLessThan(quantity('0'))",
            "message": "not a quantity: write a number with a unit of Kubernetes or none, such as 2, 500m, 40G "
            "(10^9) or 40Gi (2^30)",
        }
    ],
}
BYTES: dict[str, Json] = {
    **INT_OR_STRING,
    "maxLength": 32,
    "x-kubernetes-validations": [
        {
            "rule": "isQuantity(string(self)) && quantity(string(self)).isGreaterThan(quantity('0')) && "
            "!string(self).matches('[num]$')",
            "message": "not a size: write a number of bytes above 0 with a unit of Kubernetes, such as 40G (40 * "
            "10^9) or 40Gi (40 * 2^30); GB is no unit, and m means a thousandth",
        }
    ],
}


class SpecError(ValueError):
    """An object that does not fit its schema. `path`: the field."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path


@dataclasses.dataclass(frozen=True)
class Rule:
    """A CEL rule and its error message, which names the field, the limit and the way out."""

    rule: str
    message: str
    optional_old_self: bool = False  # oldSelf is a CEL optional: the rule also applies when objects are created

    def schema(self) -> dict[str, Json]:
        """Return the rule as an entry of x-kubernetes-validations."""
        out: dict[str, Json] = {"rule": self.rule, "message": self.message}
        return {**out, "optionalOldSelf": True} if self.optional_old_self else out


def spec_field(
    description: str,
    *,
    default: Any = dataclasses.MISSING,
    initial_default: Any = dataclasses.MISSING,
    rules: tuple[Rule, ...] = (),
    **schema: Json,
) -> Any:
    """A field of a spec dataclass; `schema` adds OpenAPI keywords (minimum, pattern, maxItems, ...) to the type's own.

    `items_schema` and `override` replace the generated schema of a list's items, or of the whole field: for parts of
    Kubernetes' own API that are passed on unchanged.

    `initial_default`: the field's default in the version that introduced it, where that has changed since.
    `stable_json` leaves it out, so that a changed default does not change specs that were stored before.
    """
    initial = default if initial_default is dataclasses.MISSING else initial_default
    metadata = {"description": description, "schema": schema, "rules": rules, "initial_default": initial}
    if isinstance(default, type) and dataclasses.is_dataclass(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@functools.cache
def camel(name: str) -> str:
    """camelCase name of a field."""
    first, *rest = name.rstrip("_").split("_")  # from_: a keyword of Python
    return first + "".join("IP" if part == "ip" else part.capitalize() for part in rest)


@functools.cache
def _types(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _optional(kind: Any) -> tuple[Any, bool]:
    if typing.get_origin(kind) in (Union, types.UnionType):
        options = [option for option in typing.get_args(kind) if option is not type(None)]
        if len(options) < len(typing.get_args(kind)):
            return (options[0] if len(options) == 1 else Union[tuple(options)]), True  # noqa: UP007
    return kind, False


def object_schema(cls: type, description: str) -> dict[str, Json]:
    """The OpenAPI schema of a dataclass, with descriptions and defaults."""
    properties, required = {}, []
    for field in dataclasses.fields(cls):
        kind, _ = _optional(_types(cls)[field.name])
        properties[camel(field.name)] = _field_schema(field, kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            required.append(camel(field.name))
    schema: dict[str, Json] = {"description": description, "type": "object", "properties": properties}
    if required:
        schema["required"] = required
    if rules := getattr(cls, "RULES", ()):
        schema["x-kubernetes-validations"] = [rule.schema() for rule in rules]
    schema.update(getattr(cls, "EXTRA_SCHEMA", {}))
    return schema


def _field_schema(field: dataclasses.Field[Any], kind: Any) -> dict[str, Json]:
    extra = dict(field.metadata["schema"])
    description = field.metadata["description"]
    items = extra.pop("items_schema", None)
    override = extra.pop("override", None)
    schema = (
        {"description": description, **override} if override is not None else _type_schema(kind, description, items)
    )
    schema.update(extra)
    if rules := field.metadata["rules"]:
        schema["x-kubernetes-validations"] = [*schema.get("x-kubernetes-validations", []), *(r.schema() for r in rules)]
    if field.default not in (dataclasses.MISSING, None, ()):
        schema["default"] = list(field.default) if isinstance(field.default, tuple) else field.default
    elif field.default_factory is not dataclasses.MISSING and dataclasses.is_dataclass(kind):
        # The API server applies the class's rules to a default before it fills in inner defaults, so include those.
        schema["default"] = _scalar_defaults(schema) if hasattr(kind, "RULES") else {}
    return schema


def _scalar_defaults(schema: dict[str, Json]) -> dict[str, Json]:
    return {
        name: inner["default"]
        for name, inner in schema["properties"].items()
        if not isinstance(inner.get("default", {}), dict)
    }


def _type_schema(kind: Any, description: str, items: dict[str, Json] | None) -> dict[str, Json]:
    if dataclasses.is_dataclass(kind):
        return object_schema(typing.cast(type, kind), description)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType) and set(arguments) == {int, str}:
        return {"description": description, **INT_OR_STRING}
    if origin is tuple:
        if items is None:
            items = _type_schema(arguments[0], "", None)
            if not items["description"]:
                del items["description"]
        return {"description": description, "type": "array", "items": items}
    if origin is dict:
        values = _type_schema(arguments[1], "", None)
        del values["description"]
        return {"description": description, "type": "object", "additionalProperties": values}
    return {"description": description, "type": {str: "string", bool: "boolean", int: "integer"}[kind]}


def from_json(cls: type[T], data: Mapping[str, Json], path: str = "") -> T:
    """`cls` from an object of the API. Unknown fields are ignored; raises SpecError for a wrong type."""
    if not isinstance(data, Mapping):
        raise SpecError(path or "object", f"must be an object, got {type(data).__name__}")
    values = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        name = camel(field.name)
        where = f"{path}.{name}" if path else name
        if data.get(name) is None:
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                raise SpecError(where, "is required")
            continue
        kind, _ = _optional(_types(cls)[field.name])  # type: ignore[arg-type]
        values[field.name] = _read(kind, data[name], where)
    return cls(**values)


def _read(kind: Any, value: Json, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return from_json(typing.cast(type, kind), value, where)
    origin = typing.get_origin(kind)
    if origin in (Union, types.UnionType):
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise SpecError(where, f"must be a number or a string, got {type(value).__name__}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise SpecError(where, f"must be a list, got {type(value).__name__}")
        inner = typing.get_args(kind)[0]
        return tuple(_read(inner, item, f"{where}[{index}]") for index, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise SpecError(where, f"must be an object, got {type(value).__name__}")
        inner = typing.get_args(kind)[1]
        return {str(key): _read(inner, item, f"{where}.{key}") for key, item in value.items()}
    if kind is Any or kind is dict:
        return value
    if type(value) is not kind:
        raise SpecError(where, f"must be of type {kind.__name__}, got {type(value).__name__}")
    return value


def to_json(value: Any) -> Json:
    """A spec as JSON of the API, without fields at their default."""
    return _to_json(value, lambda field: (field.default,))


def stable_json(value: Any, *, or_default: bool = False) -> Json:
    """A spec as JSON, to detect whether a user has changed it: without fields at the default that they were introduced
    with. The API server stores current defaults with every object, and adds them where a stored object lacks the field:
    neither a new field nor a changed default makes a difference here.

    `or_default`: without fields at the current default, too.
    """

    def left_out(field: dataclasses.Field[Any]) -> tuple[Any, ...]:
        initial = field.metadata["initial_default"]
        return (initial, field.default) if or_default else (initial,)

    return _to_json(value, left_out)


def _to_json(value: Any, left_out: Callable[[dataclasses.Field[Any]], tuple[Any, ...]]) -> Json:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        out = {}
        for field in dataclasses.fields(value):
            item = getattr(value, field.name)
            json_value = _to_json(item, left_out)
            if field.default_factory is not dataclasses.MISSING:
                is_default = json_value == {}  # maps, and groups with all fields at their defaults
            else:
                is_default = item in left_out(field)
            if not is_default:
                out[camel(field.name)] = json_value
        return out
    if isinstance(value, tuple):
        return [_to_json(item, left_out) for item in value]
    if isinstance(value, dict):
        return {key: _to_json(item, left_out) for key, item in value.items()}
    return value
