"""Arguments that a model wrote as bare text, made into JSON by the schema of the tool. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from octavo.chat.tools.parsers.pythonic import arguments_of, is_unicode
from octavo.chat.tools.parsers.reader import NotACallError

Schema = Mapping[str, Any]

_MAX_REFERENCES = 32  # followed to find what kinds of value a schema takes
_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
_ZEROS = re.compile(r"[+-]?0*[0-9]{1,400}")
_WORDS = {"true": True, "false": False, "null": None, "none": None}


def schema_of(parameters: Schema, name: str) -> Schema:
    """The schema of one argument; {} where the tool does not say."""
    properties = parameters.get("properties")
    found = properties.get(name) if isinstance(properties, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def kinds_of(schema: Any, parameters: Schema, budget: int = _MAX_REFERENCES) -> set[str]:
    """JSON's kinds of value that a schema may take; empty where it does not say. ``parameters`` has its $defs."""
    if not isinstance(schema, Mapping) or budget <= 0:
        return set()
    if isinstance(kind := schema.get("type"), str):
        return {kind, "null"} if schema.get("nullable") is True else {kind}
    if isinstance(kind, list):
        return {one for one in kind if isinstance(one, str)}
    options = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(options, list):
        return {_kind(option) for option in options}
    if isinstance(path := schema.get("$ref"), str):
        return kinds_of(_referred(path, parameters), parameters, budget - 1)
    for key in ("anyOf", "oneOf"):
        if isinstance(alternatives := schema.get(key), list) and alternatives:
            each = [kinds_of(one, parameters, budget // (len(alternatives) + 1)) for one in alternatives]
            return set().union(*each) if all(each) else set()
    if isinstance(every := schema.get("allOf"), list):
        each = [found for one in every if (found := kinds_of(one, parameters, budget // (len(every) + 1)))]
        return set.intersection(*each) if each else set()
    if "properties" in schema:
        return {"object"}
    return {"array"} if "items" in schema else set()


def json_of(text: str, kinds: set[str]) -> str:
    """The value as JSON: of the first kind that its text has and ``kinds`` allow, else the text itself."""
    stripped = text.strip()
    if kinds == {"string"}:
        return _string(text)
    try:
        value = json.loads(stripped, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        value = _other_spelling(stripped, kinds)
        return _string(text) if value is None and "null" not in kinds else _written(value, text)
    if isinstance(value, str) and "string" not in kinds and kinds:
        return _string(value)  # nothing else fits: a text in quotes
    if isinstance(value, str) or not _fits(value, kinds):
        return _string(text) if not kinds or "string" in kinds else _nearest(value, stripped, kinds)
    if isinstance(value, float) and "number" not in kinds and "integer" in kinds:
        return str(int(value))
    return stripped if _is_one_line(stripped) else _dumped(value)


def _nearest(value: Any, text: str, kinds: set[str]) -> str:
    if kinds == {"boolean"} and value in (0, 1):
        return "true" if value else "false"
    return text if _is_one_line(text) else _dumped(value)


def _other_spelling(text: str, kinds: set[str]) -> Any:
    """Return the value that ``text`` has in Python but not in JSON; None if it has none, or is None."""
    word = text.lower()
    if "integer" in kinds and "string" not in kinds and _ZEROS.fullmatch(text):
        return int(text)
    if word in _WORDS and (not kinds or _kind(_WORDS[word]) in kinds):
        return _WORDS[word]
    if text[:1] in ("{", "[", "(") and (not kinds or kinds & {"object", "array"}):
        try:
            found = json.loads(arguments_of(f"f(v={text})"))
        except (NotACallError, ValueError, RecursionError):
            return None
        return found["v"] if found.keys() == {"v"} else None
    return None


def _written(value: Any, text: str) -> str:
    if value is None and text.strip().lower() not in ("null", "none"):
        return _string(text)
    return _dumped(value)


def _fits(value: Any, kinds: set[str]) -> bool:
    kind = _kind(value)
    if not kinds or kind in kinds or (kind == "integer" and "number" in kinds):
        return True
    return kind == "number" and "integer" in kinds and isinstance(value, float) and value.is_integer()


def _kind(value: Any) -> str:
    return "null" if value is None else _KINDS[type(value)]


def _string(text: str) -> str:
    return _dumped(text)


def _dumped(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isascii() or is_unicode(text) else json.dumps(value)


def _is_one_line(text: str) -> bool:
    return "\n" not in text


def _referred(path: str, parameters: Schema) -> Any:
    """Resolve a reference inside the tool's own schema; None for any other."""
    if not path.startswith("#"):
        return None
    found: Any = parameters
    for step in path[1:].split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping):
            return None
        found = found.get(name)
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
