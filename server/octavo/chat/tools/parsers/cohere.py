"""Calls of Cohere's Command models."""

from __future__ import annotations

from octavo.chat.tools.parsers.core import Reasoning, ToolParser, overlap
from octavo.chat.tools.parsers.reader import NotACallError, Steps


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
