"""Long texts that are pasted at a terminal: a line shows a mark in place of each, for megabytes stop any editor."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

START, END = "\x1b[200~", "\x1b[201~"  # how a terminal brackets what is pasted
LONG = 20_000  # characters; shorter pastes are shown as they are
_MARK = re.compile(r"\[pasted text (\d+): [\d,]+ characters\]")
_AT_ONCE = 65536  # bytes; a terminal hands out 4,096


class Pastes:
    """The texts behind the marks of a conversation."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def shown(self, text: str) -> str:
        """Return what the line shows of a text that is pasted."""
        if len(text) < LONG:
            return text
        self._texts.append(text.replace("\r\n", "\n").replace("\r", "\n"))  # as the line would have it
        return f"[pasted text {len(self._texts)}: {len(text):,} characters]"

    def whole(self, line: str) -> str:
        """Return a line with the texts in place of their marks; a mark of none is text itself."""
        return _MARK.sub(lambda mark: self._text(int(mark[1])) or mark[0], line)

    def _text(self, number: int) -> str:
        return self._texts[number - 1] if 0 < number <= len(self._texts) else ""


class PasteFilter:
    """Changes what is pasted on its way from a terminal, in pieces as it arrives. Each paste leaves it at once, however
    many pieces it came in. ``change``: what becomes of a paste."""

    def __init__(self, change: Callable[[str], str]) -> None:
        self._change = change
        self._passed = ""  # the last characters that have left, which may begin a START
        self._pieces: list[str] | None = None  # of a paste that has begun
        self._rest = ""  # the last characters of it, which may begin its END

    @property
    def pasting(self) -> bool:
        """True if a paste has begun and has not ended."""
        return self._pieces is not None

    def feed(self, data: str) -> str:
        """Return what the pieces so far let leave."""
        out = ""
        while True:
            if self._pieces is None:
                begun, left, data = self._before(data)
                out += left
                if not begun:
                    return out
            text, data = self._inside(data)
            if text is None:
                return out
            out += self._change(text) + END

    def _before(self, data: str) -> tuple[bool, str, str]:
        """Return whether a paste begins, what leaves before it (with its START), and what follows."""
        both = self._passed + data
        if (at := both.find(START)) < 0:
            self._passed = both[1 - len(START) :]
            return False, data, ""
        cut = at + len(START) - len(self._passed)
        self._passed, self._pieces = "", []
        return True, data[:cut], data[cut:]

    def _inside(self, data: str) -> tuple[str | None, str]:
        """Return the paste if this ends it, and what follows."""
        assert self._pieces is not None
        both = self._rest + data
        if (at := both.find(END)) < 0:
            self._pieces.append(both[: 1 - len(END)])
            self._rest = both[1 - len(END) :]
            return None, ""
        text = "".join((*self._pieces, both[:at]))
        self._pieces, self._rest = None, ""
        return text, both[at + len(END) :]


class FilteredReader:
    """A reader of prompt_toolkit's, with a filter behind it."""

    def __init__(self, reader: Any, pastes: PasteFilter) -> None:
        self._reader, self._filter = reader, pastes

    @property
    def closed(self) -> bool:
        """True if the terminal is gone."""
        return bool(self._reader.closed)

    def read(self) -> str:
        """Return what is there, without a wait; empty in the midst of a paste."""
        read = self._filter.feed(self._reader.read(_AT_ONCE))
        while self._filter.pasting and (more := self._reader.read(_AT_ONCE)):
            read += self._filter.feed(more)
        return read
