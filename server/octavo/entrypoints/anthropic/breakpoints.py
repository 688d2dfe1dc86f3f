"""Marks a request where its client has put ``cache_control``. Pure."""

from __future__ import annotations

from typing import Any

from octavo.chat.breakpoints import MOST, mark
from octavo.entrypoints.anthropic.protocol import (
    ImageBlockParam,
    MessagesRequest,
    TextBlockParam,
    ToolParam,
    ToolResultBlockParam,
    ToolUseBlockParam,
)
from octavo.entrypoints.errors import bad_request

_SECONDS = {None: 300.0, "5m": 300.0, "1h": 3600.0}


def seconds_of(control: Any) -> float:
    """The time for which ``cache_control`` keeps what is before it."""
    return _SECONDS[control.ttl]


def marked(body: MessagesRequest) -> tuple[MessagesRequest, list[float]]:
    """The request with marks, in the order of the prompt, and the seconds of each. Raises APIError for more than are
    taken."""
    seconds: list[float] = []

    def with_marks(blocks: Any) -> list[Any]:
        found: list[Any] = []
        for block in blocks or ():
            control = getattr(block, "cache_control", None)
            content = getattr(block, "content", None)
            if isinstance(block, ToolResultBlockParam) and content:
                block = block.model_copy(update={"content": with_marks(content)})
            found.append(block)
            if control is not None:
                found[-1:] = _marked(block, mark(len(seconds)))
                seconds.append(seconds_of(control))
        return found

    tools, system = with_marks(body.tools), with_marks(body.system)
    messages = [message.model_copy(update={"content": with_marks(message.content)}) for message in body.messages]
    if len(seconds) > MOST:
        raise bad_request(
            f"cache_control takes at most {MOST} places in a request, got {len(seconds)}", "cache_control"
        )
    return body.model_copy(update={"tools": tools, "system": system, "messages": messages}), seconds


def _marked(block: Any, text: str) -> list[Any]:
    """Write a mark behind a block, or at its end."""
    if isinstance(block, TextBlockParam):
        return [block.model_copy(update={"text": block.text + text})]
    if isinstance(block, ToolResultBlockParam):
        return [block.model_copy(update={"content": _ended(list(block.content or ()), text)})]
    if isinstance(block, ToolUseBlockParam):
        return [block.model_copy(update={"input": {**block.input, text: True}})]
    if isinstance(block, ImageBlockParam):
        return [block, TextBlockParam(type="text", text=text)]
    if isinstance(block, ToolParam):
        return [block, ToolParam(name=text, input_schema={})]
    return [block]


def _ended(parts: list[Any], text: str) -> list[Any]:
    if parts and isinstance(parts[-1], TextBlockParam):
        return [*parts[:-1], *_marked(parts[-1], text)]
    return [*parts, TextBlockParam(type="text", text=text)]
