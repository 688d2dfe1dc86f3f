"""Find a row's calls as one template spells them: templates of a family differ in white space and ids. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from octavo.chat.tools.formats.row import (
    JSON_WORDS,
    PYTHON_WORDS,
    Elements,
    Format,
    Harmony,
    Json,
    JsonKey,
    Named,
    Params,
    Python,
    Typed,
)
from octavo.chat.tools.formats.writer import Call, write_call, write_calls, write_header

_SPACE = re.compile(r"\s*")
_NUMBER = re.compile(r"\d*")
_ID = re.compile(r"[A-Za-z0-9]*")
_FIELD = re.compile(r"(\{index\}|\{id\})")
_ENOUGH = 2  # turns, of which one has arguments
_MAX_KIND = 16  # characters of the word for a value's kind


def suffixed(row: Format, text: str) -> Format:
    """The row with the suffix that a template has in the row's marks, where it writes a call in ``text``."""
    if not row.suffix:
        return row
    before, _, behind = row.call_end.partition(row.suffix)
    found = re.search(rf"{re.escape(before)}((?::[^<>{{}}()\s]+)?){re.escape(behind)}", text)
    made: Format = row if found is None else _replaced(row, row.suffix, found[1])
    return made


def _replaced(value: Any, old: str, new: str) -> Any:
    """A text, or all texts of a row, with one part in place of another."""
    if isinstance(value, str):
        return value.replace(old, new)
    if isinstance(value, tuple):
        return tuple(_replaced(item, old, new) for item in value)
    if isinstance(value, Format | Params):
        return replace(value, **{name: _replaced(part, old, new) for name, part in vars(value).items()})
    return value


def spelled(row: Format, turns: Iterable[tuple[Sequence[Call], str]]) -> Format:
    """The row with the gaps of a template, which writes each turn's calls in a text; as it is where too few tell.
    Templates that write values in a way of their own, as Python, have the gaps of the other turns."""
    if isinstance(row.arguments, Harmony):
        return row
    written = list(turns)
    several = sum(len(turn[0]) > 1 for turn in written)
    for variant in _variants(row):
        made = [(turn, gaps) for turn in written if (gaps := _gaps(variant, *turn)) is not None]
        found: dict[str, Any] = {}
        agree = all(found.setdefault(name, gap) == gap for _, gaps in made for name, gap in gaps.items())
        tells = len(made) >= min(_ENOUGH, len(written)) and sum(len(turn[0]) > 1 for turn, _ in made) == several
        if made and agree and tells:
            return replace(variant, gaps=replace(variant.spaces, **found))
    return row


def _variants(row: Format) -> Iterator[Format]:
    """The ways of a row, the one of its table first."""
    kind = row.arguments
    if isinstance(kind, Json) and kind.listed:
        yield row
        yield replace(row, arguments=replace(kind, listed=False))  # one object a line
    elif isinstance(kind, Python):
        yield row
        yield replace(row, arguments=replace(kind, as_json=True))
    elif isinstance(kind, Params) and kind.trims:
        yield row
        yield replace(row, arguments=replace(kind, trims=False))  # values to the letter
    elif isinstance(kind, Named) and kind.or_listed:
        for header in ("{name}[ARGS]", "{name}[CALL_ID]{id}[ARGS]", "{name}"):
            yield replace(row, header=header, arguments=replace(kind, or_listed=False))
        yield replace(row, section=(row.call, ""), call="", header="{name}", arguments=Json(listed=True))
    else:
        yield row


def worded(row: Format, given: dict[str, Any], text: str) -> Format:
    """The row with the words of a template for true, false and null, where it writes them as arguments in ``text``."""
    kind = row.arguments
    if row.gaps is None:
        return row
    if isinstance(kind, Elements):
        null = next(key for key in given if given[key] is None)
        return replace(row, gaps=replace(row.gaps, writes_null=f"{kind.mark}<{null}>" in text))
    if isinstance(kind, Typed):
        ways = {value: (rf"\b{key}:", r"\b") for key, value in given.items()}
    elif isinstance(kind, Params):
        told = rf"\w*{re.escape(kind.kind_end)}" if kind.kind_end else ""
        before, end = rf"{told}\s*{re.escape(kind.value)}\s*", rf"\s*{re.escape(kind.value_end)}"
        ways = {value: (re.escape(f"{kind.key}{key}{kind.key_end}") + before, end) for key, value in given.items()}
    else:
        return row
    found = []
    for value, plain, python in zip((True, False, None), JSON_WORDS, PYTHON_WORDS, strict=True):
        before, end = ways[value]
        found.append(plain if re.search(f"{before}{python}{end}", text) is None else python)
    return replace(row, gaps=replace(row.gaps, words=(found[0], found[1], found[2])))


class _OtherwiseError(Exception):
    """The text is not what the row writes."""


class _Scan:
    """Goes over what a template writes of calls."""

    def __init__(self, text: str, at: int) -> None:
        self.text, self.at = text, at
        self.gaps: dict[str, Any] = {}

    def found(self, name: str, value: Any) -> None:
        """Note what the template writes; of one name it is always the same."""
        if self.gaps.setdefault(name, value) != value:
            raise _OtherwiseError

    def read(self, literal: str) -> None:
        """Read what comes next."""
        if not self.text.startswith(literal, self.at):
            raise _OtherwiseError
        self.at += len(literal)

    def run(self, pattern: re.Pattern[str]) -> str:
        """Read what a pattern takes."""
        run = pattern.match(self.text, self.at)
        assert run is not None
        self.at = run.end()
        return run.group()

    def gap(self, name: str) -> None:
        """Read white space."""
        self.found(name, self.run(_SPACE))

    def fields(self, text: str, number: int) -> None:
        """Read a text with the number or the id of a call."""
        for part in _FIELD.split(text):
            if part == "{index}":
                told = self.run(_NUMBER)
                if not told:
                    raise _OtherwiseError
                self.found("counted", int(told) - number)
            elif part == "{id}":
                self.run(_ID)
            else:
                self.read(part)


def _gaps(row: Format, calls: Sequence[Call], text: str) -> dict[str, Any] | None:
    """The gaps in which a text that holds these calls is what the row writes; None where it is not."""
    begin = row.addressed.replace("{name}", calls[0][0]) or row.around[0] or row.call or ("[" if row.listed else "{")
    begin = "[" if isinstance(row.arguments, Python) and not row.around[0] else begin
    at = text.find(begin)
    while at >= 0:
        scan = _Scan(text, at)
        try:
            _turn(scan, row, calls)
        except _OtherwiseError:
            at = text.find(begin, at + 1)
        else:
            return scan.gaps
    return None


def _turn(scan: _Scan, row: Format, calls: Sequence[Call]) -> None:
    begin, end = ("", "") if row.each else row.around
    if isinstance(row.arguments, Python):
        scan.read(write_calls(row, calls))
        return
    if begin:
        scan.read(begin)
        scan.gap("opened")
    if row.listed:
        scan.read("[")
        scan.gap("bracket")
    for number, call in enumerate(calls):
        if number and row.listed:
            scan.read(",")
            scan.found("comma", "," + scan.run(_SPACE))
        elif number and row.addressed:
            scan.read(f"{row.thoughts[1]}{row.texts[0]} ")
        elif number:
            scan.gap("between")
        _one(scan, row, call, number)
    if row.listed:
        scan.gap("last")
        scan.read("]")
    if end:
        scan.gap("closed")
        scan.read(end)


def _one(scan: _Scan, row: Format, call: Call, number: int) -> None:
    """A call, and the section around it where each has one of its own."""
    if row.addressed:
        scan.read(row.addressed.replace("{name}", call[0]))
    if row.each:
        scan.read(row.section[0])
        scan.gap("opened")
    kind = row.arguments
    if isinstance(kind, Json):
        _object(scan, kind, call, number)
    elif isinstance(kind, Params):
        scan.fields(row.call + row.header.replace("{name}", call[0]), number)
        _parameters(scan, kind, call[1])
        scan.read(row.call_end)
    elif isinstance(kind, JsonKey):
        scan.read(write_call(row, call, number))
    else:
        scan.fields(row.call + row.header.replace("{name}", call[0]), number)
        scan.read(write_call(row, call, number).removeprefix(row.call + write_header(row, call[0], number)))
    if row.each and row.section[1]:
        scan.gap("closed")
        scan.read(row.section[1])


def _object(scan: _Scan, kind: Json, call: Call, number: int) -> None:
    """An object of a call, which may have an id or a number beside name and arguments."""
    begin = scan.at
    try:
        made, scan.at = json.JSONDecoder().raw_decode(scan.text, begin)
    except ValueError:
        raise _OtherwiseError from None
    if not isinstance(made, dict) or (made.get(kind.name_key), made.get(kind.arguments_key)) != call:
        raise _OtherwiseError
    words = {kind.name_key: "{name}", kind.arguments_key: "{arguments}"}
    told = {kind.name_key: json.dumps(call[0]), kind.arguments_key: json.dumps(call[1], ensure_ascii=False)}
    for key, value in made.items():
        if key not in words:
            words[key] = '"{index}"' if str(value).isdigit() else '"{id}"'
            told[key] = json.dumps(value)
            if str(value).isdigit():
                scan.found("counted", int(value) - number)
    if scan.text[begin : scan.at] != "{" + ", ".join(f'"{key}": {told[key]}' for key in made) + "}":
        raise _OtherwiseError
    scan.found("object", "{" + ", ".join(f'"{key}": {words[key]}' for key in made) + "}")


def _parameters(scan: _Scan, kind: Params, given: dict[str, Any]) -> None:
    scan.gap("named" if given else "bare")
    for at, (key, value) in enumerate(given.items(), 1):
        scan.read(f"{kind.key}{key}{kind.key_end}")
        if kind.kind_end:
            place = scan.text.find(kind.kind_end, scan.at, scan.at + _MAX_KIND + len(kind.kind_end))
            if place < 0:
                raise _OtherwiseError
            scan.at = place + len(kind.kind_end)
        if kind.value:
            scan.gap("valued")
        around = "\n" if kind.trims else ""
        scan.read(kind.value + around)
        _value(scan, value)
        scan.read(around + kind.value_end)
        scan.gap("after" if at < len(given) else "ended")


def _value(scan: _Scan, value: Any) -> None:
    """A value in one of the ways in which templates write it."""
    if isinstance(value, str):
        scan.read(value)
        return
    ways = (json.dumps(value, ensure_ascii=False), json.dumps(value, separators=(",", ":")), repr(value))
    way = next((way for way in ways if scan.text.startswith(way, scan.at)), ways[0])
    if isinstance(value, dict):
        scan.found("python", way == ways[2])
    scan.read(way)
