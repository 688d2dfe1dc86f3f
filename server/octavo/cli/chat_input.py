"""Read the messages of `octavo chat`: from a person at a terminal, or from lines of standard input."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, Protocol, TextIO

from octavo.cli.pastes import FilteredReader, PasteFilter, Pastes

BLOCK = '"""'  # begins and ends a message of several lines


def number(text: str) -> float:
    """A finite number. Raises ValueError."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value


class Reader(Protocol):
    """``read`` gives the next message, None at the end of input. Raises KeyboardInterrupt."""

    interactive: bool

    def read(self) -> str | None:
        """The next message, None at the end of input."""
        ...


class Terminal:
    """Lines edited and recalled; what is pasted is one message, however many lines it has. A long paste is a mark in
    the messages, as on the line: `whole` has its text."""

    interactive = True

    def __init__(self) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.history import InMemoryHistory
        from prompt_toolkit.input import create_input
        from prompt_toolkit.output import create_output
        from prompt_toolkit.utils import is_dumb_terminal

        output: Any = None  # decided by prompt_toolkit, which then writes nothing but text
        if not is_dumb_terminal():
            output = create_output(sys.stdout if sys.stdout.isatty() else sys.stderr)
            output.enable_cpr = False  # or it warns of terminals that do not tell where the cursor is
        self._pastes = Pastes()
        source: Any = create_input()
        if hasattr(source, "stdin_reader"):
            source.stdin_reader = FilteredReader(source.stdin_reader, PasteFilter(self._pastes.shown))
        self._session: PromptSession[str] = PromptSession(history=InMemoryHistory(), output=output, input=source)

    def read(self) -> str | None:
        """The next message, None at the end of input. Raises KeyboardInterrupt."""
        return _message(self._line)

    def whole(self, text: str) -> str:
        """A message, or a part of one, with the texts of long pastes."""
        return self._pastes.whole(text)

    def keep(self, message: str) -> None:
        """Let the up arrow bring back a whole message, also one of several lines."""
        if "\n" in message:
            self._session.history.append_string(message)

    @property
    def typed(self) -> str:
        """The text that stood on the line when Ctrl-C abandoned it."""
        return self._session.default_buffer.text

    def _line(self, first: bool) -> str | None:
        try:
            # With a colour, if only the default one, the space is painted too, not skipped by moving the cursor: what
            # reads along (script, pexpect, a screen reader) finds the prompt as it is seen.
            return self._session.prompt([("fg:ansidefault", "> " if first else "... ")])
        except EOFError:
            return None


class Lines:
    """Each line of a stream is a message."""

    interactive = False

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def read(self) -> str | None:
        """The next message, None at the end of input."""
        return _message(self._line)

    def _line(self, first: bool) -> str | None:
        line = self._stream.readline()
        return line.removesuffix("\n").removesuffix("\r") if line else None


def _message(line: Callable[[bool], str | None]) -> str | None:
    """One message: a line, or all lines between two \"\"\"."""
    text = line(True)
    if text is None or not text.lstrip().startswith(BLOCK):
        return text
    text = text.lstrip().removeprefix(BLOCK)
    while not text.rstrip().endswith(BLOCK):
        more = line(False)
        if more is None:
            return text
        text += "\n" + more
    return text.rstrip().removesuffix(BLOCK).strip("\n")
