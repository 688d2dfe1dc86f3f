"""The input of a request for decisions and its questions, as OpenAI writes them, checked. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.errors import FieldError
from octavo.text.messages import ReadImage
from octavo.text.shown import shown

MAX_QUESTIONS = 400
MIN_OPTIONS, MAX_OPTIONS = 2, 255
MAX_JSON_LEVELS, MAX_JSON_VALUES, MAX_JSON_BYTES = 32, 10_000, 256 << 10
KINDS = ("predicate", "choice", "score")
ROLES = ("user", "assistant", "system", "developer")
TEXTS = ("input_text", "output_text", "text", "refusal")
_CALLS = ("function_call", "custom_tool_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
ITEMS = ("message", *_CALLS, *_OUTPUTS)


@dataclass(frozen=True)
class Option:
    """One of the answers that a question allows. ``value``: a choice's value, a level's label, or true and false."""

    value: str | bool
    text: str
    description: str | None = None


@dataclass(frozen=True)
class Question:
    """A question. ``instructions``: texts and images, in order."""

    kind: str
    instructions: list[Any]
    options: list[Option]
    name: str | None = None


def read_questions(given: Any, read_image: ReadImage) -> list[Question]:
    """The questions. ``read_image`` reads a part that is no text, whose field is its second argument. Raises
    FieldError."""
    _count(given, "questions", 1, MAX_QUESTIONS)
    return [_question(one, f"questions.{at}", read_image) for at, one in enumerate(given)]


def read_input(given: Any, read_image: ReadImage) -> list[dict[str, Any]]:
    """The input as messages of a chat, whose contents are lists of texts and images. Raises FieldError."""
    if isinstance(given, str):
        return [{"role": "user", "content": [given]}]
    if not isinstance(given, Sequence) or not given:
        raise FieldError(f"input must be a text or a list of messages and calls, got {shown(given)}", "input")
    messages, calls = list[dict[str, Any]](), set[str]()
    for at, item in enumerate(given):
        _add_item(messages, item, f"input.{at}", calls, read_image)
    return messages


def _question(given: Any, where: str, read_image: ReadImage) -> Question:
    kind = _object(given, where).get("type")
    if kind not in KINDS:
        raise FieldError(f"{where}.type must be one of {', '.join(KINDS)}, got {shown(kind)}", f"{where}.type")
    name = _text(given, "name", where) if given.get("name") is not None else None
    if given.get("instructions") is None:
        raise FieldError(f"{where}.instructions is required: ask something", f"{where}.instructions")
    instructions = _parts(given["instructions"], f"{where}.instructions", read_image)
    if not any(instructions):
        raise FieldError(f"{where}.instructions must not be empty: ask something", f"{where}.instructions")
    if kind == "predicate":
        return Question(kind, instructions, [Option(True, "true"), Option(False, "false")], name)
    field = "choices" if kind == "choice" else "levels"
    _count(given.get(field), f"{where}.{field}", MIN_OPTIONS, MAX_OPTIONS)
    read = _choice if kind == "choice" else _level
    options = [read(one, f"{where}.{field}.{at}") for at, one in enumerate(given[field])]
    seen = dict[tuple[type, Any], int]()
    for at, option in enumerate(options if kind == "choice" else ()):
        first = seen.setdefault((type(option.value), option.value), at)
        if first != at:
            path = f"{where}.{field}.{at}.value"
            raise FieldError(f"{path} {shown(option.value)} is that of choice {first}, too; drop one", path)
    return Question(kind, instructions, options, name)


def _choice(given: Any, where: str) -> Option:
    value = _object(given, where).get("value")
    if not isinstance(value, str | bool) or value == "":
        raise FieldError(f"{where}.value must be a text or a boolean, got {shown(value)}", f"{where}.value")
    if isinstance(value, bool):
        text = "true" if value else "false"
    else:  # a text that reads as a boolean is told from it by its quotes
        text = json.dumps(value) if value in ("true", "false") else value
    return Option(value, text, _description(given, where))


def _level(given: Any, where: str) -> Option:
    label = _text(_object(given, where), "label", where)
    if not label:
        raise FieldError(f"{where}.label must not be empty: name the level", f"{where}.label")
    return Option(label, label, _description(given, where))


def _description(given: Mapping[str, Any], where: str) -> str | None:
    return None if given.get("description") is None else _text(given, "description", where)


def _object(given: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise FieldError(f"{where} must be an object, got {shown(given)}", where)
    return given


def _text(given: Mapping[str, Any], name: str, where: str) -> str:
    value = given.get(name)
    if not isinstance(value, str):
        raise FieldError(f"{where}.{name} must be a string, got {shown(value)}", f"{where}.{name}")
    return value


def _count(given: Any, where: str, least: int, most: int) -> None:
    if not isinstance(given, list | tuple):
        raise FieldError(f"{where} must be a list, got {shown(given)}", where)
    if not least <= len(given) <= most:
        raise FieldError(f"{where} takes between {least} and {most}, got {len(given)}", where)


def _add_item(messages: list[dict[str, Any]], given: Any, where: str, calls: set[str], read_image: ReadImage) -> None:
    """Add what an item of the input says to the messages; ``calls`` are the ids of the calls before it."""
    item = _object(given, where)
    kind = item.get("type") or ("message" if "role" in item else None)
    if kind == "message":
        role = item.get("role")
        if role not in ROLES:
            raise FieldError(f"{where}.role must be one of {', '.join(ROLES)}, got {shown(role)}", f"{where}.role")
        messages.append({"role": role, "content": _parts(item.get("content"), f"{where}.content", read_image)})
    elif kind in _CALLS:
        calls.add(call_id := _text(item, "call_id", where))
        call = {"id": call_id, "type": "function", "function": _called(item, kind, where)}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": [""]})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind in _OUTPUTS:
        call_id = _text(item, "call_id", where)
        if call_id not in calls:
            path = f"{where}.call_id"
            raise FieldError(f"{path} {shown(call_id)} is of no call before it; send the call as well", path)
        output = _parts(item.get("output"), f"{where}.output", read_image)
        messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
    else:
        raise FieldError(f"{where}.type must be one of {', '.join(ITEMS)}, got {shown(kind)}", f"{where}.type")


def _called(item: Mapping[str, Any], kind: str, where: str) -> dict[str, Any]:
    """The function that an item calls, as a chat has it."""
    name, space = _text(item, "name", where), item.get("namespace")
    if space is not None:
        name = f"{_text(item, 'namespace', where)}__{name}"
    if kind == "custom_tool_call":
        return {"name": name, "arguments": {"input": _text(item, "input", where)}}
    text = _text(item, "arguments", where)
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        path = f"{where}.arguments"
        raise FieldError(f"{path} must be a JSON object as text, got {shown(text)}", path)
    return {"name": name, "arguments": arguments}


def _parts(given: Any, where: str, read_image: ReadImage) -> list[Any]:
    """Texts and images, in order; JSON is a text."""
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list | tuple):
        raise FieldError(f"{where} must be a text or a list of parts, got {shown(given)}", where)
    return [_part(part, f"{where}.{at}", read_image) for at, part in enumerate(given)]


def _part(given: Any, where: str, read_image: ReadImage) -> Any:
    kind = _object(given, where).get("type")
    if kind in TEXTS:
        return _text(given, "refusal" if kind == "refusal" else "text", where)
    if kind == "input_json":
        return _json_text(given.get("data"), f"{where}.data")
    image = read_image(given, where)
    if image is None:
        raise FieldError(
            f"{where}.type must be input_text, input_image or input_json, got {shown(kind)}", f"{where}.type"
        )
    return image


def _json_text(data: Any, where: str) -> str:
    """An object or a list of objects as compact JSON, within OpenAI's limits."""
    rows = data if isinstance(data, list) else [data]
    if not all(isinstance(row, dict) for row in rows):
        raise FieldError(f"{where} must be an object or a list of objects, got {shown(data)}", where)
    count, level = 0, [data]
    for _ in range(MAX_JSON_LEVELS + 1):
        count += len(level)
        below = [one for one in level if isinstance(one, dict | list)]
        level = [
            one for container in below for one in (container.values() if isinstance(container, dict) else container)
        ]
        if not below or count > MAX_JSON_VALUES:
            break
    else:
        raise FieldError(f"{where} is nested in more than {MAX_JSON_LEVELS} levels; send a flatter one", where)
    if count > MAX_JSON_VALUES:
        raise FieldError(f"{where} holds more than {MAX_JSON_VALUES} values; send fewer", where)
    try:
        text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError):
        raise FieldError(f"{where} has a value that JSON does not know; send plain numbers and texts", where) from None
    if (size := len(text.encode(errors="surrogatepass"))) > MAX_JSON_BYTES:
        raise FieldError(f"{where} has {size} bytes, and at most {MAX_JSON_BYTES} are read; send less", where)
    return text
