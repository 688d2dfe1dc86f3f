"""Calls of Hermes and Qwen, ``<tool_call>{...}</tool_call>``, and of the families that differ from it in their tags."""

from __future__ import annotations

from octavo.chat.tools.parsers.core import ToolParser
from octavo.chat.tools.parsers.reader import NotACallError, Steps


class HermesParser(ToolParser):
    """``<tool_call>{"name": "f", "arguments": {...}}</tool_call>``, any number, between text: Hermes and Qwen."""

    BEGIN, END = "<tool_call>", "</tool_call>"
    MARKERS = (BEGIN,)

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
        yield from self._end()

    def _end(self) -> Steps[None]:
        if not (yield from self._read(self.END)):
            if not (self._ended and self.END.startswith(self._text[self._at :])):
                raise NotACallError
            self._at = len(self._text)  # the text may end without the closing tag, or inside it


class HunyuanParser(HermesParser):
    """``<tool_calls>[{"name": "f", "arguments": {...}}]</tool_calls>``: Hunyuan, Jamba, Apriel, MiniMax M1."""

    BEGIN, END = "<tool_calls>", "</tool_calls>"
    MARKERS = (BEGIN,)


class NemotronV2Parser(HermesParser):
    """``<TOOLCALL>[{"name": "f", "arguments": {...}}]</TOOLCALL>``: Nemotron Nano v2."""

    BEGIN, END = "<TOOLCALL>", "</TOOLCALL>"
    MARKERS = (BEGIN,)


class GraniteParser(HermesParser):
    """``<|tool_call|>[{"name": "f", "arguments": {...}}]``, to the end: Granite 3."""

    BEGIN, END = "<|tool_call|>", "<|/tool_call|>"
    MARKERS = (BEGIN,)
    needs_special_tokens = True

    def _end(self) -> Steps[None]:
        yield from self._read(self.END)
