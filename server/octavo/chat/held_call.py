"""A call of a tool that begins inside reasoning: whether it ends it, or was only a draft. Pure."""

from __future__ import annotations

from octavo.chat.tools.parsers import CallPiece, Piece, ToolParser


class HeldCall:
    """Follows a text from the marker of a call on, until it is known what the text is.

    No call: the marker was only mentioned. A draft: the reasoning is closed behind it, and more comes. Else a call,
    which ends the reasoning that the model forgot to close.
    """

    def __init__(self, parser: ToolParser, end: str) -> None:
        self._parser = parser
        self._end_tag = end
        self._fed = 0
        self._outside = ""  # behind the first call
        self._begun = False
        self._is_text = False
        self.end: int | None = None  # of the reasoning, where its closing tag begins

    def read(self, text: str, ended: bool, cut: bool) -> str:
        """Classify ``text``, which has grown: "text", "draft", "call", or "" while that is unknown."""
        while self._fed < len(text) and self.end is None and not self._is_text:
            at = text.find(self._end_tag, max(0, self._fed - len(self._end_tag) + 1))
            upto = len(text) if at < 0 else at + len(self._end_tag)
            self._take(self._parser.feed(text[self._fed : upto]))
            self._fed = upto
            if at >= 0 and self._end_tag in self._outside:  # not inside of arguments
                self.end = at
        if not self._is_text and self.end is None and ended:
            self._take(self._parser.finish(cut))
        if self._is_text:
            return "text"
        if self.end is not None and text[self.end + len(self._end_tag) :].strip():
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
