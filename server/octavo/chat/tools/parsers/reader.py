"""Reading text while it is generated: a reader is a generator that pauses until more has come. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]  # yields when it needs more text

MAX_DEPTH = 200  # of nested values in arguments; deeper ones are no call

_SPACE = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
SCALAR = re.compile(r"[A-Za-z0-9+\-.]*")
_VALID_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")


class NotACallError(Exception):
    """The text is no call, or no longer one; everything since the last settled position is content."""


class CutOffError(NotACallError):
    """The text was cut off where more of a call was to come."""


class TextReader:
    """Reads tokens and JSON values of a text that grows.

    Text that is settled is dropped at a pause: lengths stay valid over one, positions do not.
    """

    def __init__(self) -> None:
        self._text = ""  # that is still of interest
        self._at = 0  # up to here it is read
        self._settled = 0  # up to here it is given out, or known to be markup
        self._ended = False
        self._cut = False  # ended by a limit or a stop string, so anywhere

    def _more(self) -> Steps[bool]:
        """Wait for more text. False when it has ended; raises CutOffError when it was cut off."""
        if self._cut:
            raise CutOffError
        if not self._ended:
            yield
            return True
        return False

    def _peek(self) -> Steps[str]:
        """The next character; "" at the end of the text."""
        while self._at == len(self._text) and (yield from self._more()):
            pass
        return self._text[self._at : self._at + 1]

    def _skip_space(self) -> Steps[str]:
        """Read white space; returns the character behind it."""
        yield from self._run_of(_SPACE)
        return self._text[self._at : self._at + 1]

    def _starts_with(self, literal: str) -> Steps[bool]:
        """True if ``literal`` comes next; reads nothing."""
        while True:
            ahead = self._text[self._at : self._at + len(literal)]
            if ahead == literal:
                return True
            if not literal.startswith(ahead) or not (yield from self._more()):
                return False

    def _read(self, literal: str) -> Steps[bool]:
        """Read ``literal`` if it comes next."""
        found = yield from self._starts_with(literal)
        if found:
            self._at += len(literal)
        return found

    def _expect(self, literal: str) -> Steps[None]:
        if not (yield from self._read(literal)):
            raise NotACallError

    def _run_of(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read all characters that ``pattern``, a class with a star, takes."""
        run = ""
        while True:
            found = pattern.match(self._text, self._at)
            assert found is not None
            self._at = found.end()
            run += found.group()
            if self._at < len(self._text) or not (yield from self._more()):
                return run

    # JSON. ``out`` gets the text of a value as it is read; strict, but for what models often forget to escape.

    def _json_value(self, out: Callable[[str], None]) -> Steps[None]:
        closers: list[str] = []
        while True:
            character = yield from self._copy_space(out)
            if character in ("{", "["):
                self._copy(out, character)
                closers.append("}" if character == "{" else "]")
                if len(closers) > MAX_DEPTH:
                    raise NotACallError
                following = yield from self._copy_space(out)
                if following != closers[-1]:
                    if closers[-1] == "}":
                        yield from self._json_key(out)
                    continue
            elif character == '"':
                yield from self._json_string(out)
            else:
                yield from self._json_scalar(out)
            while closers:  # behind a value, or an empty object or list
                character = yield from self._copy_space(out)
                if character == closers[-1]:
                    self._copy(out, character)
                    closers.pop()
                elif character == ",":
                    self._copy(out, character)
                    if closers[-1] == "}":
                        yield from self._copy_space(out)
                        yield from self._json_key(out)
                    break
                else:
                    raise NotACallError
            else:
                return

    def _copy(self, out: Callable[[str], None], text: str, shown: str | None = None) -> None:
        """Read ``text``, which comes next, and hand it on, or ``shown`` instead."""
        self._at += len(text)
        out(text if shown is None else shown)

    def _copy_space(self, out: Callable[[str], None]) -> Steps[str]:
        if space := (yield from self._run_of(_SPACE)):
            out(space)
        return self._text[self._at : self._at + 1]

    def _json_key(self, out: Callable[[str], None]) -> Steps[None]:
        yield from self._json_string(out)
        if (yield from self._copy_space(out)) != ":":
            raise NotACallError
        self._copy(out, ":")

    def _json_scalar(self, out: Callable[[str], None]) -> Steps[None]:
        text = yield from self._run_of(SCALAR)
        if not _VALID_SCALAR.fullmatch(text):
            if self._at < len(self._text):
                self._at -= len(text)
            raise NotACallError
        out(text)

    def _json_string(self, out: Callable[[str], None]) -> Steps[None]:
        yield from self._expect('"')
        out('"')
        while True:
            end = _PLAIN.match(self._text, self._at).end()  # type: ignore[union-attr]
            if end > self._at:
                self._copy(out, self._text[self._at : end])
            character = yield from self._peek()
            if character == '"':
                self._copy(out, character)
                return
            if character == "\\":
                yield from self._json_escape(out)
            elif character and character < " ":
                self._copy(out, character, json.dumps(character)[1:-1])
            elif not character:
                raise NotACallError

    def _json_escape(self, out: Callable[[str], None]) -> Steps[None]:
        self._at += 1
        kind = yield from self._peek()
        if not kind:
            raise NotACallError
        if kind == "u":
            digits = ""
            while len(digits) < 4:
                self._at += 1
                digit = yield from self._peek()
                if not digit or digit not in "0123456789abcdefABCDEF":
                    raise NotACallError
                digits += digit
            self._copy(out, digit, "\\u" + digits)
        elif kind == "'":
            self._copy(out, kind)
        elif kind in '"\\/bfnrt':
            self._copy(out, kind, "\\" + kind)
        else:  # as in "\d": the backslash itself was meant
            out("\\\\")

    def _json_text(self) -> Steps[str]:
        """One value as text, held back until it is whole."""
        held: list[str] = []
        yield from self._json_value(held.append)
        return "".join(held)

    def _decoded_string(self) -> Steps[str]:
        held: list[str] = []
        yield from self._json_string(held.append)
        return as_unicode(json.loads("".join(held)))


def as_unicode(text: str) -> str:
    """Raises NotACallError for a text with half a surrogate pair, which no answer can carry."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise NotACallError from None
    return text
