"""The messages of a conversation, checked and made into what chat templates expect. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from octavo.errors import FieldError
from octavo.text.content_format import PARTS
from octavo.text.shown import shown

_INSTRUCTING = ("system", "developer")
REASONING = ("reasoning_content", "reasoning")  # names of thoughts: the older one, and vLLM's and OpenRouter's
_TEXTS = ("text", "input_text", "output_text", "refusal")
# Claude Code puts a line into its instructions that differs in every request: with it no prefix would be found in the
# cache. The line is the header's name and pairs; words behind those are instructions again.
_HEADER = "-billing-header:"
_NAME = r"x-(?:anthropic|ahthropic)-billing-header:"  # some versions misspell it
_PAIR = r"[ \t]*[\w.-]+=[^;\s]*"
_END = r"[ \t]*(?=\r?$)"
_BILLING = re.compile(rf"[ \t]*{_NAME}(?:(?:{_PAIR};)+[ \t]*(?:{_PAIR}{_END})?|[ \t]*[^;\s]*{_END})")

# Reads a part that is no text, whose field is the second argument: an image, or None for what is none.
ReadImage = Callable[[Any, str], Any]


def read_messages(messages: Sequence[Mapping[str, Any]], read_image: ReadImage) -> list[dict[str, Any]]:
    """Each message as `read_message` makes it, without instructions that are lines for billing alone. Raises
    FieldError."""
    found = (read_message(message, f"messages.{at}", read_image) for at, message in enumerate(messages))
    return [message for message in found if message is not None]


def read_message(message: Mapping[str, Any], where: str, read_image: ReadImage) -> dict[str, Any] | None:
    """The message with its texts joined, what is null left out, arguments of tool calls as objects and thoughts under
    both their names. One with images has all its parts under `PARTS`. None for instructions of nothing but lines for
    billing. ``where`` is its field. Raises FieldError."""
    role = message.get("role")
    if not isinstance(role, str):
        raise FieldError(f"{where}.role must be a string, got {shown(role)}", f"{where}.role")
    checked = _with_texts(message, where)
    calls = checked.get("tool_calls")
    if calls is not None:
        if role != "assistant":
            raise FieldError(
                f"{where}.tool_calls is allowed in assistant messages only; drop it", f"{where}.tool_calls"
            )
        checked["tool_calls"] = _read_calls(calls, f"{where}.tool_calls")
        if not checked["tool_calls"]:
            del checked["tool_calls"]
    content = checked.get("content")
    if content is None:
        if role != "assistant":  # which may consist of calls or a refusal, or be empty
            raise FieldError(f"{where}.content is required in messages of every role but assistant", f"{where}.content")
        content = checked.get("refusal", "")
        if not isinstance(content, str):
            raise FieldError(f"{where}.refusal must be a string, got {shown(content)}", f"{where}.refusal")
    parts = _parts(content, f"{where}.content", read_image)
    if role in _INSTRUCTING and parts:
        parts = without_billing(parts)
        if not parts:
            return None
    checked["content"] = "\n".join(part for part in parts if isinstance(part, str))
    checked.pop(PARTS, None)
    if not all(isinstance(part, str) for part in parts):
        checked[PARTS] = parts
    return checked


def _with_texts(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The message without what is null, its fields that are texts checked."""
    names = REASONING if message["role"] == "assistant" else ()
    for key in ("name", "tool_call_id", *names):
        if not isinstance(message.get(key), str | None):
            raise FieldError(f"{where}.{key} must be a string, got {shown(message[key])}", f"{where}.{key}")
    checked = {key: value for key, value in message.items() if value is not None}
    thoughts = next((text for name in names if (text := checked.get(name))), None)
    # Templates read one name or the other.
    return checked | dict.fromkeys(REASONING, thoughts) if thoughts else checked


def without_billing(parts: Sequence[Any]) -> list[Any]:
    """The parts of instructions without lines for Anthropic's billing; a text of nothing else is left out."""
    found = []
    for part in parts:
        kept = _without_billing(part) if isinstance(part, str) else part
        if kept or kept == part:
            found.append(kept)
    return found


def num_billing_lines(messages: Sequence[Mapping[str, Any]]) -> int:
    """The lines for billing in the instructions among messages that were not read yet."""
    count = 0
    for message in messages:
        content = message.get("content") if message.get("role") in _INSTRUCTING else None
        for part in [content] if isinstance(content, str) else content if isinstance(content, list) else ():
            text = part.get("text") if isinstance(part, Mapping) else part
            if isinstance(text, str) and _HEADER in text:
                count += sum(_BILLING.match(line) is not None for line in text.split("\n"))
    return count


def _without_billing(text: str) -> str:
    if _HEADER not in text:
        return text
    kept = []
    for line in text.split("\n"):
        billing = _BILLING.match(line)
        rest = line[billing.end() :] if billing else line
        if not billing or rest.strip():
            kept.append(rest)
    return "\n".join(kept)


def for_template(messages: list[dict[str, Any]], template: str) -> list[dict[str, Any]]:
    """The messages, with role "developer" as "system" for templates that do not know it."""
    if "developer" in template:
        return messages
    return [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]


def object_of(arguments: str) -> Any:
    """The value of arguments given as JSON text, since templates serialise them themselves; "" if it is invalid.

    Arguments that were cut off at max_tokens are parsed as far as they go.
    """
    if not arguments.strip():
        return {}
    try:
        return json.loads(arguments)
    except RecursionError:
        return ""
    except ValueError as error:
        if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data":
            return ""  # not cut off but too long
    from pydantic_core import from_json

    try:
        return from_json(arguments, allow_inf_nan=False, allow_partial="trailing-strings")
    except (ValueError, TypeError):
        return ""


def _parts(content: Any, where: str, read_image: ReadImage) -> list[Any]:
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise FieldError(f"{where} must be a string or a list of parts, got {shown(content)}", where)
    return [
        part if isinstance(part, str) else _part(part, f"{where}.{i}", read_image) for i, part in enumerate(content)
    ]


def _part(part: Any, where: str, read_image: ReadImage) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in _TEXTS:
        text = part.get("refusal" if kind == "refusal" else "text")
        if isinstance(text, str):
            return text
        raise FieldError(f"{where}.text must be a string, got {shown(text)}", f"{where}.text")
    image = read_image(part, where)
    if image is not None:
        return image
    if isinstance(kind, str):
        raise FieldError(
            f"{where}.type {shown(kind)} is not supported: send parts of type text or image_url", f"{where}.type"
        )
    raise FieldError(f'{where} must be an object with a "type", got {shown(part)}', where)


def _read_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise FieldError(f"{where} must be a list, got {shown(calls)}", where)
    return [_read_call(call, f"{where}.{i}") for i, call in enumerate(calls)]


def _read_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise FieldError(f"{where} must be an object with function.name, got {shown(call)}", where)
    arguments = function.get("arguments")
    arguments = object_of(arguments) if isinstance(arguments, str) else arguments
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        where = f"{where}.function.arguments"
        raise FieldError(f"{where} must be a JSON object, got {shown(function['arguments'])}", where)
    return {**call, "function": {**function, "arguments": arguments}}
