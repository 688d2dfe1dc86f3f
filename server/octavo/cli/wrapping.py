"""Break lines between words while a text streams to a terminal."""

from __future__ import annotations

import os
import sys
import unicodedata
from collections.abc import Callable

_NO_BREAK_BEFORE = frozenset("、。，．！？：；）」』】〕〉》”’…ー々ぁぃぅぇぉっゃゅょァィゥェォッャュョ")
_NO_BREAK_AFTER = frozenset("（「『【〔〈《“‘")
_JOINER = "\u200d"  # of emoji that are one picture
_SKIN_TONES = frozenset(map(chr, range(0x1F3FB, 0x1F400)))
_NARROWEST = 16  # columns: below it the terminal breaks lines as it likes
_TAB = 8


def plain_width() -> int:
    """Columns of the terminal now: COLUMNS, which some shells export, would be those at its start."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or 80
    except (OSError, ValueError):  # no terminal
        return 80


class Wrap:
    """Writes text in pieces, of which a word may be in several: it is held back until it is known where it ends.

    ``write`` takes what is to be shown; ``width`` says how many columns there are, asked at every line. Blanks at a
    break are left out. Lines between ``` are code: they are copied as they are, so that the terminal breaks them, and
    what is selected there is what the model wrote.
    """

    def __init__(self, write: Callable[[str], object], width: Callable[[], int] = plain_width) -> None:
        self._write, self._width = write, width
        self._columns = width()
        self._column = 0  # after what was written of this line
        self._blanks = self._word = ""
        self._word_width = 0
        self._endless = ""  # the last character of a word that no line has room for: the terminal breaks it
        self._begin = ""  # of the text's line, as far as it says whether code begins or ends
        self._in_code = False

    def feed(self, text: str) -> None:
        """Take the next piece."""
        for char in text:
            if char == "\n":
                self.end()
                self._write("\n")
                self._endless = ""
                self._in_code ^= self._begin.lstrip().startswith("```")
                self._column, self._begin, self._columns = 0, "", self._width()
                continue
            if len(self._begin) < _TAB:
                self._begin += char
            if self._in_code or self._columns < _NARROWEST:
                self._write(char)
            elif char in " \t":
                self._end_word()
                self._endless = ""
                self._blanks += char if char == " " else " " * (_TAB - (self._column + len(self._blanks)) % _TAB)
            else:
                self._add(char)

    def end(self) -> None:
        """Show what is held back."""
        self._end_word()
        self._write(self._blanks)
        self._column += len(self._blanks)
        self._blanks = ""

    def _add(self, char: str) -> None:
        if self._endless and not _may_break(self._endless, char):
            self._write(char)
            self._endless = char
            self._column = (self._column + _columns_of(char)) % self._columns
            return
        self._endless = ""
        if self._word and _may_break(self._word[-1], char):
            self._end_word()
        self._word += char
        self._word_width += _columns_of(char)
        if self._word_width > self._columns:
            self._end_word()
            self._endless = char
            self._column %= self._columns

    def _end_word(self) -> None:
        if not self._word:
            return
        if self._column and self._column + len(self._blanks) + self._word_width > self._columns:
            self._write("\n")
            self._column, self._columns = 0, self._width()
        else:
            self._write(self._blanks)
            self._column += len(self._blanks)
        self._write(self._word)
        self._column += self._word_width
        self._blanks = self._word = ""
        self._word_width = 0


def _may_break(before: str, after: str) -> bool:
    """Return whether a line may end between two characters that are no blanks: beside wide ones, as Chinese and
    Japanese texts do, but not within what is one character to its reader."""
    if before == _JOINER or after in _SKIN_TONES or not _columns_of(after):
        return False
    if after in _NO_BREAK_BEFORE or before in _NO_BREAK_AFTER:
        return False
    return _columns_of(before) == 2 or _columns_of(after) == 2


def _columns_of(char: str) -> int:
    if unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
