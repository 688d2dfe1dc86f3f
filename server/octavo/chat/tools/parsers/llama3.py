"""Calls of Llama 3."""

from __future__ import annotations

from octavo.chat.tools.parsers.core import ToolParser
from octavo.chat.tools.parsers.reader import NotACallError, Steps


class Llama3JsonParser(ToolParser):
    """``{"name": "f", "parameters": {...}}`` from the beginning of the text, or behind ``<|python_tag|>``; further
    calls behind ``;``. As JSON may also be an answer, only calls of tools that were offered count."""

    TAG = "<|python_tag|>"
    MARKERS = (TAG,)
    needs_special_tokens = True

    def _parse(self) -> Steps[None]:
        following = yield from self._skip_space()
        if following == "{":
            yield from self._attempt(self._calls())
        while (yield from self._content_until(self.TAG)):
            yield from self._attempt(self._tagged())

    def _tagged(self) -> Steps[None]:
        self._at += len(self.TAG)
        self._name = ""
        yield from self._skip_space()
        yield from self._calls()

    def _calls(self) -> Steps[None]:
        while True:
            yield from self._json_call(known_only=True)
            self._settled = self._at
            following = yield from self._skip_space()
            if following and following in ";,":
                self._at += 1
                following = yield from self._skip_space()
            if not following:
                return
            if (yield from self._starts_with(self.TAG)):
                return
            if following != "{":
                raise NotACallError
