"""Bodies of type multipart/form-data, as browsers and SDKs upload files (RFC 7578). Pure, in linear time, and without
copies of what is uploaded."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote

from octavo.entrypoints.errors import APIError, bad_request

_MAX_PARTS = 100
_MAX_HEAD = 8 << 10  # bytes of a part's headers
_SLICE = 1 << 20  # bytes that are searched at once: a search stops all threads
_END = b"\r\n\r\n"  # of a part's headers
# A parameter of a header; quotes may hold anything, and a backslash before a quote.
_PARAMETER = re.compile(r';[ \t]*([^\s=;"]+)[ \t]*=[ \t]*("(?:[^"\\]|\\.)*"|[^;"]*)[ \t]*', re.DOTALL)


@dataclass(frozen=True)
class Part:
    """A field of a form; ``filename`` is None for one that is no file. ``data`` lies in the body."""

    filename: str | None
    data: memoryview


def parse_form(content_type: str, body: bytes | bytearray) -> dict[str, Part]:
    """The fields by name; of several with one name the last. Raises APIError."""
    kind, parameters = _header(content_type)
    boundary = parameters.get("boundary")
    if kind != "multipart/form-data" or not boundary:
        raise APIError(415, f"Content-Type must be multipart/form-data with a boundary, got {content_type[:100]!r}")
    mark = b"\r\n--" + boundary.encode("latin-1", "replace")
    form: dict[str, Part] = {}
    at = -2 if body.startswith(mark[2:]) else _find(body, mark, 0)  # the first needs no line before it
    for _ in range(_MAX_PARTS + 1):
        if at == -1:
            break
        start = at + len(mark)
        if body.startswith(b"--", start):
            return form
        at = _find(body, mark, start)
        if at != -1:
            name, part = _part(body, start, at)
            form[name] = part
    raise bad_request(f"the form is cut short, or has more than {_MAX_PARTS} fields")


def _find(body: bytes | bytearray, what: bytes, start: int) -> int:
    for at in range(start, len(body), _SLICE):
        found = body.find(what, at, at + _SLICE + len(what) - 1)
        if found != -1:
            return found
    return -1


def _part(body: bytes | bytearray, start: int, stop: int) -> tuple[str, Part]:
    """The field between two boundaries, and its name. Raises APIError."""
    end = body.find(_END, start, min(stop, start + _MAX_HEAD))
    if end == -1 and stop - start > _MAX_HEAD:
        raise bad_request(f"the headers of a field of the form have more than {_MAX_HEAD} bytes; shorten its names")
    described: dict[str, str] = {}
    for line in body[start : max(start, end)].decode("utf-8", "replace").split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition":
            described = _header(value)[1]
    if "name" not in described:
        raise bad_request("a field of the form has no name")
    filename = described.get("filename")
    if "filename*" in described:  # older clients' way to write what is not ASCII (RFC 5987)
        filename = unquote(described["filename*"].rpartition("'")[2], errors="replace")
    return described["name"], Part(filename, memoryview(body)[end + len(_END) : stop])


def _header(value: str) -> tuple[str, dict[str, str]]:
    """A header's value and its parameters, up to the first that is none."""
    kind, _, _ = value.partition(";")
    parameters: dict[str, str] = {}
    at = len(kind)
    while found := _PARAMETER.match(value, at):
        name, text = found[1].lower(), found[2].strip()
        if text.startswith('"'):
            text = re.sub(r'\\(["\\])', r"\1", text[1:-1])
        parameters.setdefault(name, text)
        at = found.end()
    return kind.strip().lower(), parameters
