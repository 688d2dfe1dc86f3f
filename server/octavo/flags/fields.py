"""Dataclass fields as command-line flags: one flag a field, in kebab case, with the dataclass's default."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from octavo.errors import ConfigError
from octavo.system.suggestions import did_you_mean

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kKmMgGtT])([iI][bB]?|[bB])?)?")
_COUNTS = re.compile(r"[a-z]+=\d+(,[a-z]+=\d+)*")
_POWER = {"k": 1, "m": 2, "g": 3, "t": 4}


def add_flags(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    cls: type,
    helps: dict[str, str],
    *,
    choices: Mapping[str, Iterable[str]] | None = None,
    aliases: Mapping[str, list[str]] | None = None,
    types: Mapping[str, Callable[[str], Any]] | None = None,
    advice: Mapping[str, str] | None = None,
    skip: Iterable[str] = (),
) -> None:
    """A flag for every field of ``cls`` but those in ``skip``. Flags that are not given are left out of the namespace,
    so that the dataclass's defaults hold. A help text that does not state the default has it added. ``types`` read what
    a flag is given where its field's type is not enough; ``advice`` is told to who gives another than the choices."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if field.name in skip:
            continue
        kebab = "--" + field.name.replace("_", "-")
        names = [kebab, *(aliases or {}).get(field.name, [])]
        kind, is_list = _element(hints[field.name])
        kind = (types or {}).get(field.name, kind)
        options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
        options["help"] = helps[field.name]
        if "default:" not in options["help"]:
            options["help"] += f" (default: {_default(field)})"
        options["help"] = options["help"].replace("%", "%%")
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = kind
            options["metavar"] = kind.__name__.upper()
            if choices and field.name in choices:
                options["type"] = one_of(list(choices[field.name]), (advice or {}).get(field.name, ""))
                options["metavar"] = "{" + ",".join(choices[field.name]) + "}"
            if is_list:
                options["nargs"] = "+"
        parser.add_argument(*names, **options)


def _default(field: dataclasses.Field[Any]) -> str:
    """A field's default as the command line would say it."""
    value = field.default
    if value is dataclasses.MISSING:
        value = field.default_factory() if field.default_factory is not dataclasses.MISSING else None
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return " ".join(value) or "none"
    if value in (None, "", {}):
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _element(hint: Any) -> tuple[Any, bool]:
    """The type of one value on the command line, and whether there may be several."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        if set(kinds) == {int, str}:
            return _int_or_word, False
        return _element(kinds[0])
    if typing.get_origin(hint) is dict:
        return _json_object, False
    if typing.get_origin(hint) is list:
        return typing.get_args(hint)[0], True
    return (parse_int if hint is int else hint), False


def one_of(values: list[str], advice: str = "") -> Callable[[str], str]:
    """The type of a flag with choices; a mistake names the nearest of them, or gives ``advice`` where none is near or
    where that tells of it."""

    def check(text: str) -> str:
        if text not in values:
            near = "" if text in advice else did_you_mean(text, values)
            near = near or (advice and f"; {advice}")
            raise argparse.ArgumentTypeError(f"must be one of {', '.join(values)}, got {text!r}{near}")
        return text

    return check


def parse_int(text: str) -> int:
    """A number, or one with a unit as vLLM takes it: 4k and 2GB are decimal, 4K, 2G and 11.12GiB are binary.

    Raises ArgumentTypeError.
    """
    try:
        return int(text)
    except ValueError:
        pass
    match = _SIZE.fullmatch(text.strip())
    if not match or (match[2] is None and "." in match[1]):
        raise argparse.ArgumentTypeError(f"must be a whole number, or one with a unit (4k, 2G, 1.5GiB), got {text!r}")
    number, unit, suffix = match.groups()
    binary = suffix.lower() != "b" if suffix else bool(unit) and unit.isupper()
    base = 1024 if binary else 1000
    return round(float(number) * base ** _POWER[unit.lower()]) if unit else int(number)


parse_int.__name__ = "int"


def _int_or_word(text: str) -> int | str:
    """A number (also as 8k or 1M) or a word such as "auto"."""
    return text if text.isalpha() else parse_int(text)


_int_or_word.__name__ = "int"


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return value


_json_object.__name__ = "json"


def counts(text: str) -> dict[str, Any]:
    """A JSON object, or as older versions of vLLM take one: ``image=4,video=0``. Raises ArgumentTypeError."""
    if _COUNTS.fullmatch(text):
        pairs = (pair.split("=") for pair in text.split(","))
        return {name: int(number) for name, number in pairs}
    return _json_object(text)


counts.__name__ = "json"


def from_flags(cls: type, namespace: argparse.Namespace) -> Any:
    """The dataclass with what the command line said. A list may also be given as one JSON array, as vLLM takes it."""
    values = {f.name: vars(namespace)[f.name] for f in dataclasses.fields(cls) if f.name in namespace}
    for name, value in values.items():
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str) and value[0].startswith("["):
            try:
                values[name] = json.loads(value[0])
            except ValueError:
                raise ConfigError(f"{name} {value[0]!r} is not a JSON array") from None
    return cls(**values)


def with_dashes(argv: list[str]) -> list[str]:
    """``--max_model_len`` as ``--max-model-len``: both spellings are around in scripts."""

    def spell(argument: str) -> str:
        name, equals, value = argument.partition("=")
        flag, dot, key = name.partition(".")  # of JSON, which stays as it is
        return flag.replace("_", "-") + dot + key + equals + value if name.startswith("--") else argument

    return [spell(argument) for argument in argv]
