"""Separates reasoning from the answer while both are generated. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from octavo.chat.thought_tags import THINK, ThoughtTags
from octavo.chat.tools.parsers import CallPiece, Piece, ToolParser, overlap


class HeldCall:
    """Follows a text from the marker of a call on, until it is known what the text is.

    No call: the marker was only mentioned. A draft: the reasoning is closed behind it, and more comes. Else a call,
    which ends the reasoning that the model forgot to close.
    """

    def __init__(self, parser: ToolParser, tags: ThoughtTags) -> None:
        self._parser = parser
        parser.marks = tuple(mark for mark in parser.marks if mark not in tags.closings)  # these are met here
        self._closing = pattern_of(tags.closings)
        self._longest = max(map(len, tags.closings))
        self._fed = 0
        self._outside = ""  # behind the first call
        self._begun = False
        self._is_text = False
        self.end: re.Match[str] | None = None  # the tag that closes the reasoning

    def read(self, text: str, ended: bool, cut: bool) -> str:
        """Classify ``text``, which has grown: "text", "draft", "call", or "" while that is unknown."""
        while self._fed < len(text) and self.end is None and not self._is_text:
            tag = self._closing.search(text, max(0, self._fed - self._longest + 1))
            upto = len(text) if tag is None else tag.end()
            self._take(self._parser.feed(text[self._fed : upto]))
            self._fed = upto
            if tag is not None and tag.group() in self._outside:  # not inside of arguments
                self.end = tag
        if not self._is_text and self.end is None and ended:
            self._take(self._parser.finish(cut))
        if self._is_text:
            return "text"
        if self.end is not None and text[self.end.end() :].strip():
            return "draft"
        return "call" if ended else ""

    def _take(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            if isinstance(piece, CallPiece):
                self._begun = True
            elif not self._begun:
                self._is_text = True
                return
            elif isinstance(piece, str):
                self._outside += piece


class ReasoningParser:
    """Splits ``<think>reasoning</think>answer``; the parts do not depend on how the text is cut into pieces.

    ``inside``: the text begins inside the reasoning, because the prompt ended with the opening tag. White space around
    the tags belongs to neither part. ``calls`` makes a parser of the answer's calls: one that begins inside reasoning
    which is not closed ends it. Reasoning that nothing closes goes on to the end of the text.
    """

    def __init__(self, inside: bool, calls: Callable[[], ToolParser] | None = None, tags: ThoughtTags = THINK) -> None:
        markers = calls().markers if calls is not None else ()
        self._calls, self._tags = calls, tags
        self._longest_first = sorted(tags.openings, key=len, reverse=True)
        self._ends = (*tags.closings, *markers)
        self._closing, self._markers = pattern_of(tags.closings), pattern_of(markers)
        self._held: HeldCall | None = None
        self._at = 0  # of the call that is held; before it no marker begins a call
        self._thinking: bool | None = True if inside else None  # None: not known yet
        self._may_open = True  # the opening tag may come next
        self._answering = False
        self._text = ""
        self._answer_begun = False

    @property
    def is_thinking(self) -> bool:
        """True while the text is inside the reasoning."""
        return bool(self._thinking)

    def feed(self, text: str) -> tuple[str, str]:
        """New text as (reasoning, answer), as far as it is certain."""
        self._text += text
        return self._split(ended=False)

    def finish(self, cut: bool = False) -> tuple[str, str]:
        """Return the text held back, as (reasoning, answer), at the end of the text. ``cut``: a limit or a stop string
        ended it, so at any place."""
        return self._split(ended=True, cut=cut)

    def _split(self, ended: bool, cut: bool = False) -> tuple[str, str]:
        if self._may_open and not self._read_opening(ended):
            return "", ""
        reasoning = self._read_reasoning(ended, cut) if self._thinking else ""
        if self._thinking:
            return reasoning, ""
        answer, self._text = self._text, ""
        if self._answering and not self._answer_begun:
            answer = answer.lstrip()
            self._answer_begun = bool(answer)
        return reasoning, answer

    def _read_opening(self, ended: bool) -> bool:
        """True once it is known whether the text begins with the tag."""
        visible = self._text.lstrip()
        if not ended and any(tag.startswith(visible) and tag != visible for tag in self._tags.openings):
            return False
        tag = next((tag for tag in self._longest_first if visible.startswith(tag)), None)
        if tag is not None:
            self._thinking = True
            self._text = visible[len(tag) :].lstrip()
            if not self._text and not ended:
                self._text = visible  # the space behind the tag may go on
                return False
        elif self._thinking:
            self._text = visible
        else:
            self._thinking = False
        self._may_open = False
        return True

    def _read_reasoning(self, ended: bool, cut: bool) -> str:
        while True:
            if self._held is None:
                end, marker = self._closing.search(self._text), self._markers.search(self._text, self._at)
                if marker is None or (end and end.start() < marker.start()) or self._calls is None:
                    return self._read_thoughts(end, ended)
                self._at, self._held = marker.start(), HeldCall(self._calls(), self._tags)
            found = self._held.read(self._text[self._at :], ended, cut)
            tag = self._held.end
            if found == "text":  # the marker is only mentioned
                self._at, self._held = self._at + 1, None
            elif found == "draft" and tag is not None:
                return self._read_thoughts(self._closing.match(self._text, self._at + tag.start()), ended)
            elif found == "call":
                reasoning = self._text[: self._at].rstrip()
                self._text = self._text[self._at : None if tag is None else self._at + tag.start()]
                self._thinking, self._answering = False, True
                return reasoning
            else:
                reasoning = self._text[: self._at].rstrip()
                self._drop(len(reasoning))
                return reasoning

    def _read_thoughts(self, end: re.Match[str] | None, ended: bool) -> str:
        """Thoughts up to ``end``, the tag that closes them, or as far as they surely go where there is none."""
        if end is not None:
            reasoning, self._text = self._text[: end.start()].rstrip(), self._text[end.end() :]
            self._thinking, self._answering = False, True
            return reasoning
        if ended:
            reasoning, self._text = self._text, ""
            return reasoning.rstrip()
        hold = max(overlap(self._text, tag) for tag in self._ends)
        reasoning = self._text[: len(self._text) - hold].rstrip()
        self._drop(len(reasoning))
        return reasoning

    def _drop(self, length: int) -> None:
        self._text = self._text[length:]
        self._at = max(0, self._at - length)


def pattern_of(literals: Iterable[str]) -> re.Pattern[str]:
    """Matches the one of the literals that comes first; nothing where there is none."""
    return re.compile("|".join(map(re.escape, literals)) or r"(?!)")
