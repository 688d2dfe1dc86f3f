"""Limit the resources of a chat template: a meter counts its steps, the bytes that it makes, and its processor time.

The counts come first and are the same on any machine; the time is there for what they misjudge. A template that has
used up its share gets a further one in proportion to its input, so long conversations pass as before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import GeneratorType
from typing import Any

from jinja2.runtime import markup_join
from jinja2.utils import Namespace
from markupsafe import Markup, escape

STEPS = 10_000_000  # of about 0.1 µs
BYTES = 256 << 20
SECONDS = 2.0  # of the thread's processor time, which a busy machine does not use up
_STEPS_PER_BYTE = 4  # of the input
_BYTES_PER_BYTE = 16
_SHORT = 4096  # bytes that are written in no time
_LOOK_STEPS = 50_000  # between two looks at the clock
_LOOK_PARTS = 5_000  # of a value that is weighed, which take about as long
_BITS = 1 << 16  # of a number in arithmetic

_EMPTY: dict[Any, Any] = {}
_VIEWS = (type(_EMPTY.keys()), type(_EMPTY.values()))
_PAIRS = type(_EMPTY.items())
_SEQUENCES = (list, tuple, set, frozenset, *_VIEWS)
_SCALARS = frozenset({int, float, bool, type(None)})
_REPR_GROWTH = 10  # "\U0001f600" of one character


class UsedUpError(Exception):
    """The template has used up what it may. No ValueError, which filters of jinja2 take for bad values."""


class Meter:
    """Counts one rendering. ``input_bytes`` weighs the input; it is called once, when the first share is used up."""

    def __init__(
        self,
        input_bytes: Callable[[], int] = lambda: 0,
        steps: int = STEPS,
        size: int = BYTES,
        seconds: float = SECONDS,
    ) -> None:
        self.steps, self.size = steps, size  # what is left
        self._all_steps, self._all_bytes, self._seconds = steps, size, seconds
        self._input_bytes: Callable[[], int] | None = input_bytes
        self._end = time.thread_time() + seconds
        self._look = max(0, steps - _LOOK_STEPS)
        self.why: str | None = None  # once something is used up

    def toll(self, steps: int, size: int = 0) -> None:
        """Counts work that is about to be done, or was. Raises UsedUpError."""
        self.steps -= steps + (size >> 8)
        self.size -= size
        if self.size < 0 or self.steps < self._look:
            self._settle()

    def afford(self, size: int) -> None:
        """Raises UsedUpError unless ``size`` bytes may be made; counts none."""
        while size > self.size:
            self._extend(self._too_many_bytes())

    def _settle(self) -> None:
        while self.size < 0:
            self._extend(self._too_many_bytes())
        while self.steps < 0:
            self._extend(self._too_many_steps())
        self._look_at_clock()
        self._look = max(0, self.steps - _LOOK_STEPS)

    def _look_at_clock(self) -> None:
        if time.thread_time() > self._end:
            self._stop(f"takes more than {self._seconds:g} s of processor time")

    def _too_many_bytes(self) -> str:
        return f"makes more than {self._all_bytes:,} bytes of text and lists"

    def _too_many_steps(self) -> str:
        return f"takes more than {self._all_steps:,} steps"

    def _extend(self, why: str) -> None:
        if self._input_bytes is None:
            self._stop(why)
        assert self._input_bytes is not None
        given, self._input_bytes = self._input_bytes(), None
        self.steps += given * _STEPS_PER_BYTE
        self._all_steps += given * _STEPS_PER_BYTE
        self.size += given * _BYTES_PER_BYTE
        self._all_bytes += given * _BYTES_PER_BYTE

    def _stop(self, why: str) -> None:
        self.why = self.why or why
        self._input_bytes = None
        self.steps = self.size = -1  # whatever the template does next stops it again
        self._look = 0
        raise UsedUpError(self.why)

    # Operations of expressions.

    def weigh(self, value: Any) -> int:
        """Counts a look at all of a value, as comparing, hashing and writing it take. Its bytes, about."""
        if type(value) is str:
            self.toll(1 + (len(value) >> 6))
            return len(value)
        if type(value) in _SCALARS and (type(value) is not int or value.bit_length() < _BITS):
            return 32
        while (weight := weight_of(value, limit := min(self.size, 8 * self.steps), self._look_at_clock)) > limit:
            self._extend(self._too_many_bytes() if limit == self.size else self._too_many_steps())
        self.toll(1 + (weight >> 3), weight >> 2)
        return weight

    def weighed(self, value: Any) -> Any:
        """The value, weighed."""
        self.weigh(value)
        return value

    def made(self, value: Any) -> Any:
        """The value, once what is new in it is counted; of an iterator, as it goes on."""
        kind = type(value)
        if kind is str:
            self.text(value)
        elif kind in _SCALARS:
            if kind is int and value.bit_length() > _BITS:
                self._stop(f"makes numbers of more than {_BITS:,} bits")
        elif isinstance(value, (str, bytes)):
            self.toll(1, 4 * len(value))
        elif isinstance(value, (list, tuple)):
            self.toll(1 + (len(value) >> 3), 8 * len(value))
        elif isinstance(value, (dict, set, frozenset)):
            self.toll(1 + len(value), 100 * len(value))
        elif kind is GeneratorType:
            return self._counted(value)
        return value

    def _counted(self, values: Iterator[Any]) -> Iterator[Any]:
        for value in values:
            self.toll(10)
            yield value if isinstance(value, (str, dict)) else self.made(value)

    def text(self, value: Any) -> str:
        """``str(value)``."""
        if type(value) is str:
            size = len(value) if value.isascii() else 4 * len(value)
            self.size -= size
            if size > _SHORT or self.size < 0:
                self.toll(size >> 8)
            return value
        if type(value) not in _SCALARS:
            self.afford(_REPR_GROWTH * self.weigh(value))
        made: str = self.made(str(value))
        return made

    def _written(self, value: Any) -> int:
        """Bytes that the value takes at most as text."""
        return self.weigh(value) * (1 if isinstance(value, str) else _REPR_GROWTH)

    def escaped(self, value: Any, wanted: bool) -> str:
        """The value as text, with < & > escaped if ``wanted``."""
        if not wanted:
            return self.text(value)
        self.afford(6 * self._written(value))
        made: str = self.made(escape(value))
        return made

    def joined(self, values: tuple[Any, ...], escapes: bool) -> str:
        """Return the result of ``~``."""
        if escapes:
            self.afford(6 * sum(map(self._written, values)))
            return self.made(markup_join(values))  # type: ignore[no-any-return]
        return self.made("".join([self.text(value) for value in values]))  # type: ignore[no-any-return]

    def plus(self, left: Any, right: Any) -> Any:
        """``left + right``."""
        if type(left) is str and type(right) is str:
            whole = left + right
            self.toll(0, len(whole) if whole.isascii() else 4 * len(whole))
            return whole
        if isinstance(left, Markup) or isinstance(right, Markup):
            self.afford(6 * (self.weigh(left) + self.weigh(right)))
        return self.made(left + right)

    def inside(self, left: Any, right: Any) -> bool:
        """``left in right``."""
        if type(right) is dict:
            if type(left) is not str:
                self.weigh(left)
        elif type(left) is str or type(left) in _SCALARS:
            try:
                self.toll(1 + (len(right) >> (6 if isinstance(right, str) else 1)))
            except TypeError:
                pass
        else:
            self.weigh(left)
            self.weigh(right)
        return left in right


def weight_of(value: Any, limit: int, look_at_clock: Callable[[], None] = lambda: None) -> int:
    """About how many bytes a value takes, each of its parts as often as it is there; more than ``limit`` ends it.

    A small value has many parts where they are shared: the clock is looked at every so many of them.
    """
    weight, waiting, unseen = 0, [value], _LOOK_PARTS
    while waiting and weight <= limit:
        if not (unseen := unseen - 1):
            look_at_clock()
            unseen = _LOOK_PARTS
        part = waiting.pop()
        if isinstance(part, str):
            weight += 16 + len(part)
        elif isinstance(part, dict):
            weight += 64 + 16 * len(part)
            if weight <= limit:
                waiting += part.keys()
                waiting += part.values()
        elif isinstance(part, _SEQUENCES):
            weight += 32 + 8 * len(part)
            if weight <= limit:
                waiting += part
        else:
            weight += 32 + _weight_of_other(part, waiting)
    return weight


def _weight_of_other(part: Any, waiting: list[Any]) -> int:
    if isinstance(part, int):
        return part.bit_length() >> 2
    if isinstance(part, bytes):
        return 4 * len(part)
    if isinstance(part, _PAIRS):
        waiting += dict(part).items()
        return 100 * len(part)
    if isinstance(part, Namespace):
        waiting.append(object.__getattribute__(part, "_Namespace__attrs"))
    return 0


_current: ContextVar[Meter | None] = ContextVar("meter", default=None)


def current_meter() -> Meter:
    """The meter of the rendering that this thread or task is in."""
    meter = _current.get()
    return meter if meter is not None else Meter()


def given_meter() -> Meter | None:
    """The meter that several renderings share, None where each has its own."""
    return _current.get()


@contextmanager
def metered(meter: Meter) -> Iterator[Meter]:
    """Count everything rendered within on ``meter``."""
    token = _current.set(meter)
    try:
        yield meter
    finally:
        _current.reset(token)
