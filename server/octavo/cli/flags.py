"""Dataclass fields as command-line flags: one flag a field, in kebab case, with the dataclass's default."""

from __future__ import annotations

import argparse
import dataclasses
import json
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from octavo.errors import ConfigError


def add_flags(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    cls: type,
    helps: dict[str, str],
    *,
    choices: Mapping[str, Iterable[str]] | None = None,
    aliases: Mapping[str, list[str]] | None = None,
    skip: Iterable[str] = (),
) -> None:
    """A flag for every field of ``cls`` but those in ``skip``. Flags that are not given are left out of the namespace,
    so that the dataclass's defaults hold."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if field.name in skip:
            continue
        kebab = "--" + field.name.replace("_", "-")
        names = [kebab, *(aliases or {}).get(field.name, [])]
        kind, is_list = _element(hints[field.name])
        options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
        default = field.default if field.default is not dataclasses.MISSING else None
        options["help"] = helps[field.name] + ("" if default in (None, "", False) else f" (default: {default})")
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = kind
            options["metavar"] = kind.__name__.upper()
            if choices and field.name in choices:
                options["choices"] = list(choices[field.name])
                options.pop("metavar")
            if is_list:
                options["nargs"] = "+"
        parser.add_argument(*names, **options)


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
    return hint, False


def _int_or_word(text: str) -> int | str:
    """A number (also as 8k or 1M) or a word such as "auto"."""
    units = {"k": 1_000, "m": 1_000_000, "K": 1 << 10, "M": 1 << 20}
    if text[-1:] in units and text[:-1].isdigit():
        return int(text[:-1]) * units[text[-1]]
    try:
        return int(text)
    except ValueError:
        return text


_int_or_word.__name__ = "int"


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError
    return value


_json_object.__name__ = "json"


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
        return name.replace("_", "-") + equals + value if name.startswith("--") else argument

    return [spell(argument) for argument in argv]
