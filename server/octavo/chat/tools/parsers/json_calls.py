"""Readers of calls whose arguments are JSON."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from octavo.chat.tools.formats.row import Format, Json, Named
from octavo.chat.tools.parsers.format_reader import FormatReader
from octavo.chat.tools.parsers.reader import NotACallError, Steps


class JsonReader(FormatReader):
    """Reads objects with the name and the arguments, alone or in lists. A brace too many is forgiven."""

    def __init__(self, row: Format, names: Collection[str] | Mapping[str, Any] = ()) -> None:
        super().__init__(row, names)
        if isinstance(row.arguments, Json):
            self.name_keys = tuple(dict.fromkeys((row.arguments.name_key, "name")))
            self.arguments_keys = (*self.arguments_keys, row.arguments.arguments_key)

    def _call(self, known_only: bool) -> Steps[None]:
        if (yield from self._peek()) == "[":
            yield from self._json_calls(known_only)
        else:
            yield from self._json_call(known_only)

    def _another(self) -> Steps[bool]:
        row = self.row
        following = yield from self._skip_space()
        while following == "}" and row.section[1]:
            self._at += 1
            self._settled = self._at
            following = yield from self._skip_space()
        if following and following in row.separators:
            self._at += 1
            following = yield from self._skip_space()
        if following in ("{", "["):
            return True
        if not following or (row.section[0] and (yield from self._starts_with(row.section[0]))):
            self._settled = self._at
        self._at = self._settled
        return False


class JsonKeyReader(JsonReader):
    """Reads objects whose only key is the name."""

    def _json_call(self, known_only: bool = False) -> Steps[None]:
        yield from self._expect("{")
        self._name = ""
        yield from self._skip_space()
        name = yield from self._called_name(self._decoded_string(), '"')
        if not name or (yield from self._skip_space()) != ":":
            raise NotACallError
        self._at += 1
        if (yield from self._skip_space()) != "{":
            raise NotACallError
        yield from self._arguments(name)
        yield from self._skip_space()
        yield from self._read("}")


class NamedReader(JsonReader):
    """Reads a header with the name, and JSON behind it."""

    def _call(self, known_only: bool) -> Steps[None]:
        kind = self.row.arguments
        assert isinstance(kind, Named)
        if kind.or_listed:
            begin = self._at - self._settled
            yield from self._expect(self.row.call)
            if (yield from self._skip_space()) in ("[", "{"):
                yield from super()._call(known_only)
                return
            self._at = self._settled + begin
        name = yield from self._header(known_only)
        if kind.lead:
            yield from self._skip_space()
            yield from self._expect(kind.lead.strip())
        if (yield from self._skip_space()) != "{":
            raise NotACallError
        yield from self._arguments(name)
        self._settled = self._at
        for tag in (kind.tail.strip(), self.row.call_end):
            if tag:
                yield from self._optional(tag)
                self._settled = self._at

    def _another(self) -> Steps[bool]:
        return FormatReader._another(self)
