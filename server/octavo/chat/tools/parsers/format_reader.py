"""Base of the readers of all rows: sections, headers, thoughts, and text between calls."""

from __future__ import annotations

import re
import string
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from octavo.chat.tools.formats.row import Format
from octavo.chat.tools.parsers.core import Piece, Reasoning, ToolParser, overlap
from octavo.chat.tools.parsers.reader import CutOffError, NotACallError, Steps

_FIELD = re.compile(r"\{(?:name|id|index)\}|\([^)]*\)\?")
_TO = "<|message|>"  # behind the name of a message's reader
_INDEX = re.compile(r"[0-9]*")


class FormatReader(ToolParser):
    """Reads calls by a row of the table. A subclass for each kind of arguments reads one call.

    Of what follows a call, end tags are read if they are there: models forget them.
    """

    def __init__(self, row: Format, names: Collection[str] | Mapping[str, Any] = ()) -> None:
        super().__init__(names)
        also = [mark.replace("{name}", name) for mark in row.also for name in (names if "{name}" in mark else ("",))]
        self.row = row = replace(row, also=tuple(sorted(also, key=len, reverse=True)))
        addressed = tuple(row.addressed.replace("{name}", name) for name in names if row.addressed)
        self.markers = (*row.markers, *addressed)
        self._addressed, self.marks = addressed, (*row.marks, *addressed)

    def _parse(self) -> Steps[None]:
        row = self.row
        if row.begins and (yield from self._skip_space()) == row.begins:
            yield from self._attempt(self._calls(""))
        if row.begun:
            yield from self._begun()
        markers = row.markers
        while found := (yield from self._content_until(*markers, *self.marks)):
            if found in markers:
                yield from self._attempt(self._calls(found))
                continue
            # A message to somebody who is no tool calls none.
            markers = () if self._addressed and found.endswith(_TO) and found not in self._addressed else row.markers
            self._at += len(found)
            self._settled = self._at
            if found == row.thoughts[0]:
                yield from self._thoughts()
                markers = row.markers
            else:
                self._space = ""
                yield from self._skip_space()
                self._settled = self._at

    def _begun(self) -> Steps[None]:
        """An answer's first message, in front of which the prompt has written the mark of calls."""
        if (yield from self._read(self.row.begun)) or (yield from self._starts_with(self.row.call or self.row.begun)):
            self._settled = self._at
            return
        row, self.row = self.row, replace(self.row, call="")
        self._name = ""
        yield from self._attempt(self._begun_call())
        self.row = row

    def _begun_call(self) -> Steps[None]:
        """A call whose mark the prompt has written. Text that ends before it is one is content."""
        try:
            yield from self._call(known_only=True)
        except CutOffError:
            if not (self._name or "").strip() or not self._may_become_known():
                raise NotACallError from None
            raise

    def _calls(self, found: str) -> Steps[None]:
        """All calls of a section, or those that follow one another; ``found`` is the marker that comes next."""
        row = self.row
        opened = found != row.call
        self._at += len(found) if opened else 0
        self._name = ""
        known_only = row.known_only or (not opened and bool(row.section[0]))
        first = True
        while first or (yield from self._another()):
            first = False
            yield from self._skip_space()
            yield from self._call(known_only)
            self._settled = self._at
        yield from self._optional(row.section[1])
        self._settled = self._at

    def _another(self) -> Steps[bool]:
        """True if another call follows, up to which white space is read."""
        begin = self._at - self._settled
        yield from self._skip_space()
        if self.row.call and (yield from self._starts_with(self.row.call)):
            return True
        self._at = self._settled + begin
        return False

    def _call(self, known_only: bool) -> Steps[None]:
        """Read one call, whose marker comes next where the row has one."""
        raise NotImplementedError

    def _optional(self, tag: str) -> Steps[None]:
        """Read white space and ``tag``, or nothing."""
        begin = self._at - self._settled
        yield from self._skip_space()
        if not tag or not ((yield from self._read(tag)) or self._ends_in(tag)):
            self._at = self._settled + begin

    def _ends_in(self, tag: str) -> bool:
        """Return True if the text ends inside ``tag``, and skip its rest."""
        if self._ended and tag.startswith(self._text[self._at :]):
            self._at = len(self._text)
            return True
        return False

    def _header(self, known_only: bool) -> Steps[str]:
        """The name in a call's header, which is read. White space may stand around the name."""
        name = number = ""
        self._call_id = None
        yield from self._expect(self.row.call)
        self._name = ""
        parts = header_parts(self.row.header)
        for part in parts:
            if part == "{name}":
                name = yield from self._name_in_header()
                if not name or (known_only and self._names and name not in self._names):
                    raise NotACallError
            elif part == "{index}":
                yield from self._skip_space()
                number = yield from self._run_of(_INDEX)
            elif part == "{id}":
                yield from self._run_of(_until(_following(self.row.header, part)))
            elif part.endswith(")?"):
                yield from self._optional_header(part[1:-2])
            elif part is parts[0] and self.row.call:
                known_only = not (yield from self._lead(part)) or known_only
            else:
                yield from self._skip_space()
                yield from self._expect(part)
        if self.row.keeps_ids and number:
            self._call_id = f"functions.{name}:{number}"
        return name

    def _lead(self, text: str) -> Steps[bool]:
        """Read what stands between a call's mark and its name. False where its word, or all of it, is missing, as with
        models that forget it."""
        yield from self._skip_space()
        for literal in (text, text.lstrip(string.ascii_letters)):
            if literal and (yield from self._read(literal)):
                return literal == text
        return False

    def _name_in_header(self) -> Steps[str]:
        yield from self._skip_space()
        name = yield from self._called_name(self._run_of(_until(_following(self.row.header, "{name}"))))
        yield from self._skip_space()
        return self.row.name_of(name)

    def _optional_header(self, parts: str) -> Steps[None]:
        literal, field, _ = parts.partition("{id}")
        if (yield from self._read(literal)) and field:
            yield from self._run_of(_until("["))
            yield from self._skip_space()

    def _thoughts(self) -> Steps[None]:
        """A call ends them, where the model forgets to close them."""
        end = self.row.thoughts[1]
        ends = (end, *(self._addressed or self.markers))
        pattern = re.compile("|".join(map(re.escape, ends)))
        while True:
            found = pattern.search(self._text, self._at)
            hold = 0 if found or self._ended else max(overlap(self._text, tag) for tag in ends)
            until = found.start() if found else max(self._at, len(self._text) - hold)
            if until > self._at:
                self._give(Reasoning(self._text[self._at : until]))
            self._at = self._settled = until
            if found:
                self._at = self._settled = until + (len(end) if found.group() == end else 0)
                return
            if self._ended:
                return
            yield


class MarksReader(FormatReader):
    """Reads an answer without calls, of a family that marks texts and thoughts."""

    def finish(self, cut: bool = False) -> list[Piece]:
        """The text has ended. What might have become a mark is content, also where a limit has ended it."""
        return super().finish()

    def _call(self, known_only: bool) -> Steps[None]:
        raise NotACallError


@lru_cache
def header_parts(header: str) -> tuple[str, ...]:
    """The literals and fields of a row's header, in order."""
    parts, at = [], 0
    for field in _FIELD.finditer(header):
        parts += [header[at : field.start()], field.group()]
        at = field.end()
    return tuple(part for part in (*parts, header[at:]) if part)


@lru_cache
def _following(header: str, field: str) -> str:
    """The first character of the literal behind a field, if there is one."""
    return header.partition(field)[2][:1].strip("({")


@lru_cache
def _until(end: str) -> re.Pattern[str]:
    """A name or an id, up to ``end`` or what no name has."""
    return re.compile(rf"[^\s<>\"'={{}}\[\]`{re.escape(end)}]*")
