"""Calls as a family's templates write them: for templates that do not, and for tests."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from octavo.chat.tools.formats.row import Elements, Format, Harmony, Named, Params, Python, Typed

Call = tuple[str, dict[str, Any]]


def write_calls(row: Format, calls: Sequence[Call], first: int = 0) -> str:
    """The text of a turn's calls, of each its name and arguments. ``first`` is the number of earlier calls. Raises
    ValueError for harmony, whose calls are messages, not text of one."""
    begin, end = row.around
    gaps = row.spaces
    if isinstance(row.arguments, Harmony):
        raise ValueError("harmony's calls are messages")
    if isinstance(row.arguments, Python):
        return begin + _python(row.arguments, calls) + end
    made = [write_call(row, call, number) for number, call in enumerate(calls, first)]
    if row.addressed:
        to = [row.addressed.replace("{name}", name) for name, _ in calls]
        own = (f"{a}{begin}{gaps.opened}{call}{gaps.closed}{end}" for a, call in zip(to, made, strict=True))
        return f"{row.thoughts[1]}{row.texts[0]} ".join(own)
    if row.each:
        return gaps.between.join(f"{begin}{gaps.opened}{call}{gaps.closed}{end}" for call in made)
    inner = f"[{gaps.bracket}{gaps.comma.join(made)}{gaps.last}]" if row.listed else gaps.between.join(made)
    return f"{begin}{gaps.opened}{inner}{gaps.closed}{end}" if begin else inner


def write_call(row: Format, call: Call, number: int) -> str:
    """One call without what stands around all of them; ``number`` is its place among the conversation's."""
    name, given = call
    if row.layout:
        made = {"{name}": _dumped(name), "{arguments}": _dumped(given)}
        made |= {"{index}": str(number + row.spaces.counted), "{id}": f"call{number:05}"}
        return re.sub(r"\{(?:name|arguments|id|index)\}", lambda found: made[found[0]], row.layout)
    return row.call + write_header(row, name, number) + _arguments(row, given) + row.call_end


def _python(kind: Python, calls: Sequence[Call]) -> str:
    write = _dumped if kind.as_json else repr
    made = [f"{name}({', '.join(f'{key}={write(value)}' for key, value in given.items())})" for name, given in calls]
    return "\n" + "\n".join(made) + "\n" if kind.lines else f"[{', '.join(made)}]"


def write_header(row: Format, name: str, number: int) -> str:
    """Write the part behind a call's mark: its name, perhaps its number or a made-up id."""
    header = re.sub(r"\(([^)]*)\)\?", lambda found: "" if "{" in found[1] else found[1], row.header)
    fields = {"{name}": row.attribute(name), "{index}": str(number + row.spaces.counted), "{id}": f"call{number:05}"}
    return re.sub(r"\{(?:name|index|id)\}", lambda found: fields[found[0]], header)


def _arguments(row: Format, given: dict[str, Any]) -> str:
    match row.arguments:
        case Named(lead=lead, tail=tail):
            return lead + _dumped(given) + tail
        case Params() as kind:
            if not given:
                return row.spaces.bare
            made = (_parameter(row, kind, key, value) for key, value in given.items())
            return row.spaces.named + row.spaces.after.join(made) + row.spaces.ended
        case Typed(quote=quote):
            return _typed(given, quote)
        case Elements(mark=mark):
            return "".join(_element(mark, key, value) for key, value in given.items())
        case _:
            raise ValueError(f"{row.name} has no marks")


def _parameter(row: Format, kind: Params, key: str, value: Any) -> str:
    text = value if isinstance(value, str) else _dumped(value)
    if value is None or isinstance(value, bool):
        text = row.spaces.words[(True, False, None).index(value)]
    elif row.spaces.python and not isinstance(value, str):
        text = repr(value)
    if kind.cdata and isinstance(value, str) and re.search(r"[<&\n]", value):
        text = f"<![CDATA[{text}]]>"
    around = "\n" if kind.trims else ""
    word = ""
    if kind.kind_end:
        word = (kind.text_kind if isinstance(value, str) else _word(kind, value)) + kind.kind_end
    lead = f"{kind.key}{row.attribute(key)}{kind.key_end}{word}{row.spaces.valued}{kind.value}"
    return f"{lead}{around}{text}{around}{kind.value_end}"


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
