"""An answer as parts that follow one another: reasoning, text and tool calls. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from octavo.chat.answer import AnswerDelta, CallDelta

Kind = Literal["reasoning", "text", "call"]
Action = Literal["open", "add", "close"]


@dataclass
class Part:
    """One part. ``pieces`` are what has come of its text; of a call, of its arguments as JSON text."""

    kind: Kind
    index: int
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.pieces)


# Changes of a part: it was opened, text came, or it was closed.
Step = tuple[Action, Part, str]


class PartSplitter:
    """Makes parts of what an `AnswerParser` returns. One part at a time is open.

    White space alone, between the reasoning and a call for example, is no part.
    """

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self._open: Part | None = None
        self._space = ""  # held back until a text begins with it

    def feed(self, delta: AnswerDelta) -> list[Step]:
        """Return the steps by which ``delta`` changes the parts."""
        steps: list[Step] = []
        calls = delta.calls
        while calls and calls[0].id is None:  # of the call that is open: text, if any, came behind it
            self._add(steps, calls[0].arguments)
            calls = calls[1:]
        if delta.reasoning:
            self._switch(steps, "reasoning")
            self._add(steps, delta.reasoning)
        if delta.content:
            self._add_text(steps, delta.content)
        for call in calls:
            self._add_call(steps, call)
        return steps

    def finish(self) -> list[Step]:
        """Close the last part."""
        steps: list[Step] = []
        if (space := self._space) and not self.parts:  # an answer of nothing else
            self._switch(steps, "text")
            self._add(steps, space)
        self._close(steps)
        return steps

    def _add_text(self, steps: list[Step], text: str) -> None:
        if self._open is None or self._open.kind != "text":
            text, self._space = self._space + text, ""
            if text.isspace():
                self._space = text
                return
            self._switch(steps, "text")
        self._add(steps, text)

    def _add_call(self, steps: list[Step], call: CallDelta) -> None:
        if call.id is not None:
            self._close(steps)
            self._begin(steps, Part("call", len(self.parts), call_id=call.id, name=call.name or ""))
        self._add(steps, call.arguments)

    def _switch(self, steps: list[Step], kind: Kind) -> None:
        if self._open is None or self._open.kind != kind:
            self._close(steps)
            self._begin(steps, Part(kind, len(self.parts)))

    def _begin(self, steps: list[Step], part: Part) -> None:
        self._space = ""
        self._open = part
        self.parts.append(part)
        steps.append(("open", part, ""))

    def _add(self, steps: list[Step], text: str) -> None:
        if text and self._open is not None:
            self._open.pieces.append(text)
            steps.append(("add", self._open, text))

    def _close(self, steps: list[Step]) -> None:
        if self._open is not None:
            steps.append(("close", self._open, ""))
            self._open = None
