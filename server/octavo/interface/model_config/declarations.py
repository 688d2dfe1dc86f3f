"""Declarations of config.json's fields: type, limits and default, in one line of a family's class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, field
from typing import Any

from octavo.interface.config_checks import Fields

Read = Callable[[Fields, str], Any]  # the checked value; ModelError for one that cannot be meant
_READ, _NULL = "read", "null_is_none"


def declare(read: Read, default: Any = MISSING, null: bool = False) -> Any:
    """A field that ``read`` checks; without ``default`` config.json must have it. ``null``: a null in config.json means
    none, where one usually means the default."""
    metadata = {_READ: read, _NULL: null}
    if isinstance(default, dict | list):
        return field(default_factory=lambda: default, metadata=metadata)
    return field(default=default, metadata=metadata)


def integer(low: int, high: int, default: Any = MISSING, null: bool = False) -> Any:
    """An integer from ``low`` to ``high``."""
    return declare(lambda fields, key: fields.integer(key, low, high), default, null)


def number(low: float, high: float, default: Any = MISSING, above: bool = False, null: bool = False) -> Any:
    """A finite number from ``low`` (not itself, if ``above``) to ``high``."""
    return declare(lambda fields, key: fields.number(key, low, high, above), default, null)


def flag(default: Any) -> Any:
    """True or false."""
    return declare(lambda fields, key: fields.flag(key), default)


def text(default: Any) -> Any:
    """A string."""
    return declare(lambda fields, key: fields.text(key), default)


def table(default: Any = None) -> Any:
    """An object."""
    return declare(lambda fields, key: fields.table(key), default)


def choice(values: Sequence[Any], default: Any, demand: str | None = None) -> Any:
    """One of ``values``; ``demand`` is what an error says that it must be."""

    def read(fields: Fields, key: str) -> Any:
        value = fields.config[key]
        if not any(value == one and type(value) is type(one) for one in values):
            fields.refuse(key, demand or f"must be {' or '.join(map(repr, values))}")
        return value

    return declare(read, default)


def integers(demand: str, default: Any = None) -> Any:
    """A list of integers; ``demand`` is what an error says that it must be."""

    def read(fields: Fields, key: str) -> list[int]:
        value: list[int] = fields.config[key]
        if not isinstance(value, list) or any(type(one) is not int for one in value):
            fields.refuse(key, demand)
        return value

    return declare(read, default)


def turns() -> Any:
    """Declare a list with 1 for each layer that rotates queries and keys, 0 for others; an empty list counts as
    absent."""

    def read(fields: Fields, key: str) -> list[int]:
        value, layers = fields.config[key], fields.config["num_hidden_layers"]
        found: list[Any] = value if isinstance(value, list) else [None]
        if found and (len(found) < layers or any(type(turn) is not int for turn in found)):
            fields.refuse(key, f"must be a list of 0 or 1 for each of {layers} layers")
        return found

    return declare(read, None)


def fourfold(config: dict[str, Any]) -> dict[str, Any]:
    """``config``, with MLPs four times as wide as hidden states where it does not say how wide they are."""
    hidden = config.get("hidden_size")
    if config.get("intermediate_size") is None and type(hidden) is int:
        return {**config, "intermediate_size": 4 * hidden}
    return config


def declaration(cls: type, name: str) -> Field[Any]:
    """Find the declaration of ``name`` in ``cls`` or the nearest class above it; below it, a family may give a default
    alone."""
    for parent in cls.__mro__:
        found: Field[Any] | None = parent.__dict__.get("__dataclass_fields__", {}).get(name)
        if found is not None and _READ in found.metadata:
            return found
    raise TypeError(f"{cls.__name__}.{name} is declared nowhere: give it a type and limits, see {__name__}")


def reader(declared: Field[Any]) -> Read:
    """The function that checks the field."""
    found: Read = declared.metadata[_READ]
    return found


def null_is_none(declared: Field[Any]) -> bool:
    """True if a null means None."""
    return bool(declared.metadata[_NULL])


def null_means_none(cls: type, name: str) -> bool:
    """`null_is_none` of the field ``name`` of ``cls``."""
    return name != "architecture" and null_is_none(declaration(cls, name))
