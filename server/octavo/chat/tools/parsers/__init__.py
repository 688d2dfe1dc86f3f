"""Readers of tool calls: one for each kind of arguments that a row of the table of formats has."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from octavo.chat.tools.formats.row import Elements, Format, Harmony, Json, JsonKey, Named, Params, Python, Typed
from octavo.chat.tools.parsers.core import CallPiece, Piece, Reasoning, ToolParser, overlap
from octavo.chat.tools.parsers.element_calls import ElementsReader
from octavo.chat.tools.parsers.forced import JsonListParser, NamedCallParser
from octavo.chat.tools.parsers.format_reader import FormatReader, MarksReader
from octavo.chat.tools.parsers.harmony import HarmonyParser
from octavo.chat.tools.parsers.json_calls import JsonKeyReader, JsonReader, NamedReader
from octavo.chat.tools.parsers.param_calls import ParamsReader
from octavo.chat.tools.parsers.pythonic import PythonReader
from octavo.chat.tools.parsers.typed_calls import TypedReader

_READERS: dict[type, type[FormatReader]] = {
    Json: JsonReader,
    JsonKey: JsonKeyReader,
    Named: NamedReader,
    Params: ParamsReader,
    Python: PythonReader,
    Typed: TypedReader,
    Elements: ElementsReader,
}


def reader_of(row: Format, names: Collection[str] | Mapping[str, Any] = ()) -> ToolParser:
    """A reader of one answer in a format. ``names`` are the tools' names, or the schemas of their arguments by name."""
    if isinstance(row.arguments, Harmony):
        return HarmonyParser(names)
    return _READERS[type(row.arguments)](row, names)


def reader_of_marks(row: Format) -> ToolParser:
    """A reader of one answer without calls, whose texts stand between the row's marks."""
    return MarksReader(replace(row, section=("", ""), call="", also=(), known_only=False))
