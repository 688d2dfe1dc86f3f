"""Calls of Mistral's models."""

from __future__ import annotations

import re

from octavo.chat.tools.parsers.core import ToolParser
from octavo.chat.tools.parsers.reader import NotACallError, Steps

_NAME = re.compile(r"[A-Za-z0-9_.\-]*")
_CALL_ID = re.compile(r"[A-Za-z0-9]*")


class MistralParser(ToolParser):
    """Parses ``[TOOL_CALLS]`` and what follows: a list of calls as JSON (up to version 7 of Mistral's format), or
    ``name{...}``, with ``[CALL_ID]`` and ``[ARGS]`` between (from version 11)."""

    MARK = "[TOOL_CALLS]"
    MARKERS = (MARK,)
    needs_special_tokens = True

    def _parse(self) -> Steps[None]:
        while (yield from self._content_until(self.MARK)):
            yield from self._attempt(self._calls())

    def _calls(self) -> Steps[None]:
        self._at += len(self.MARK)
        self._name = ""
        following = yield from self._skip_space()
        if following == "[":
            yield from self._json_calls()
        elif following == "{":
            yield from self._json_call()
        else:
            yield from self._named_call()

    def _named_call(self) -> Steps[None]:
        name = yield from self._called_name(self._run_of(_NAME))
        if not name:
            raise NotACallError
        yield from self._skip_space()
        if (yield from self._read("[CALL_ID]")):
            yield from self._run_of(_CALL_ID)
            yield from self._skip_space()
        yield from self._read("[ARGS]")
        if (yield from self._skip_space()) != "{":
            raise NotACallError
        yield from self._arguments(name)
