"""How model families write their calls as JSON."""

from __future__ import annotations

import re

from octavo.entrypoints.generation.tools.parsers.core import ToolParser
from octavo.entrypoints.generation.tools.parsers.reader import NotACallError, Steps

_NAME = re.compile(r"[A-Za-z0-9_.\-]*")
_CALL_ID = re.compile(r"[A-Za-z0-9]*")


class HermesParser(ToolParser):
    """``<tool_call>{"name": "f", "arguments": {...}}</tool_call>``, any number, between text: Hermes and Qwen."""

    BEGIN, END = "<tool_call>", "</tool_call>"

    def _parse(self) -> Steps[None]:
        while (yield from self._content_until(self.BEGIN)):
            yield from self._attempt(self._block())

    def _block(self) -> Steps[None]:
        self._at += len(self.BEGIN)
        self._name = ""
        following = yield from self._skip_space()
        while True:
            if following == "[":
                yield from self._json_calls()
            else:
                yield from self._json_call()
            self._settled = self._at
            following = yield from self._skip_space()
            while following == "}":  # one brace too many
                self._at += 1
                following = yield from self._skip_space()
            if following not in ("{", "["):
                break
        if not (yield from self._read(self.END)):
            if not (self._ended and self.END.startswith(self._text[self._at :])):
                raise NotACallError
            self._at = len(self._text)  # the text may end without the closing tag, or inside it


class Llama3JsonParser(ToolParser):
    """``{"name": "f", "parameters": {...}}`` from the beginning of the text, or behind ``<|python_tag|>``; further
    calls behind ``;``. As JSON may also be an answer, only calls of tools that were offered count."""

    TAG = "<|python_tag|>"
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


class MistralParser(ToolParser):
    """Behind ``[TOOL_CALLS]``: a list of calls as JSON (up to version 7 of Mistral's format), or ``name{...}``, with
    ``[CALL_ID]`` and ``[ARGS]`` between (from version 11)."""

    MARK = "[TOOL_CALLS]"
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
