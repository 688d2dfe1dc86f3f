"""The conversation of a chat request, and its messages checked and made into what chat templates expect. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from octavo.entrypoints.errors import bad_request, shown
from octavo.entrypoints.images import ImagePart
from octavo.multimodal.pieces import Pieces
from octavo.text.content_format import PARTS

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_MESSAGES = 10_000

_IMAGES = ("image_url", "input_image")
_OTHER_MEDIA = ("video", "video_url", "input_video", "audio", "audio_url", "input_audio", "file", "input_file")


@dataclass(frozen=True)
class FieldNames:
    """What errors call the fields of tools; by default as chat completions do."""

    function: str = "function."  # between tools.{i} and the fields of a function
    parameters: str = "parameters"
    choice: str = "tool_choice.function.name"
    allowed: str = "tool_choice.allowed_tools"
    required: str = "required"  # the tool_choice that demands a call
    tools: Sequence[str] = ()  # paths of the tools, where they are not tools.{i}

    def tool(self, index: int) -> str:
        """The path of a tool."""
        return self.tools[index] if self.tools else f"tools.{index}"

    def of_function(self, index: int, name: str) -> str:
        """The path of a field of a tool's function."""
        return f"{self.tool(index)}.{self.function}{self.parameters if name == 'parameters' else name}"


@dataclass
class Conversation:
    """What a chat request gives the chat template and the tool parser, in any dialect."""

    messages: list[dict[str, Any]]  # as check_messages returns them
    tools: list[dict[str, Any]] | None = None  # as OpenAI writes them, unchecked
    tool_choice: Any = None  # likewise
    parallel_tool_calls: bool | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    earlier_ids: list[int] = field(default_factory=list)  # tokens before those of the messages
    fields: FieldNames = FieldNames()

    @property
    def opens_answer(self) -> bool:
        """Whether the template opens a new message for the answer; by default unless the last one is continued."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt


def check_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with text parts joined and arguments of tool calls as objects. Raises APIError naming the message."""
    if not messages:
        raise bad_request("messages must not be empty: send at least one", "messages")
    if len(messages) > MAX_MESSAGES:
        raise bad_request(f"messages takes at most {MAX_MESSAGES}, got {len(messages)}", "messages")
    return [_check(message, f"messages.{i}") for i, message in enumerate(messages)]


def _check(message: dict[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        raise bad_request(f"{where}.role must be one of {', '.join(ROLES)}, got {shown(role)}", f"{where}.role")
    for key in ("name", "tool_call_id"):
        if not isinstance(message.get(key), str | None):
            raise bad_request(f"{where}.{key} must be a string, got {shown(message[key])}", f"{where}.{key}")
    checked = {key: value for key, value in message.items() if value is not None}
    calls = checked.get("tool_calls")
    if calls is not None:
        if role != "assistant":
            raise bad_request(
                f"{where}.tool_calls is allowed in assistant messages only; drop it", f"{where}.tool_calls"
            )
        checked["tool_calls"] = _check_calls(calls, f"{where}.tool_calls")
        if not checked["tool_calls"]:
            del checked["tool_calls"]
    content = checked.get("content")
    if content is None:
        if role != "assistant":  # which may consist of calls or a refusal, or be empty
            raise bad_request(
                f"{where}.content is required in messages of every role but assistant", f"{where}.content"
            )
        content = checked.get("refusal", "")
        if not isinstance(content, str):
            raise bad_request(f"{where}.refusal must be a string, got {shown(content)}", f"{where}.refusal")
    parts = _parts(content, f"{where}.content")
    checked["content"] = "\n".join(part for part in parts if isinstance(part, str))
    checked.pop(PARTS, None)
    if any(isinstance(part, ImagePart) for part in parts):
        checked[PARTS] = parts
    return checked


def _parts(content: Any, where: str) -> list[str | ImagePart]:
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise bad_request(f"{where} must be a string or a list of parts, got {shown(content)}", where)
    return [part if isinstance(part, str) else _part(part, f"{where}.{i}") for i, part in enumerate(content)]


def _part(part: Any, where: str) -> str | ImagePart:
    if isinstance(part, ImagePart):  # of a dialect that names it in its own way
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _IMAGES:
        return _image(part, f"{where}.image_url")
    if kind in _OTHER_MEDIA:
        name = kind.removeprefix("input_").removesuffix("_url")
        raise bad_request(f"{where}.type {shown(kind)} is not supported: no model reads {name} here", f"{where}.type")
    if kind in ("text", "input_text", "output_text", "refusal"):
        text = part.get("refusal" if kind == "refusal" else "text")
        if isinstance(text, str):
            return text
        raise bad_request(f"{where}.text must be a string, got {shown(text)}", f"{where}.text")
    if isinstance(kind, str):
        raise bad_request(
            f"{where}.type {shown(kind)} is not supported: send parts of type text or image_url",
            f"{where}.type",
        )
    raise bad_request(f'{where} must be an object with a "type", got {shown(part)}', where)


def _image(part: dict[str, Any], where: str) -> ImagePart:
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, dict) else given
    if not isinstance(url, str | Pieces):
        raise bad_request(f"{where} must be a url, or an object with one, got {shown(given)}", where)
    detail = given.get("detail") if isinstance(given, dict) else part.get("detail")
    if detail not in (None, "auto", "low", "high", "original"):
        raise bad_request(f"{where}.detail must be auto, low or high, got {shown(detail)}", f"{where}.detail")
    return ImagePart(where, url)


def images_of(messages: list[dict[str, Any]]) -> list[ImagePart]:
    """The images of checked messages, in order."""
    return [part for message in messages for part in message.get(PARTS, ()) if isinstance(part, ImagePart)]


def check_texts(messages: list[dict[str, Any]], images: list[ImagePart], placeholder: str) -> None:
    """Raises APIError for a text that holds what stands for an image in prompts, where there are images, too: which of
    them is one could not be told."""
    if not images or not placeholder:
        return
    for message in messages:
        if placeholder in message["content"]:
            own = [part for part in message.get(PARTS, ()) if isinstance(part, ImagePart)]
            words = (own or images)[0].where.split(".")
            field = "prompt" if words[0] == "images" else f"{words[0]}.{words[1]}.content" if own else words[0]
            raise bad_request(
                f"{field} has the text {placeholder}, which stands for an image; write it in another way", field
            )


def _check_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise bad_request(f"{where} must be a list, got {shown(calls)}", where)
    return [_check_call(call, f"{where}.{i}") for i, call in enumerate(calls)]


def _check_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request(f"{where} must be an object with function.name, got {shown(call)}", where)
    arguments = function.get("arguments")
    arguments = object_of(arguments) if isinstance(arguments, str) else arguments
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        where = f"{where}.function.arguments"
        raise bad_request(f"{where} must be a JSON object, got {shown(function['arguments'])}", where)
    return {**call, "function": {**function, "arguments": arguments}}


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
    try:
        return from_json(arguments, allow_inf_nan=False, allow_partial="trailing-strings")
    except (ValueError, TypeError):
        return ""


def for_template(messages: list[dict[str, Any]], template: str) -> list[dict[str, Any]]:
    """The messages, with role "developer" as "system" for templates that do not know it."""
    if "developer" in template:
        return messages
    return [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]
