"""A call inside another: every format reads the same whichever way the text is cut, and nothing of it is lost."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.chat.tools.formats.row import Harmony, Json, JsonKey, Named, Python, Typed
from octavo.chat.tools.formats.table import TOOL_FORMATS
from octavo.chat.tools.formats.writer import write_calls
from octavo.chat.tools.parsers import reader_of
from octavo.chat.tools.parsers.core import CallPiece

TEXT = {"type": "object", "properties": {"text": {"type": "string"}}}
SCHEMAS = {"note": TEXT, "clock": TEXT}
NAMES = [name for name, row in TOOL_FORMATS.items() if not isinstance(row.arguments, Harmony)]
INNER: tuple[str, Any] = ("clock", {"text": "noon"})


def read(name: str, text: str, step: int) -> tuple[str, list[tuple[str, str]], int]:
    """Content, calls, and how many were malformed."""
    reader = reader_of(TOOL_FORMATS[name], SCHEMAS)
    pieces = [piece for at in range(0, len(text), step) for piece in reader.feed(text[at : at + step])]
    content, calls = "", list[list[str]]()
    for piece in [*pieces, *reader.finish()]:
        if not isinstance(piece, CallPiece):
            content += piece if isinstance(piece, str) else piece.text
            continue
        if piece.name is not None:
            calls.append([piece.name, ""])
        calls[-1][1] += piece.arguments
    return content, [(called, arguments) for called, arguments in calls], reader.num_malformed


def read_in_all_cuts(name: str, text: str) -> tuple[str, list[tuple[str, str]], int]:
    whole = read(name, text, len(text))
    assert all(read(name, text, step) == whole for step in (1, 2, 3, 7, 19))
    return whole


@pytest.mark.parametrize("name", NAMES)
def test_a_call_that_another_breaks_off_is_content_and_the_other_a_call(name):
    """Holds for formats with marks of their own. JSON that another JSON breaks off is no call, nor is the other."""
    row = TOOL_FORMATS[name]
    inner, outer = write_calls(row, [INNER]), write_calls(row, [("note", {"text": "x"})])
    begun = outer[: outer.index("note") + 4]
    content, calls, malformed = read_in_all_cuts(name, begun + inner)
    if calls:
        assert content == begun.rstrip() and [(called, json.loads(given)) for called, given in calls] == [INNER]
    else:
        assert content.split() == (begun + inner).removesuffix("<|message_sep|>").split()  # an answer's end
    assert malformed == (name != "muse_glimmer"), "there each message has one reader, and this one is no tool's"


@pytest.mark.parametrize("name", [name for name in NAMES if not isinstance(TOOL_FORMATS[name].arguments, Typed)])
def test_a_call_in_a_text_of_another_is_text(name):
    """Formats that quote their texts have it as it is. Others know the end of a text by the call's end behind it, so
    the text ends where the inner one's does, and what follows is content. Gemma's quotes cannot stand in a text."""
    row = TOOL_FORMATS[name]
    inner = write_calls(row, [INNER])
    content, ((called, arguments), *more), _ = read_in_all_cuts(name, write_calls(row, [("note", {"text": inner})]))
    given = json.loads(arguments) if arguments else {}
    if isinstance(row.arguments, Json | JsonKey | Named | Python):
        assert (called, given, content, more) == ("note", {"text": inner}, "", [])
    else:
        assert called == "note" and inner.startswith(given["text"].rstrip()) and not more
        assert given["text"] == inner or content.strip()
