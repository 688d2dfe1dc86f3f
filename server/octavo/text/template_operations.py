"""Compute the size of the results of a chat template's operators, methods and filters before they run.

Each check takes the meter and the values; it counts their reading and asks the meter whether their result, of at
most so many bytes, may be made. What is not here makes no more than it is given.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

from jinja2.utils import _PassArg
from markupsafe import Markup

from octavo.text.template_meter import Meter, current_meter

_ENDLESS = 1 << 62
_SHORT = 4096  # characters that are read in no time
_ITEM = 64  # bytes of a small object
_LINES = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_REPR_GROWTH = 12  # \ud83d\ude00 of one character
_ESCAPE_GROWTH = 6
_LINEAR_CODECS = {"utf-8", "utf8", "ascii", "latin-1", "latin1"}
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "**": operator.pow,
    "%": operator.mod,
}


def arithmetic(meter: Meter, sign: str, left: Any, right: Any) -> Any:
    """``left sign right``; ``+`` is the meter's own."""
    if sign == "%" and isinstance(left, (str, bytes)):
        check_format(meter, left, right)
    elif sign == "*" and (_sized(left) or _sized(right)):
        sequence, times = (left, right) if _sized(left) else (right, left)
        each = 4 if isinstance(sequence, (str, bytes)) else 8
        meter.afford(each * len(sequence) * _number(times))
    elif sign == "**" and isinstance(left, int) and isinstance(right, int):
        meter.made(1 << min(left.bit_length() * max(right, 0), 1 << 20) if abs(left) > 1 else right)
    elif not isinstance(left, (int, float)) or not isinstance(right, (int, float)):
        meter.weigh(left)
        meter.weigh(right)
    else:
        meter.made(left)
        meter.made(right)
    return meter.made(_OPERATORS[sign](left, right))


def check_format(meter: Meter, pattern: Any, values: Any) -> None:
    """Check the size of ``pattern % values``."""
    weight = meter.weigh(values)
    text = pattern if isinstance(pattern, str) else pattern.decode("latin-1")
    growth = _REPR_GROWTH * (_ESCAPE_GROWTH if isinstance(pattern, Markup) else 1)
    given = values if isinstance(values, tuple) else ()
    starred = text.count("*") * max((_number(value) for value in given), default=0)
    meter.toll(1, len(text))
    meter.afford(len(text) + widths(text) + starred + text.count("%") * (growth * weight + 320))


def widths(pattern: str) -> int:
    """All numbers in a format together: it pads with no more characters."""
    return sum(int(digits) if len(digits) < 18 else _ENDLESS for digits in re.findall(r"\d+", pattern))


def _sized(value: Any) -> bool:
    return isinstance(value, (str, bytes, list, tuple))


def _number(value: Any) -> int:
    """Return a count or a width: the magnitude of an integer, 0 for other values."""
    return abs(value) if isinstance(value, int) else 0


def _text(meter: Meter, value: Any) -> str:
    return value if isinstance(value, str) else meter.text(value)


def _lines(text: str | bytes) -> int:
    return 1 + (sum(map(text.count, _LINES)) if isinstance(text, str) else text.count(b"\n") + text.count(b"\r"))


# Methods of texts.


def check_method(meter: Meter, owner: Any, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """Check ``owner.name(*args, **named)``, and return the arguments to call it with."""
    if isinstance(owner, (str, bytes)):
        if name == "join" and len(args) == 1:
            args = (_items(meter, args[0]),)
        for value in args:
            meter.weigh(value)
        meter.toll(1 + (len(owner) >> 6))
        if (check := _METHODS.get(name)) is not None:
            meter.afford(check(meter, owner, *args, **named))
    elif isinstance(owner, int) and name == "to_bytes":
        meter.afford(max(map(_number, (*args, *named.values())), default=0))
    elif isinstance(owner, (list, tuple, range)) and name in ("count", "index"):
        meter.weigh(owner)
        meter.toll(len(owner))
        for value in args:
            meter.weigh(value)
    elif not (isinstance(owner, dict) and (not args or type(args[0]) is str)):
        for value in (*args, *named.values()):
            meter.weigh(value)
    elif name == "copy":
        meter.toll(len(owner), 100 * len(owner))
    return args


def _padded(meter: Meter, owner: Any, width: Any = 8, fill: Any = " ", **named: Any) -> int:
    return 4 * max(len(owner), _number(width), *map(_number, named.values()), 0) * max(1, len(fill))


def _tabs(meter: Meter, owner: Any, tabsize: Any = 8) -> int:
    tabs: int = owner.count("\t" if isinstance(owner, str) else b"\t")
    return 4 * (len(owner) + tabs * _number(tabsize))


def _replaced(meter: Meter, owner: Any, old: Any = "", new: Any = "", count: Any = -1) -> int:
    if not isinstance(new, (str, bytes)) or isinstance(old, str) != isinstance(new, str):
        return 0  # it is an error
    times = owner.count(old) if old else len(owner) + 1
    if isinstance(count, int) and count >= 0:
        times = min(times, count)
    growth = _ESCAPE_GROWTH if isinstance(owner, Markup) else 1
    wide = 1 if isinstance(owner, str) and owner.isascii() and new.isascii() else 4
    return wide * (len(owner) + growth * times * len(new))


def _joined(meter: Meter, owner: Any, values: Any = ()) -> int:
    growth = _ESCAPE_GROWTH if isinstance(owner, Markup) else 1
    return growth * sum(len(value) + len(owner) for value in values if isinstance(value, (str, bytes)))


def _translated(meter: Meter, owner: Any, table: Any = None, *others: Any) -> int:
    found = table.values() if isinstance(table, dict) else table if isinstance(table, (list, tuple)) else ()
    return 4 * len(owner) * max((len(value) for value in found if isinstance(value, str)), default=1)


def _parted(meter: Meter, owner: Any, sep: Any = None, maxsplit: Any = -1) -> int:
    times = owner.count(sep) + 1 if isinstance(sep, (str, bytes)) and sep else len(owner) // 2 + 1
    if isinstance(maxsplit, int) and maxsplit >= 0:
        times = min(times, maxsplit + 1)
    meter.toll(times, _ITEM * times)
    return len(owner)


def _in_lines(meter: Meter, owner: Any, keepends: Any = False) -> int:
    meter.toll(_lines(owner), _ITEM * _lines(owner))
    return len(owner)


def _coded(meter: Meter, owner: Any, encoding: Any = "utf-8", errors: Any = "strict") -> int:
    if encoding not in _LINEAR_CODECS:
        meter.toll(len(owner), len(owner) * len(owner) >> 6)  # punycode
    return (4 if errors == "strict" else 100) * len(owner)  # \N{...}


def _tripled(meter: Meter, owner: Any, *args: Any, **named: Any) -> int:
    return 12 * len(owner)  # upper() of "ΐ"


def _quadratic(meter: Meter, owner: Any, *args: Any, **named: Any) -> int:
    meter.toll(len(owner), len(owner) * len(owner) >> 6)
    return 0


_METHODS: dict[str, Callable[..., int]] = {
    "center": _padded,
    "ljust": _padded,
    "rjust": _padded,
    "zfill": _padded,
    "expandtabs": _tabs,
    "replace": _replaced,
    "join": _joined,
    "translate": _translated,
    "split": _parted,
    "rsplit": _parted,
    "splitlines": _in_lines,
    "encode": _coded,
    "decode": _coded,
    "upper": _tripled,
    "lower": _tripled,
    "title": _tripled,
    "capitalize": _tripled,
    "swapcase": _tripled,
    "casefold": _tripled,
    "unescape": _quadratic,
    "striptags": _quadratic,
    "escape": _tripled,
    "hex": _tripled,
}


def _items(meter: Meter, values: Any) -> Any:
    """An iterator's values as a list, which can be looked at before it is used."""
    if isinstance(values, (str, list, tuple, dict)) or not hasattr(type(values), "__iter__"):
        return values
    return meter.made(list(values))


# Filters: each check is given the filter's own arguments.


def _filter_center(meter: Meter, value: Any, width: Any = 80) -> None:
    meter.afford(4 * max(len(_text(meter, value)), _number(width)))


def _filter_indent(meter: Meter, value: Any, width: Any = 4, *others: Any, **named: Any) -> None:
    text = _text(meter, value)
    wide = _number(width) if isinstance(width, int) else len(_text(meter, width))
    meter.toll(1, len(text))
    meter.afford(4 * (len(text) + _lines(text) * wide) * (_ESCAPE_GROWTH if isinstance(text, Markup) else 1))


def _filter_replace(meter: Meter, value: Any, old: Any = "", new: Any = "", count: Any = None) -> None:
    text, old, new = _text(meter, value), _text(meter, old), _text(meter, new)
    escaped = _ESCAPE_GROWTH if any(isinstance(part, Markup) for part in (text, old, new)) else 1
    meter.toll(1 + (len(text) >> 6))
    meter.afford(escaped * _replaced(meter, text, old, new, -1 if count is None else count))


def _filter_join(meter: Meter, value: Any, d: Any = "", attribute: Any = None) -> None:
    weight, between = meter.weigh(value), _text(meter, d)
    many = len(value) if hasattr(type(value), "__len__") else 0
    exact = type(d) is str and isinstance(value, (list, tuple)) and all(type(item) is str for item in value)
    meter.toll(many * _path(attribute))
    meter.afford((weight + many * len(between)) * (1 if exact else 2 * _REPR_GROWTH * _ESCAPE_GROWTH))


def _path(attribute: Any) -> int:
    """Steps of following "a.b.c"."""
    return 3 + (len(attribute) if isinstance(attribute, str) else 0)


def _filter_format(meter: Meter, value: Any, *args: Any, **named: Any) -> None:
    check_format(meter, _text(meter, value), named or args)


def _filter_json(
    meter: Meter,
    value: Any,
    ensure_ascii: Any = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: Any = False,
) -> None:
    weight = meter.weigh(value)
    between = meter.weigh(separators) if separators is not None else 0
    deepest = 1000 * (_number(indent) if not isinstance(indent, str) else len(indent))
    meter.afford(_REPR_GROWTH * weight + (weight >> 3) * between + deepest)


def _filter_sort(meter: Meter, value: Any, *args: Any, **named: Any) -> None:
    weight = meter.weigh(value)
    for given in (*args, *named.values()):
        meter.weigh(given)
    many = len(value) if hasattr(type(value), "__len__") else 0
    steps = max(map(_path, (*args, *named.values())), default=3)
    meter.toll(many * (20 + steps) + (weight >> 2), 4 * weight)


def _filter_sum(meter: Meter, value: Any, attribute: Any = None, start: Any = 0) -> None:
    weight = meter.weigh(value) + meter.weigh(start)
    many = len(value) if hasattr(type(value), "__len__") else 0
    meter.toll(many * _path(attribute))
    if isinstance(start, (list, tuple)):
        meter.toll(0, many * weight)  # each sum is a new list


def _filter_slowly(meter: Meter, value: Any, *args: Any, **named: Any) -> None:
    """Filters whose time grows with the square of a text."""
    size = len(_text(meter, value)) + sum(meter.weigh(given) for given in (*args, *named.values()))
    meter.toll(size, size * size >> 6)
    meter.afford(_ITEM * size)


def _filter_pprint(meter: Meter, value: Any) -> None:
    weight = meter.weigh(value)
    meter.toll(8 * weight, 4 * weight)
    meter.afford(_ITEM * weight)


def _filter_escape(meter: Meter, value: Any, *others: Any, **named: Any) -> None:
    growth = 1 if isinstance(value, str) else _REPR_GROWTH
    meter.afford(_ESCAPE_GROWTH * growth * meter.weigh(value))


def _filter_url(meter: Meter, value: Any, *others: Any, **named: Any) -> None:
    weight = meter.weigh(value)
    meter.toll(weight)
    meter.afford(2 * _REPR_GROWTH * weight)


def _filter_words(meter: Meter, value: Any, *others: Any, **named: Any) -> None:
    text = _text(meter, value)
    meter.toll(len(text), 4 * len(text))
    meter.afford(32 * len(text))


def _filter_text(meter: Meter, value: Any, *args: Any, **named: Any) -> None:
    text = _text(meter, value)
    meter.toll(1 + (len(text) >> 6))
    for given in (*args, *named.values()):
        meter.weigh(given)


def _filter_list(meter: Meter, value: Any) -> None:
    if isinstance(value, (str, bytes, range)):
        meter.toll(len(value), _ITEM * len(value))


def _filter_batch(meter: Meter, value: Any, linecount: Any = 1, fill_with: Any = None) -> None:
    meter.afford(8 * _number(linecount) if fill_with is not None else 0)


def _filter_slice(meter: Meter, value: Any, *others: Any, **named: Any) -> None:
    meter.toll(0, 8 * len(value) if hasattr(type(value), "__len__") else 0)


def _filter_round(meter: Meter, value: Any, precision: Any = 0, *others: Any, **named: Any) -> None:
    meter.made(value)
    each = len(value) if _sized(value) else 1
    meter.afford(_ENDLESS if _number(precision) > 400 else 10 ** _number(precision) * 8 * each if _sized(value) else 0)


def _filter_attr(meter: Meter, value: Any, name: Any = "") -> None:
    _text(meter, name)


def _filter_map(meter: Meter, value: Any, *args: Any, **named: Any) -> None:
    many = len(value) if hasattr(type(value), "__len__") else 0
    paths = [given for given in (*args[:1], named.get("attribute")) if isinstance(given, str)]
    meter.toll(many * (5 + max(map(len, paths), default=0)))


FILTERS: dict[str, Callable[..., None]] = {
    "attr": _filter_attr,
    "batch": _filter_batch,
    "capitalize": _filter_text,
    "center": _filter_center,
    "dictsort": _filter_sort,
    "e": _filter_escape,
    "escape": _filter_escape,
    "filesizeformat": _filter_text,
    "float": _filter_text,
    "forceescape": _filter_escape,
    "format": _filter_format,
    "groupby": _filter_sort,
    "indent": _filter_indent,
    "int": _filter_text,
    "join": _filter_join,
    "list": _filter_list,
    "lower": _filter_text,
    "map": _filter_map,
    "max": _filter_sort,
    "min": _filter_sort,
    "pprint": _filter_pprint,
    "reject": _filter_map,
    "rejectattr": _filter_map,
    "replace": _filter_replace,
    "round": _filter_round,
    "safe": _filter_text,
    "select": _filter_map,
    "selectattr": _filter_map,
    "slice": _filter_slice,
    "sort": _filter_sort,
    "string": _filter_text,
    "striptags": _filter_slowly,
    "sum": _filter_sum,
    "title": _filter_words,
    "tojson": _filter_json,
    "trim": _filter_text,
    "truncate": _filter_text,
    "unique": _filter_sort,
    "upper": _filter_text,
    "urlencode": _filter_url,
    "urlize": _filter_slowly,
    "wordcount": _filter_words,
    "wordwrap": _filter_slowly,
    "xmlattr": _filter_escape,
    "reverse": _filter_list,
}
# These take all values before they give one, so an iterator's may be looked at first.
_TAKE_ALL = frozenset({"join", "sort", "groupby", "sum", "min", "max", "unique"})
# These give back what they were given, or a part of it.
_PASS_ON = frozenset({"default", "d", "first", "last", "attr", "random", "length", "count", "abs"})


def metered_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, asked first what it would make."""
    check = FILTERS.get(name)
    if name in _PASS_ON and check is None:
        return function
    at = 0 if _PassArg.from_obj(function) is None else 1  # where the value stands
    reads = check is _filter_text
    takes_all, passes = name in _TAKE_ALL, name in _PASS_ON

    @wraps(function)
    def metered(*args: Any, **named: Any) -> Any:
        meter = current_meter()
        if reads and len(args) == at + 1 and type(args[at]) is str and len(args[at]) < _SHORT:
            return meter.made(function(*args, **named))
        if takes_all:
            args = (*args[:at], _items(meter, args[at]), *args[at + 1 :])
        if check is not None:
            check(meter, *args[at:], **named)
        value = function(*args, **named)
        return value if passes else meter.made(value)

    return metered


def metered_test(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The test (``is``), which counts its reading of what is no number and no short text."""

    @wraps(function)
    def metered(*args: Any, **named: Any) -> Any:
        meter = current_meter()
        if name in ("odd", "even", "divisibleby") and isinstance(args[0], (str, bytes)):
            check_format(meter, args[0], 2 if len(args) < 2 else args[1])
        for value in args:
            meter.weigh(value)
        return function(*args, **named)

    return metered


# Tests that look into values; others ask for their type alone.
TESTS = frozenset(
    {
        "odd",
        "even",
        "divisibleby",
        "lower",
        "upper",
        "in",
        "==",
        "eq",
        "equalto",
        "!=",
        "ne",
        ">",
        "gt",
        "greaterthan",
        ">=",
        "ge",
        "<",
        "lt",
        "lessthan",
        "<=",
        "le",
    }
)


@lru_cache(maxsize=4)
def _encoder(ensure_ascii: bool, sort_keys: bool) -> json.JSONEncoder:
    return json.JSONEncoder(ensure_ascii=ensure_ascii, sort_keys=sort_keys)


def tojson(
    value: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, sort_keys: Any = False
) -> str:
    """Dump as `json.dumps`: jinja2's own filter escapes < > & for HTML, which would change the prompt."""
    if indent is None and separators is None:
        return _encoder(bool(ensure_ascii), bool(sort_keys)).encode(value)
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None:
        return encoder.encode(value)
    meter, pieces = current_meter(), []
    for piece in encoder.iterencode(value):
        meter.toll(2, len(piece))
        pieces.append(piece)
    return "".join(pieces)
