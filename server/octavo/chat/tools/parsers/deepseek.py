"""Calls of DeepSeek V3 and V3.1; `tagged` has those of V3.2 and V4."""

from __future__ import annotations

import re

from octavo.chat.tools.parsers.core import ToolParser
from octavo.chat.tools.parsers.reader import NotACallError, Steps

_NAME = re.compile(r"[A-Za-z0-9_.\-]*")


class MarkedJsonParser(ToolParser):
    """Calls between marks of their own, each a name, a mark and its arguments as JSON."""

    SECTION = ("", "")  # around all calls
    CALL, SEPARATOR, CALL_END = "", "", ""
    HEADER, FOOTER = "", ""  # around the arguments, as models write them
    needs_special_tokens = True

    def _parse(self) -> Steps[None]:
        while (yield from self._content_until(*self.MARKERS)):
            yield from self._attempt(self._calls())

    def _calls(self) -> Steps[None]:
        begin, end = self.SECTION
        yield from self._read(begin)
        self._name = ""
        yield from self._skip_space()
        while True:
            yield from self._expect(self.CALL)
            yield from self._marked_call()
            self._settled = self._at
            yield from self._skip_space()
            if not (yield from self._starts_with(self.CALL)):
                break
        yield from self._read_if_there(end)

    def _marked_call(self) -> Steps[None]:
        self._name = ""
        name = yield from self._called_name(self._run_of(_NAME))
        if not name:
            raise NotACallError
        yield from self._rest_of_header()
        if (yield from self._skip_space()) != "{":
            raise NotACallError
        yield from self._arguments(name)
        self._settled = self._at
        yield from self._rest_of_call()

    def _rest_of_header(self) -> Steps[None]:
        yield from self._expect(self.SEPARATOR)

    def _rest_of_call(self) -> Steps[None]:
        yield from self._skip_space()
        yield from self._read_if_there(self.CALL_END)

    def _read_if_there(self, mark: str) -> Steps[None]:
        """Read ``mark``, or the beginning of it with which the text ends."""
        if not (yield from self._read(mark)) and self._ended and mark.startswith(self._text[self._at :]):
            self._at = len(self._text)


class DeepseekV31Parser(MarkedJsonParser):
    """``<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>``."""

    SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    HEADER = SEPARATOR
    MARKERS = (SECTION[0], CALL)


class DeepseekV3Parser(DeepseekV31Parser):
    """Parses DeepSeek V3's calls: ``function`` for the name, which follows with the arguments as a block of code."""

    CALL = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
    MARKERS = (DeepseekV31Parser.SECTION[0], CALL)
    SEPARATOR = "```json"
    HEADER, FOOTER = "\n```json\n", "\n```"

    def _rest_of_header(self) -> Steps[None]:
        yield from self._skip_space()
        yield from self._expect(self.SEPARATOR)

    def _rest_of_call(self) -> Steps[None]:
        yield from self._skip_space()
        yield from self._read("```")
        yield from super()._rest_of_call()
