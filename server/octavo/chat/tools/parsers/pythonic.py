"""Calls written as Python: ``[weather(city="Paris", days=3), time()]`` (Llama 3.2 and 4, and others)."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import warnings
from typing import Any

from octavo.chat.tools.parsers.core import ToolParser
from octavo.chat.tools.parsers.reader import MAX_DEPTH, CutOffError, NotACallError, Steps

MAX_CALL_CHARS = 200_000
_NAME = re.compile(r"[A-Za-z0-9_.]*")
_PLAIN = re.compile(r"[^\"'\\()\[\]{},]*")
_CONSTANTS = {"true": True, "false": False, "null": None}  # models mix the languages up


class PythonicParser(ToolParser):
    """The list stands at the beginning of the text, or behind ``<|python_start|>``. Nothing is evaluated: arguments
    are literals. A call is given out when it is whole, because Python's spelling becomes JSON's only then."""

    _comma = 0  # behind the last argument that is known to be whole, from the settled position
    START, END = "<|python_start|>", "<|python_end|>"
    MARKERS = (START,)
    needs_special_tokens = True

    def _parse(self) -> Steps[None]:
        if (yield from self._skip_space()) == "[":
            yield from self._attempt(self._calls())
        while (yield from self._content_until(self.START)):
            yield from self._attempt(self._tagged())

    def _tagged(self) -> Steps[None]:
        self._at += len(self.START)
        self._name = ""
        yield from self._skip_space()
        yield from self._calls()

    def _calls(self) -> Steps[None]:
        yield from self._expect("[")
        while True:
            yield from self._skip_space()
            name, source = yield from self._call()
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
        yield from self._skip_space()
        yield from self._read(self.END)

    def _call(self) -> Steps[tuple[str, str]]:
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
        end = quote * 3 if (yield from self._starts_with(quote * 3)) else quote
        self._at += len(end)
        plain = re.compile(rf"[^{quote}\\]*")
        while not (yield from self._read(end)):
            if (yield from self._peek()) == "\\":
                self._at += 1
            if not (yield from self._peek()):
                raise NotACallError
            self._at += 1
            yield from self._run_of(plain)


class Lfm2Parser(PythonicParser):
    """Parses calls within ``<|tool_call_start|>`` and ``<|tool_call_end|>``: LFM2."""

    START, END = "<|tool_call_start|>", "<|tool_call_end|>"
    MARKERS = (START,)


def arguments_of(source: str) -> str:
    """The keyword arguments of a call as a JSON object. Raises NotACallError for anything but literals."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about "\d" in strings
            call = ast.parse(source, mode="eval").body
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


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=value) if value is None or isinstance(value, (str, bool, int, float)):
            return value
        case ast.List(elts=items) | ast.Tuple(elts=items):
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
