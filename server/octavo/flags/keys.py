"""vLLM's forms of arguments: keys of JSON as flags (``--speculative-config.method ngram`` is part of that flag's
object), and switches with a value (``--enable-chunked-prefill=False``)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Container, Mapping, Sequence
from typing import Any


def with_plain_switches(argv: Sequence[str], actions: Mapping[str, argparse.Action]) -> list[str]:
    """``argv`` without "true" behind the switches among ``actions``, and with ``--no-`` before those that are false."""
    words, out = list(argv), list[str]()
    while words:
        word = words.pop(0)
        flag, _, value = word.partition("=")
        action = actions.get(flag)
        if action is None or action.nargs != 0 or not flag.startswith("--"):
            out.append(word)
            continue
        if flag == word and words and words[0].lower() in ("true", "false"):
            value = words.pop(0)
        if value.lower() == "false":
            out.append(flag.replace("--no-", "--", 1) if flag.startswith("--no-") else flag.replace("--", "--no-", 1))
        else:
            out.append(flag if value.lower() == "true" else word)
    return out


def with_joined_keys(argv: Sequence[str], flags: Container[str]) -> list[str]:
    """``argv`` with the keys of each flag in ``flags`` joined to one JSON object, where the first of them stood. What
    is no JSON is a text; an object that is given whole keeps what no key replaces."""
    words, out = list(argv), list[str]()
    keyed = {base for base, key, _ in map(_parts, words) if key and base in flags}
    objects: dict[str, tuple[int, dict[str, Any]]] = {}
    while words:
        word = words.pop(0)
        flag, key, value = _parts(word)
        if flag not in keyed or (value is None and not words):
            out.append(word)
            continue
        value = words.pop(0) if value is None else value
        if flag not in objects:
            objects[flag] = len(out), {}
            out.append("")
        place, found = objects[flag]
        if key:
            _put(found, key.split("."), _value(value))
        elif isinstance(whole := _value(value), dict):
            objects[flag] = place, {**whole, **found}
        else:  # no object: the parser says so
            out.append(f"{flag}={value}")
    for flag, (place, found) in objects.items():
        out[place] = f"{flag}={json.dumps(found)}"
    return out


def _parts(word: str) -> tuple[str, str, str | None]:
    """The flag, the key behind its dot and the value behind its equals sign."""
    if not word.startswith("-"):
        return "", "", None
    whole, equals, value = word.partition("=")
    flag, _, key = whole.partition(".")
    return flag, key, value if equals else None


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _put(found: dict[str, Any], path: list[str], value: Any) -> None:
    for key in path[:-1]:
        inner = found.get(key)
        found[key] = found = inner if isinstance(inner, dict) else {}
    found[path[-1]] = value
