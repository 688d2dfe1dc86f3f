"""Find out by rendering what a template writes between a prompt, thoughts and calls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from octavo.chat.structured import Frame
from octavo.chat.tools.formats.row import Format
from octavo.chat.tools.formats.writer import write_calls
from octavo.errors import FieldError
from octavo.text.chat_template import ChatTemplateError
from octavo.text.messages import REASONING

PROBED = "now"  # the tool that is called
_USER = {"role": "user", "content": "Is it so?"}
_CALL = {"id": "callnum00", "type": "function", "function": {"name": PROBED, "arguments": {}}}
_TURN: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_THOUGHT = "I wonder about it."


def frame_of(text_of: Callable[[list[dict[str, Any]]], str], row: Format) -> Frame:
    """The frame of an answer that is calls. ``text_of`` gives the text of messages, with what opens an answer where the
    last is the user's."""
    lead: str | None = None
    thoughts: tuple[str, str] | None = None
    with suppress(ChatTemplateError, FieldError):
        prompt = text_of([_USER])
        lead = _between(prompt, text_of([_USER, _TURN]), row)
        told = _between(prompt, text_of([_USER, {**_TURN, **dict.fromkeys((*REASONING, "thinking"), _THOUGHT)}]), row)
        if told is not None and told.count(_THOUGHT) == 1:
            before, _, behind = told.partition(_THOUGHT)
            thoughts = before, behind
    return Frame(lead, thoughts)


def _between(prompt: str, whole: str, row: Format) -> str | None:
    """The text between a prompt and the calls behind it; None where the prompt is not the beginning of the whole."""
    if not whole.startswith(prompt):
        return None
    behind = whole[len(prompt) :]
    written = write_calls(row, [(PROBED, {})])
    places = [behind.find(written)] if written in behind else [behind.find(mark) for mark in row.markers]
    if row.addressed:
        places = [behind.find(row.addressed.replace("{name}", PROBED))]
    return next((behind[:place] for place in places if place >= 0), None)
