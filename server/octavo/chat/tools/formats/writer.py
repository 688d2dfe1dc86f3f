"""Calls as a family's templates write them: for templates that do not, and for tests."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from octavo.chat.tools.formats.row import Elements, Format, Harmony, Json, JsonKey, Named, Params, Python, Typed

Call = tuple[str, dict[str, Any]]


def write_calls(row: Format, calls: Sequence[Call], first: int = 0) -> str:
    """The text of a turn's calls, of each its name and arguments. ``first`` is the number of earlier calls. Raises
    ValueError for harmony, whose calls are messages, not text of one."""
    begin, end = row.section
    end = end if row.ends_section else ""
    match row.arguments:
        case Harmony():
            raise ValueError("harmony's calls are messages")
        case Python(lines=lines):
            made = [f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls]
            inner = "\n" + "\n".join(made) + "\n" if lines else f"[{', '.join(made)}]"
            return begin + inner + end if not row.begins else inner
        case Json(listed=True) as kind:
            return f"{begin}[{', '.join(_object(kind, call) for call in calls)}]{end}"
        case JsonKey():
            return begin + json.dumps([{name: given} for name, given in calls], ensure_ascii=False) + end
        case Json() as kind:
            objects = [_object(kind, call) for call in calls]
            if not row.each:
                return row.between.join(objects)
            gap = row.between
            return gap.join(f"{begin}{gap}{made}{gap}{end}" for made in objects)
        case _:
            return _marked(row, calls, first)


def _marked(row: Format, calls: Sequence[Call], first: int) -> str:
    """Calls that each stand between marks of their own."""
    begin, end = row.section
    newline = row.arguments.newline if isinstance(row.arguments, Params) else row.between
    made = [
        row.call + _header(row, name, number) + _arguments(row, given) + row.call_end
        for number, (name, given) in enumerate(calls, first)
    ]
    if not begin:
        return row.between.join(made)
    if row.addressed:
        to = [row.addressed.replace("{name}", name) for name, _ in calls]
        between = f"{row.thoughts[1]}{row.texts[0]} "
        return between.join(f"{a}{begin}{newline}{call}{newline}{end}" for a, call in zip(to, made, strict=True))
    if row.each:
        return newline.join(f"{begin}{newline}{call}{newline}{end}" for call in made)
    return f"{begin}{newline}{newline.join(made)}{newline}{end}"


def _header(row: Format, name: str, number: int) -> str:
    header = re.sub(r"\(([^)]*)\)\?", lambda found: "" if "{" in found[1] else found[1], row.header)
    fields = {"{name}": name, "{index}": str(number), "{id}": f"call{number:05}"}
    return re.sub(r"\{(?:name|index|id)\}", lambda found: fields[found[0]], header)


def _arguments(row: Format, given: dict[str, Any]) -> str:
    match row.arguments:
        case Named(lead=lead, tail=tail):
            return lead + _dumped(given) + tail
        case Params() as kind:
            return kind.newline + "".join(_parameter(kind, key, value) for key, value in given.items())
        case Typed(quote=quote):
            return _typed(given, quote)
        case Elements(mark=mark):
            return "".join(_element(mark, key, value) for key, value in given.items())
        case _:
            raise ValueError(f"{row.name} has no marks")


def _object(kind: Json, call: Call) -> str:
    return _dumped({kind.name_key: call[0], kind.arguments_key: call[1]})


def _parameter(kind: Params, key: str, value: Any) -> str:
    text = value if isinstance(value, str) else _dumped(value)
    if kind.cdata and isinstance(value, str) and re.search(r"[<&\n]", value):
        text = f"<![CDATA[{text}]]>"
    around = "\n" if kind.trims else ""
    word = ""
    if kind.kind_end:
        word = (kind.text_kind if isinstance(value, str) else _word(kind, value)) + kind.kind_end
    return f"{kind.key}{key}{kind.key_end}{word}{kind.value}{around}{text}{around}{kind.value_end}{kind.newline}"


def _word(kind: Params, value: Any) -> str:
    if kind.text_kind == "true":
        return "false"
    names = {bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}
    return "null" if value is None else names[type(value)]


def _typed(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_typed(inner, quote)}" for key, inner in sorted(value.items())) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_typed(inner, quote) for inner in value) + "]"
    return _dumped(value)


def _element(mark: str, tag: str, value: Any) -> str:
    if isinstance(value, dict):
        inner = "".join(_element(mark, key, item) for key, item in value.items())
    elif isinstance(value, list):
        inner = "".join(_element(mark, "item", item) for item in value)
    else:
        inner = value if isinstance(value, str) else "" if value is None else _dumped(value)
    return f"{mark}<{tag}>{inner}{mark}</{tag}>"


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
