"""Formats of model families that write calls as JSON."""

from __future__ import annotations

import re

from octavo.chat.tools.parsers.core import Reasoning, ToolParser, overlap
from octavo.chat.tools.parsers.reader import NotACallError, Steps

_NAME = re.compile(r"[A-Za-z0-9_.\-]*")
_CALL_ID = re.compile(r"[A-Za-z0-9]*")


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


class CohereParser(ToolParser):
    """``<|START_ACTION|>[{"tool_name": "f", "parameters": {...}}]<|END_ACTION|>``: Command R7B and A,
    which also put their thoughts and texts between markers."""

    BEGIN, END = "<|START_ACTION|>", "<|END_ACTION|>"
    THINKING, THOUGHT = "<|START_THINKING|>", "<|END_THINKING|>"
    TEXT = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
    MARKERS = (BEGIN,)
    NAME_KEYS = ("tool_name", "name")
    needs_special_tokens = True

    def _parse(self) -> Steps[None]:
        while found := (yield from self._content_until(self.BEGIN, self.THINKING, *self.TEXT)):
            if found == self.BEGIN:
                yield from self._attempt(self._block())
                continue
            self._at += len(found)
            self._settled = self._at
            if found == self.THINKING:
                yield from self._thoughts()

    def _block(self) -> Steps[None]:
        self._at += len(self.BEGIN)
        self._name = ""
        if (yield from self._skip_space()) == "[":
            yield from self._json_calls()
        else:
            yield from self._json_call()
        self._settled = self._at
        yield from self._skip_space()
        if not (yield from self._read(self.END)):
            if not (self._ended and self.END.startswith(self._text[self._at :])):
                raise NotACallError
            self._at = len(self._text)

    def _thoughts(self) -> Steps[None]:
        """A call ends them, where the model forgets to close them."""
        ends = (self.THOUGHT, self.BEGIN)
        while True:
            found = [(at, tag) for tag in ends if (at := self._text.find(tag, self._at)) >= 0]
            hold = 0 if found or self._ended else max(overlap(self._text, tag) for tag in ends)
            until, tag = min(found) if found else (max(self._at, len(self._text) - hold), "")
            if until > self._at:
                self._give(Reasoning(self._text[self._at : until]))
            self._at = self._settled = until
            if found:
                self._at = self._settled = until + (len(tag) if tag == self.THOUGHT else 0)
                return
            if self._ended:
                return
            yield


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
