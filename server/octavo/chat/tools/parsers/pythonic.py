"""Calls written as Python: ``[weather(city="Paris", days=3), time()]`` (Llama 3.2 and 4, and others)."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import warnings
from typing import Any

from octavo.chat.tools.formats.row import Python
from octavo.chat.tools.parsers.format_reader import FormatReader
from octavo.chat.tools.parsers.reader import MAX_DEPTH, CutOffError, NotACallError, Steps

MAX_CALL_CHARS = 200_000
_NAME = re.compile(r"[A-Za-z0-9_.]*")
_PLAIN = re.compile(r"[^\"'\\()\[\]{},]*")
_BEHIND = ("", ",", ")", "]", "}", ":")  # a text
# A text up to the first quote that such a character follows.
_TEXT = re.compile(r"""(["'])((?:\\.|(?!\1\s*(?:[,)\]}:]|$)).)*)\1""", re.DOTALL)
_TEXT_OR_ZEROS = re.compile(_TEXT.pattern + r"|(?<![\w.])0+(?=[0-9])", re.DOTALL)
_CONSTANTS = {"true": True, "false": False, "null": None}  # models mix the languages up


class PythonReader(FormatReader):
    """Reads a list of calls, or one call a line. Nothing is evaluated: arguments are literals. A call is given out when
    it is whole, because Python's spelling becomes JSON's only then."""

    _comma = 0  # behind the last argument that is known to be whole, from the settled position

    def _calls(self, found: str) -> Steps[None]:
        self._at += len(found)
        self._name = ""
        yield from self._skip_space()
        if isinstance(self.row.arguments, Python) and self.row.arguments.lines:
            yield from self._lines()
        else:
            yield from self._list()
        yield from self._optional(self.row.section[1])
        self._settled = self._at

    def _list(self) -> Steps[None]:
        yield from self._expect("[")
        while True:
            yield from self._skip_space()
            name, source = yield from self._source()
            if (yield from self._skip_space()) not in (",", "]"):
                raise NotACallError
            self._give_call(name, arguments_of(source))
            if (yield from self._read("]")):
                break
            self._at += 1
            self._settled = self._at
            if (yield from self._skip_space()) == "]":  # Python allows a comma there
                self._at += 1
                break
        self._settled = self._at

    def _lines(self) -> Steps[None]:
        while True:
            name, source = yield from self._source()
            self._give_call(name, arguments_of(source))
            self._settled = self._at
            if (yield from self._skip_space()) in ("<", ""):
                return
            self._name = ""

    def _source(self) -> Steps[tuple[str, str]]:
        """A call up to its closing parenthesis: its name and its source."""
        begin = self._at - self._settled  # nothing is settled meanwhile
        try:
            name = yield from self._called_name(self._run_of(_NAME))
        except CutOffError:
            if not self._may_become_known():
                raise NotACallError from None
            raise
        if not name or (self._names and name not in self._names):
            raise NotACallError
        yield from self._expect("(")
        self._comma = 0
        try:
            yield from self._rest_of_call()
        except CutOffError:
            if self._comma:
                source = self._text[self._settled + begin : self._settled + self._comma]
                with contextlib.suppress(NotACallError):
                    self._held = arguments_of(source + ")").removesuffix("}")
            raise
        return name, self._text[self._settled + begin : self._at]

    def _rest_of_call(self) -> Steps[None]:
        """Read up to the closing parenthesis; keeps where the last comma between arguments stands."""
        open_brackets = 1
        while True:
            yield from self._run_of(_PLAIN)
            character = yield from self._peek()
            if not character or self._at - self._settled > MAX_CALL_CHARS:
                raise NotACallError
            if character in "\"'":
                yield from self._string(character)
                continue
            if character == "," and open_brackets == 1:
                self._comma = self._at - self._settled
            self._at += 1
            if character in "([{":
                open_brackets += 1
                if open_brackets > MAX_DEPTH:
                    raise NotACallError
            elif character in ")]}":
                open_brackets -= 1
                if open_brackets == 0:
                    return

    def _string(self, quote: str) -> Steps[None]:
        """Templates write texts without escapes: a quote ends a text only where the next argument or item may begin."""
        end = quote * 3 if (yield from self._starts_with(quote * 3)) else quote
        self._at += len(end)
        plain = re.compile(rf"[^{quote}\\]*")
        while True:
            yield from self._run_of(plain)
            if (yield from self._read(end)):
                begin = self._at - self._settled
                following = yield from self._skip_space()
                self._at = self._settled + begin
                if len(end) == 3 or following in _BEHIND:
                    return
                continue
            if (yield from self._peek()) == "\\":
                self._at += 1
            if not (yield from self._peek()):
                raise NotACallError
            self._at += 1


def arguments_of(source: str) -> str:
    """The keyword arguments of a call as a JSON object. Raises NotACallError for anything but literals."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about "\d" in strings
            source = source.replace("\0", "\\x00")  # which no source may have
            try:
                call = ast.parse(source, mode="eval").body
            except SyntaxError:
                call = ast.parse(_TEXT_OR_ZEROS.sub(_escaped, source), mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise NotACallError
        arguments: dict[str, Any] = {}
        for keyword in call.keywords:
            if keyword.arg is None or keyword.arg in arguments:
                raise NotACallError
            arguments[keyword.arg] = _literal(keyword.value)
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        return text if is_unicode(text) else json.dumps(arguments)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise NotACallError from None


def _escaped(found: re.Match[str]) -> str:
    """A text that was written without escapes, with them; nothing for zeros in front of a number."""
    quote, inner = found[1], found[2]
    if quote is None:
        return ""
    inner = re.sub(rf"(\\\\.)|{quote}|\n", lambda part: part[1] or {"\n": "\\n"}.get(part[0], "\\" + quote), inner)
    return quote + inner + quote


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=value) if value is None or isinstance(value, (str, bool, int, float)):
            return value
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {_key(key): _literal(value) for key, value in zip(keys, values, strict=True) if key is not None}
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=ast.Constant(value=value)) if type(value) in (int, float):
            return -value if isinstance(node.op, ast.USub) else value  # type: ignore[operator]
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
    raise NotACallError


def _key(node: ast.expr) -> str | int | float | bool | None:
    key: str | int | float | bool | list[Any] | dict[Any, Any] | None = _literal(node)
    if isinstance(key, list | dict):
        raise NotACallError
    return key


def is_unicode(text: str) -> bool:
    """True if an answer can carry ``text``: it has no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
