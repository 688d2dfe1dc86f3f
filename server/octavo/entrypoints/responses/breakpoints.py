"""Marks items where their client has put ``prompt_cache_breakpoint``. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.chat.breakpoints import mark
from octavo.entrypoints.fields.prompt_cache import breakpoint_seconds, latest
from octavo.entrypoints.responses.protocol import CallOutputParam, Item, MessageParam, ResponsesRequest, TextPartParam


def marked(body: ResponsesRequest, items: Sequence[Item]) -> tuple[list[Item], list[float]]:
    """The items with marks, and the time in seconds of each; 0 for those that are too many."""
    seconds: list[float] = []

    def with_marks(parts: Sequence[Any]) -> list[Any]:
        found: list[Any] = []
        for part in parts:
            found.append(part)
            given = getattr(part, "prompt_cache_breakpoint", None)
            if given is None:
                continue
            text = mark(len(seconds))
            seconds.append(breakpoint_seconds(body, given))
            if isinstance(part, TextPartParam):
                found[-1] = part.model_copy(update={"text": part.text + text})
            else:
                found.append(TextPartParam(type="input_text", text=text))
        return found

    copies: list[Item] = []
    for item in items:
        if isinstance(item, MessageParam):
            item = item.model_copy(update={"content": with_marks(item.content)})
        elif isinstance(item, CallOutputParam):
            item = item.model_copy(update={"output": with_marks(item.output)})
        copies.append(item)
    return copies, latest(body, seconds)
