"""Calls without marks around them, as ``tool_choice`` constrains a model to write them."""

from __future__ import annotations

from octavo.chat.tools.parsers.core import ToolParser
from octavo.chat.tools.parsers.reader import Steps


class JsonListParser(ToolParser):
    """``[{"name": "f", "parameters": {...}}, ...]`` and nothing else: what `required` constrains a model to."""

    def _parse(self) -> Steps[None]:
        yield from self._attempt(self._list())

    def _list(self) -> Steps[None]:
        self._name = ""
        yield from self._skip_space()
        yield from self._json_calls()


class NamedCallParser(ToolParser):
    """The text is the arguments of the one tool that may be called."""

    def _parse(self) -> Steps[None]:
        yield from self._attempt(self._call())

    def _call(self) -> Steps[None]:
        (name,) = self._names
        self._name = name
        yield from self._skip_space()
        yield from self._arguments(name)
