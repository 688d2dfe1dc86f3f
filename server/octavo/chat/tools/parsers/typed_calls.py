"""Reader of calls whose arguments are an object with bare keys, and texts between quotes that are a token: Gemma."""

from __future__ import annotations

import json
import re

from octavo.chat.tools.formats.row import Typed
from octavo.chat.tools.parsers.core import overlap
from octavo.chat.tools.parsers.format_reader import FormatReader
from octavo.chat.tools.parsers.reader import MAX_DEPTH, NotACallError, Steps
from octavo.chat.tools.parsers.values import json_of

_KEY = re.compile(r"[^:{}\[\]<>\n]*")
_BARE_KINDS = {"null", "boolean", "integer", "number", "object", "array"}
_BARE = re.compile(r"[^,{}\[\]<>\n]*")


class TypedReader(FormatReader):
    """Arguments are given out as JSON while they come; only a bare word waits for its end."""

    @property
    def _quote(self) -> str:
        assert isinstance(self.row.arguments, Typed)
        return self.row.arguments.quote

    def _call(self, known_only: bool) -> Steps[None]:
        name = yield from self._header(known_only)
        if (yield from self._skip_space()) != "{":
            raise NotACallError
        self._start_call(name)
        self._in_arguments = True
        yield from self._members(1)
        self._in_arguments = False
        self._settled = self._at
        yield from self._optional(self.row.call_end)

    def _members(self, depth: int) -> Steps[None]:
        if depth > MAX_DEPTH:
            raise NotACallError
        self._given(1, "{")
        lead = ""
        while (yield from self._skip_space()) != "}":
            if (yield from self._read(self._quote)):
                key = yield from self._quoted_key()
            else:
                key = (yield from self._run_of(_KEY)).strip().strip('"')
            if not key:
                raise NotACallError
            yield from self._skip_space()
            yield from self._expect(":")
            self._given(0, f"{lead}{json.dumps(key, ensure_ascii=False)}: ")
            yield from self._typed_value(depth)
            lead = ", "
            if not (yield from self._comma("}")):
                break
        self._given(1, "}")

    def _items(self, depth: int) -> Steps[None]:
        if depth > MAX_DEPTH:
            raise NotACallError
        self._given(1, "[")
        while (yield from self._skip_space()) != "]":
            yield from self._typed_value(depth)
            if not (yield from self._comma("]")):
                break
            self._given(0, ", ")
        self._given(1, "]")

    def _comma(self, end: str) -> Steps[bool]:
        """True if a comma is read; else ``end`` comes next."""
        following = yield from self._skip_space()
        if following == ",":
            self._at += 1
            return True
        if following != end:
            raise NotACallError
        return False

    def _typed_value(self, depth: int) -> Steps[None]:
        following = yield from self._skip_space()
        if following == "{":
            yield from self._members(depth + 1)
        elif following == "[":
            yield from self._items(depth + 1)
        elif following == '"':
            yield from self._json_string(self._give_arguments)
        elif (yield from self._read(self._quote)):
            self._given(0, '"')
            while True:
                piece, ended = yield from self._piece_of_text()
                self._given(0, json.dumps(piece, ensure_ascii=False)[1:-1])
                if ended:
                    break
            self._given(0, '"')
        else:
            word = yield from self._run_of(_BARE)
            if not word.strip():
                raise NotACallError
            self._given(0, json_of(word, _BARE_KINDS))

    def _quoted_key(self) -> Steps[str]:
        key = ""
        while True:
            piece, ended = yield from self._piece_of_text()
            key += piece
            if ended:
                return key

    def _piece_of_text(self) -> Steps[tuple[str, bool]]:
        """The next piece of a text between quotes, and whether it ends behind it: the quote is read, too."""
        quote = self._quote
        while True:
            at = self._text.find(quote, self._at)
            end = at if at >= 0 else max(self._at, len(self._text) - overlap(self._text, quote))
            piece, self._at = self._text[self._at : end], end
            if at >= 0:
                self._at += len(quote)
                return piece, True
            if piece:
                return piece, False
            if not (yield from self._more()):
                raise NotACallError

    def _given(self, length: int, text: str) -> None:
        """Read ``length`` characters, and give out ``text`` for all that is read."""
        self._at += length
        self._give_arguments(text)

    def _give_cut_call(self) -> None:
        """Drop the rest of a call that was cut off: what is certain is already out as JSON."""
        if not self._in_arguments:
            super()._give_cut_call()
            return
        self.ends_inside_call = True
        self._at = self._settled = len(self._text)
