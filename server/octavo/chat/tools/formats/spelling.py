"""Find a row's line breaks as one template writes them: templates of a family differ in these. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product

from octavo.chat.tools.formats.row import Format, Harmony, Params
from octavo.chat.tools.formats.writer import Call, write_calls

_BREAKS = ("", "\n")
_ENOUGH = 2  # turns, of which one has arguments


def spelled(row: Format, turns: Iterable[tuple[Sequence[Call], str]]) -> Format:
    """The row with the line breaks of a template, which writes each turn's calls in a text; as it is where too few
    tell. Templates that write values in a way of their own, as Python, have the breaks of the other turns."""
    if isinstance(row.arguments, Harmony):
        return row
    written = list(turns)
    several = [turn for turn in written if len(turn[0]) > 1]
    found = [(sum(_writes(variant, turn) for turn in written), variant) for variant in _variants(row)]
    count, best = max(found, key=lambda pair: pair[0])
    tells = count >= min(_ENOUGH, len(written)) and all(_writes(best, turn) for turn in several)
    return replace(best, exact=True) if tells and count else row


def _writes(row: Format, turn: tuple[Sequence[Call], str]) -> bool:
    return write_calls(row, turn[0]) in turn[1]


def _variants(row: Format) -> Iterator[Format]:
    yield row
    kind = row.arguments
    if not isinstance(kind, Params):
        yield from (replace(row, between=between) for between in _BREAKS)
        return
    for between, newline, lead in product(_BREAKS, _BREAKS, _BREAKS if kind.value else ("",)):
        yield replace(row, between=between, arguments=replace(kind, newline=newline, value=lead + kind.value))
