"""Tool calls in a model's text, parsed while it is being generated. Pure.

A parser is a recursive descent one, written as a generator that pauses where the text ends so far. Its result depends
on the text alone, not on how it was cut. Every character is a call's arguments, markup of a call, or content:
what turns out to be no call is content. Of a call that was cut off, the parser returns what there is: its name, or the
beginning of it, and the beginning of its arguments. A call without even that is dropped.
"""

from __future__ import annotations

import contextlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.chat.tools.parsers.reader import SCALAR, CutOffError, NotACallError, Steps, TextReader, as_unicode

_NUMBER_BEGIN = re.compile(r"-?((0|[1-9][0-9]*)(\.([0-9]+([eE][+-]?[0-9]*)?)?|[eE][+-]?[0-9]*)?)?")
_CALL_BEGIN = re.compile(r'\{\s*("(n(a(m(e("\s*(:\s*"?)?)?)?)?)?)?)?')


@dataclass
class CallPiece:
    """A piece of the ``index``-th call: its name comes with the first one, pieces of ``arguments`` add up to JSON."""

    index: int
    name: str | None
    arguments: str
    id: str | None = None  # as the model wrote it, with the name


@dataclass
class Reasoning:
    """A piece of the model's thoughts, of formats in which tool calls and thoughts are written alike."""

    text: str


Piece = str | CallPiece | Reasoning  # a str is content


class ToolParser(TextReader, ABC):
    """`feed` it the text as it comes, then `finish`; both return the pieces that are certain by then.

    ``names`` are the tools' names, or the schemas of their arguments by name. Formats whose calls carry no marker take
    a call only when it names one of them; those that write arguments as bare text read these by their schemas.
    """

    def __init__(self, names: Collection[str] | Mapping[str, Any] = ()) -> None:
        super().__init__()
        self.markers: tuple[str, ...] = ()  # what a call, or several, may begin with
        self.marks: tuple[str, ...] = ()  # what separates thoughts and other text
        self.name_keys: tuple[str, ...] = ("name",)  # of calls that are JSON
        self.arguments_keys: tuple[str, ...] = ("arguments", "parameters")
        self.num_calls = 0
        self.num_unknown = 0  # of these, calls whose names no tool has
        self.num_malformed = 0  # texts that began as a call with a name and became content
        self.demanded = False  # a grammar makes the text a call
        self._call_id: str | None = None  # of the call that begins next, where its text has one
        self._names = frozenset(names)
        self._schemas = names if isinstance(names, Mapping) else {}
        self._space = ""  # read as content; given out only when more content follows
        self._in_arguments = False
        self._name: str | None = None  # of a call that is not given out yet, as far as it is known; None: no call
        self._held = ""  # the beginning of its arguments
        self.ends_inside_call = False
        self._pieces: list[Piece] = []
        self._steps = self._run()

    def feed(self, text: str) -> list[Piece]:
        """New text; returns the pieces that are certain by now."""
        self._text = self._text[self._settled :] + text
        self._at -= self._settled
        self._settled = 0
        return self._advance()

    def finish(self, cut: bool = False) -> list[Piece]:
        """The text has ended. ``cut``: by a limit or a stop string, so anywhere."""
        self._ended, self._cut = True, cut
        return self._advance()

    def _advance(self) -> list[Piece]:
        next(self._steps, None)
        pieces, self._pieces = self._pieces, []
        return pieces

    def _run(self) -> Steps[None]:
        while not self._text:
            if self._ended:
                return
            yield
        with contextlib.suppress(CutOffError):  # before any call
            yield from self._parse()
        yield from self._content_until()
        if self.num_calls:
            return
        if not self.demanded:
            self._give(self._space)
        elif self._cut and len(self._names) == 1:  # before its name, which is known
            self.ends_inside_call = True
            (name,) = self._names
            self._give_call(name, "")

    @abstractmethod
    def _parse(self) -> Steps[None]:
        """Read the format; what is left when it returns is content."""

    # Giving out.

    def _give(self, piece: Piece) -> None:
        last = self._pieces[-1] if self._pieces else None
        if isinstance(piece, str):
            if isinstance(last, str):
                self._pieces[-1] = last + piece
            elif piece:
                self._pieces.append(piece)
        elif isinstance(piece, Reasoning):
            if isinstance(last, Reasoning):
                last.text += piece.text
            else:
                self._pieces.append(piece)
        elif isinstance(last, CallPiece) and last.index == piece.index:
            last.arguments += piece.arguments
        else:
            self._pieces.append(piece)

    def _settle_as_content(self, end: int) -> None:
        """Everything up to ``end``. Space waits for what follows: before a call and behind the last it is dropped."""
        text = self._space + self._text[self._settled : end]
        visible = text.rstrip()
        self._space = text[len(visible) :]
        self._settled = end
        self._give(visible)

    def _start_call(self, name: str) -> None:
        self._space, self._name, self._held = "", None, ""
        self.num_calls += 1
        self.num_unknown += bool(self._names) and name not in self._names
        self._give(CallPiece(self.num_calls - 1, name, "", self._call_id))
        self._call_id = None

    def _give_arguments(self, text: str) -> None:
        self._settled = self._at
        self._give(CallPiece(self.num_calls - 1, None, text))

    def _give_call(self, name: str, arguments: str) -> None:
        self._start_call(name)
        self._give_arguments(arguments)

    def _attempt(self, call: Steps[None]) -> Steps[None]:
        """Read a call, or several; where they are none, their text is content."""
        calls_before = self.num_calls
        try:
            yield from call
            self._settled = self._at
        except CutOffError:
            self._give_cut_call()
        except NotACallError:
            if self._in_arguments and self._ended and self._at == len(self._text):  # the client sees how far it came
                self._give_arguments(self._text[self._settled :])
            else:
                self.num_malformed += bool(self._name) or self._in_arguments
                if self._at == self._settled and self.num_calls == calls_before:
                    self._at += self._at < len(self._text)  # behind the marker's beginning, or it would be met for ever
                self._settle_as_content(self._at)
        self._in_arguments, self._name, self._held = False, None, ""

    def _give_cut_call(self) -> None:
        rest = self._text[self._settled :]
        self._at = len(self._text)
        if self._in_arguments:
            self.ends_inside_call = True
            self._give_arguments(rest if _begins_value(rest) else "")
        elif self._name is not None:
            self.ends_inside_call = True
            if name := self._completed(self._name):
                self._give_call(name, self._held)
        self._settled = self._at

    def _completed(self, beginning: str) -> str:
        """The name of a tool where only one begins so."""
        names = [name for name in self._names if name.startswith(beginning)]
        return names[0] if len(names) == 1 else beginning

    def _may_become_known(self) -> bool:
        """True if the name, cut off so far, may become that of a tool."""
        return not self._names or any(name.startswith(self._name or "") for name in self._names)

    # Reading.

    def _content_until(self, *markers: str) -> Steps[str]:
        """Content up to the next marker, which is returned and not yet read; "" at the end of the text."""
        pattern = re.compile("|".join(map(re.escape, markers)) or r"(?!)")
        while True:
            found = pattern.search(self._text, self._at)
            if found is not None:
                self._at = found.start()
                self._settle_as_content(self._at)
                return found.group()
            hold = max((overlap(self._text, marker) for marker in markers), default=0)
            if self._ended and not self._cut:
                hold = 0
            self._at = max(self._at, len(self._text) - hold)
            self._settle_as_content(self._at)
            if self._ended:
                self._at = self._settled = len(self._text)  # without the marker's beginning
                return ""
            yield

    def _called_name(self, read: Steps[str], quote: str = "") -> Steps[str]:
        """The name that ``read`` reads. Where that is cut off, what there is of it stays known."""
        begin = self._at - self._settled + len(quote)  # nothing is settled meanwhile
        try:
            self._name = yield from read
        except CutOffError:
            self._name = self._text[self._settled + begin :].partition("\\")[0]
            raise
        return self._name

    # Calls written as JSON.

    def _json_call(self, known_only: bool = False) -> Steps[None]:
        """``{"name": ..., "arguments": {...}}``, in any order, with "parameters" for "arguments" or without either.

        A missing brace at the end, where models lose count, is forgiven.
        """
        begin = self._at - self._settled
        yield from self._expect("{")
        self._name = ""
        try:
            yield from self._json_call_members(known_only)
        except CutOffError:
            if known_only and self._name is not None:
                begun = self._name or _CALL_BEGIN.fullmatch(self._text, self._settled + begin)
                if not begun or not self._may_become_known():
                    raise NotACallError from None
            raise

    def _json_call_members(self, known_only: bool) -> Steps[None]:
        name: str | None = None
        held: str | None = None  # arguments that came before the name
        done = False
        while True:
            key = yield from self._member_name()
            if key in self.name_keys and name is None:
                name = yield from self._called_name(self._decoded_string(), '"')
                if not name or (known_only and self._names and name not in self._names):
                    raise NotACallError
            elif key in self.arguments_keys and not done and held is None:
                if name is None:
                    held = self._held = yield from self._held_arguments()
                else:
                    yield from self._arguments(name)
                    done = True
            else:
                yield from self._json_text()
            if name is not None and held is not None and not done:
                self._give_call(name, held)
                done = True
            following = yield from self._skip_space()
            if following in ("}", ","):
                self._at += 1
            elif done:
                return
            else:
                raise NotACallError
            if following == "}":
                break
        if name is None:
            raise NotACallError
        if not done:
            self._give_call(name, "{}")

    def _member_name(self) -> Steps[str]:
        """A member's name and the colon behind it."""
        yield from self._skip_space()
        key = yield from self._decoded_string()
        if (yield from self._skip_space()) != ":":
            raise NotACallError
        self._at += 1
        yield from self._skip_space()
        return key

    def _arguments(self, name: str) -> Steps[None]:
        """The arguments of a call whose name is known: an object is given out as it comes."""
        if (yield from self._peek()) != "{":
            self._give_call(name, (yield from self._held_arguments()))
            return
        self._start_call(name)
        self._in_arguments = True
        yield from self._json_value(self._give_arguments)
        self._in_arguments = False

    def _held_arguments(self) -> Steps[str]:
        """Arguments as one text: an object, an object inside a string, or null."""
        text = yield from self._json_text()
        if text == "null":
            return "{}"
        if text.startswith('"'):
            text = as_unicode(json.loads(text)).strip() or "{}"
            try:
                is_object = isinstance(json.loads(text, parse_constant=_no_constant), dict)
            except (ValueError, RecursionError):
                is_object = False
            if not is_object:
                raise NotACallError
        elif not text.startswith("{"):
            raise NotACallError
        return text

    def _json_calls(self, known_only: bool = False) -> Steps[None]:
        """``[call, call, ...]``"""
        yield from self._expect("[")
        if (yield from self._skip_space()) == "]":
            self._at += 1
            return
        while True:
            yield from self._json_call(known_only)
            self._settled = self._at
            following = yield from self._skip_space()
            if following != ",":
                break
            self._at += 1
            yield from self._skip_space()
        if following:  # the text may end without the bracket
            yield from self._expect("]")


def _begins_value(text: str) -> bool:
    """False for what no number and no word of JSON begins with."""
    if not SCALAR.fullmatch(text) or not text:
        return True
    return bool(_NUMBER_BEGIN.fullmatch(text)) or any(word.startswith(text) for word in ("true", "false", "null"))


def overlap(text: str, marker: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``marker``, but not the whole of it."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
