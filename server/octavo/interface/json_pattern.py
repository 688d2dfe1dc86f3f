"""Regular expressions of JSON schemas, which are ECMA-262's, in the words of the grammar engine. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_CLASSES = {"d": "[0-9]", "D": "[^0-9]", "w": "[A-Za-z0-9_]", "W": "[^A-Za-z0-9_]"}  # ASCII alone, as ECMA-262 says
_LETTERS = {letter: "\\" + letter for letter in "sStnrfvzA"} | {"Z": r"\z"} | _CLASSES  # "Z" is Python's
_LOOKS = {"?=": "look-ahead", "?!": "look-ahead", "?<=": "look-behind", "?<!": "look-behind", "?P=": "a back-reference"}
_QUANTIFIER = re.compile(r"\{[0-9]+(,[0-9]*)?\}")
_HEX = re.compile(
    r"x([0-9a-f]{2})|u\{([0-9a-f]{1,6})\}|u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})|u([0-9a-f]{4})", re.IGNORECASE
)
_PROPERTY = re.compile(r"[pP]\{[^}]*\}")
_GROUP = re.compile(r"\((\?(:|P?<[^>]*>|[a-z-]+:))?")
_ANY, _NOTHING = r"(?s:.)", r"[^\x{0}-\x{10ffff}]"


class UnheldPatternError(ValueError):
    """An expression with what no grammar can hold."""


@dataclass
class _Group:
    """The start of a group: an anchor holds only at the ends of a text."""

    at_start: bool
    has_ended: bool  # behind "$"
    ended: list[bool] = field(default_factory=list)  # of its alternatives


def translated(pattern: str) -> str:
    """Translate ``pattern`` for the grammar engine.

    Raises UnheldPatternError if no grammar can express it (look-around, back-references, word boundaries, anchors
    inside), ValueError if it is not a regular expression.
    """
    return _Translation(pattern).run()


class _Translation:
    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0
        self._out: list[str] = []
        self._groups = [_Group(True, False)]
        self._start, self._ended = True, False

    def run(self) -> str:
        while self._at < len(self._text):
            self._step(self._text[self._at])
        if len(self._groups) > 1:
            raise ValueError("a group is not closed")
        return "".join(self._out)

    def _step(self, letter: str) -> None:
        match letter:
            case "(":
                self._open()
            case ")":
                self._close()
            case "|":
                self._groups[-1].ended.append(self._ended)
                self._start, self._ended = self._groups[-1].at_start, self._groups[-1].has_ended
                self._take(1, "|")
            case "^":
                if not self._start:
                    raise UnheldPatternError("an anchor inside")
                self._take(1, "^")
            case "$":
                self._ended = True
                self._take(1, "$")
            case "[":
                self._atom()
                self._out.append(self._class())
            case "\\":
                self._atom()
                self._at += 1
                self._out.append(self._escape())
            case "*" | "+" | "?":
                self._take(1, letter)
            case "{" if found := _QUANTIFIER.match(self._text, self._at):
                self._take(len(found[0]), found[0])
            case _:
                self._atom()
                self._take(1, f"\\{letter}" if letter in "{}]" else letter)

    def _take(self, length: int, written: str) -> None:
        self._at += length
        self._out.append(written)

    def _atom(self) -> None:
        if self._ended:
            raise UnheldPatternError("an anchor inside")
        self._start = False

    def _open(self) -> None:
        for begin, what in _LOOKS.items():
            if self._text.startswith(begin, self._at + 1):
                raise UnheldPatternError(what)
        self._groups.append(_Group(self._start, self._ended))
        found = _GROUP.match(self._text, self._at)
        if found is None or (found[0] == "(" and self._text.startswith("(?", self._at)):
            raise ValueError("a group of no known kind")
        self._take(len(found[0]), found[0])

    def _close(self) -> None:
        if len(self._groups) == 1:
            raise ValueError("a group is closed that was not opened")
        group = self._groups.pop()
        self._ended = any((*group.ended, self._ended))
        self._start = False
        self._take(1, ")")

    def _escape(self, inside: bool = False) -> str:
        """Translate an escape, from behind its backslash, into the engine's syntax."""
        rest = self._text[self._at :]
        if not rest:
            raise ValueError("it ends with a backslash")
        letter = rest[0]
        if found := _HEX.match(rest):
            self._at += len(found[0])
            return f"\\x{{{_number(*found.groups())}}}"
        if found := _PROPERTY.match(rest):
            self._at += len(found[0])
            return "\\" + found[0]
        if letter == "c" and rest[1:2].isascii() and rest[1:2].isalpha():
            self._at += 2
            return f"\\x{{{ord(rest[1]) % 32:x}}}"
        self._at += 1
        if letter == "0" and not rest[1:2].isdecimal():
            return r"\x00"
        if not inside and (letter.isdecimal() or rest.startswith("k<")):
            raise UnheldPatternError("a back-reference")
        if letter in "bB":
            if inside and letter == "b":
                return r"\x08"
            raise UnheldPatternError("a word boundary")
        return _LETTERS.get(letter) or f"\\x{{{ord(letter):x}}}"  # itself

    def _class(self) -> str:
        negated = self._text.startswith("[^", self._at)
        self._at += 2 if negated else 1
        found: list[str] = []
        while not self._text.startswith("]", self._at):
            if self._at >= len(self._text):
                raise ValueError("a class of letters is not closed")
            letter = self._text[self._at]
            self._at += 1
            if letter == "\\":
                found.append(self._escape(inside=True))
            else:
                found.append(f"\\{letter}" if letter in "[&~^" else letter)
        self._at += 1
        if not found:
            return _ANY if negated else _NOTHING
        return f"[{'^' if negated else ''}{''.join(found)}]"


def _number(byte: str | None, braced: str | None, high: str | None, low: str | None, unit: str | None) -> str:
    """A letter's number, of the ways to write it."""
    if high is not None and low is not None:
        return f"{0x10000 + ((int(high, 16) - 0xD800) << 10) + int(low, 16) - 0xDC00:x}"
    return byte or braced or unit or ""
