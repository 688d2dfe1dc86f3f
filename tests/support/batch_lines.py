"""Lines of batches that nobody can answer, and odd ones that can be."""

from __future__ import annotations

URL = "/v1/completions"
_BEGIN = b'{"method": "POST", "url": "/v1/completions", '
_PROMPT = b'"body": {"prompt": "The fox", "max_tokens": 2}'

# None has the end of a line in it.
STRANGE = [
    # halves of characters
    _BEGIN + b'"custom_id": "\\ud800", ' + _PROMPT + b"}",
    _BEGIN + b'"custom_id": "x\\udc00y", ' + _PROMPT + b"}",
    _BEGIN + b'"custom_id": "s1", "body": {"prompt": "\\ud800"}}',
    _BEGIN + b'"custom_id": "s2", "body": {"prompt": "x", "\\udfff": 1}}',
    _BEGIN + b'"custom_id": "s3", "body": {"prompt": "\xed\xa0\x80"}}',
    b'{"custom_id": "s4", "url": "\\ud800", "body": {}}',
    b'{"custom_id": "s5", "method": "\\ud800", "url": "/v1/completions", "body": {}}',
    # no UTF-8, no JSON
    _BEGIN + b'"custom_id": "u1", "body": {"prompt": "\xff"}}',
    b"\xff\xfe{\x00}\x00",
    b"\x00",
    b"\xef\xbb\xbf",
    b"{oops",
    # numbers that JSON has not, or nobody
    _BEGIN + b'"custom_id": "n1", "body": {"prompt": "x", "temperature": NaN}}',
    _BEGIN + b'"custom_id": "n2", "body": {"prompt": "x", "temperature": -Infinity}}',
    _BEGIN + b'"custom_id": "n3", "body": {"prompt": "x", "temperature": 1e999}}',
    _BEGIN + b'"custom_id": "n4", "body": {"prompt": "x", "seed": ' + b"9" * 5_000 + b"}}",
    # too deep, too large, too many
    b"[" * 100_000,
    _BEGIN + b'"custom_id": "d1", "body": {"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}",
    _BEGIN + b'"custom_id": "d2", "body": {"prompt": ' + b"[" * 900 + b"]" * 900 + b"}}",
    b'{"custom_id": "d3", "method": ' + b"[" * 980 + b"]" * 980 + b', "url": "/v1/completions", "body": {}}',
    _BEGIN + b'"custom_id": "l1", "body": {"prompt": "' + b"fox " * (5 << 18) + b'"}}',
    _BEGIN + b'"custom_id": "l2", "body": {"prompt": [' + b"1," * 300_000 + b"1]}}",
    # other types
    b"true",
    b'"text"',
    b"[]",
    b"{}",
    _BEGIN + b'"custom_id": 7, ' + _PROMPT + b"}",
    _BEGIN + b'"custom_id": null, ' + _PROMPT + b"}",
    _BEGIN + b'"custom_id": "", ' + _PROMPT + b"}",
    _BEGIN + b'"custom_id": "' + b"t" * 513 + b'", ' + _PROMPT + b"}",
    b'{"custom_id": "t1", "method": ["POST"], "url": "/v1/completions", "body": {}}',
    b'{"custom_id": "t2", "url": {"a": 1}, "body": {}}',
    b'{"custom_id": "t3", "url": "/v1/images", "body": {}}',
    _BEGIN + b'"custom_id": "t4", "body": []}',
    _BEGIN + b'"custom_id": "t5", "body": "x"}',
    _BEGIN + b'"custom_id": "t6", "body": {"prompt": "x", "stream": true}}',
    _BEGIN + b'"custom_id": "good 1", ' + _PROMPT + b"}",  # there before
]
# Ends of lines of Unicode within texts, of old systems between tokens; a mark of the order of bytes; whole characters.
ODD = [
    _BEGIN + b'"custom_id": "odd 1", "body": {"prompt": "a\xe2\x80\xa8b\xc2\x85c\x7f", "max_tokens": 2}}',
    _BEGIN + b'\r"custom_id": "odd 2",\r' + _PROMPT + b"}\r",
    b"\xef\xbb\xbf" + _BEGIN + b'"custom_id": "odd 3", ' + _PROMPT + b"}",
    _BEGIN + b'"custom_id": "\\ud83d\\ude00", ' + _PROMPT + b"}",
    _BEGIN + b'"custom_id": "odd \xe2\x80\xa9", ' + _PROMPT + b"}",
]
ODD_IDS = ["odd 1", "odd 2", "odd 3", "\U0001f600", "odd \u2029"]


def good(name: str) -> bytes:
    """A line like any."""
    return _BEGIN + b'"custom_id": "' + name.encode() + b'", ' + _PROMPT + b"}"


LINES = [good("good 1"), *(line for one in STRANGE for line in (one, b"")), *ODD, good("good 2")]
ANSWERED = ["good 1", *ODD_IDS, "good 2"]
