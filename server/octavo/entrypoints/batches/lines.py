"""Lines of batch files, as OpenAI writes them: requests in, answers out. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/decisions",
    "/v1/score",
    "/score",
    "/v1/rerank",
    "/rerank",
    "/v2/rerank",
)
_MAX_ID = 512  # characters
_OWN_ID = "batch_req_"
_BEGINNING = f'{{"id": "{_OWN_ID}'.encode()  # of each line that is written


@dataclass(frozen=True)
class Limits:
    """Limits of one line: more is not even parsed, which would take memory and hold up everybody else."""

    num_bytes: int
    num_values: int  # of JSON, about


@dataclass(frozen=True)
class Line:
    """One request. ``problem``: why it cannot be sent; its other fields are what could be read. Numbers begin at 1."""

    number: int
    custom_id: str | None = None
    url: str = ""
    body: bytes = b""
    problem: str | None = None
    code: str = "invalid_line"  # of the problem
    is_repeated: bool = False  # its custom_id is that of an earlier line

    @property
    def id(self) -> str:
        """The same for the same line of the same file, so that a second run knows what the first has answered."""
        return _OWN_ID + hashlib.sha256(f"{self.number} {self.custom_id}".encode()).hexdigest()[:24]


def split_lines(file: BinaryIO, most: int) -> Iterator[bytes]:
    """The lines of a file, empty ones too; of one that is longer than ``most`` bytes the first ``most + 1``. Lines end
    with \\n alone: JSON may have \\r between its tokens, and other ends of lines within its texts."""
    while raw := file.readline(most + 1):
        yield raw
        while len(raw) > most and not raw.endswith(b"\n"):
            raw = file.readline(most + 1)


def read_lines(file: BinaryIO, limits: Limits, endpoint: str | None = None) -> Iterator[Line]:
    """The requests of a file, as `parse_line` reads them. A custom_id that was there before is its line's problem."""
    seen: dict[str, int] = {}
    for number, raw in enumerate(split_lines(file, limits.num_bytes), 1):
        if not raw.strip():
            continue
        excess = _excess(raw, limits)
        line = Line(number, problem=f"line {number} {excess}") if excess else parse_line(number, raw, endpoint)
        first = number if line.custom_id is None else seen.setdefault(line.custom_id, number)
        if first != number:
            problem = f"custom_id {str(line.custom_id)[:100]!r} of line {number} is that of line {first}, too"
            line = replace(line, problem=problem, is_repeated=True)
        yield line


def _excess(raw: bytes, limits: Limits) -> str | None:
    if len(raw) > limits.num_bytes:
        return f"has more than {limits.num_bytes} bytes (--max-request-bytes); send less"
    if raw.count(b",") + 3 * raw.count(b"{") > limits.num_values:  # objects are the slowest to parse
        return f"holds more than {limits.num_values} values, more than the model could take; send less"
    return None


def parse_line(number: int, raw: bytes, endpoint: str | None = None) -> Line:
    """The request of a line; ``endpoint`` is the only URL that is allowed, None: all that batches know."""
    try:
        value = json.loads(raw.decode("utf-8-sig"))
        return _parsed(number, value, endpoint)
    except RecursionError:
        return Line(number, problem=f"line {number} is nested too deeply")
    except ValueError as error:
        return Line(number, problem=f"line {number} is not valid JSON: {error}")


def _parsed(number: int, value: Any, endpoint: str | None) -> Line:
    """Raises RecursionError."""
    if not isinstance(value, dict):
        return Line(number, problem=f"line {number} must be an object, got {type(value).__name__}")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_ID:
        return Line(number, problem=f"custom_id must be a string of 1 to {_MAX_ID} characters")
    if (lone := _lone_surrogate(custom_id)) is not None:
        return Line(number, problem=f"custom_id has half of a character, {lone}; send whole ones")
    url, body = value.get("url"), value.get("body")
    problem = _problem(value.get("method", "POST"), url, body, endpoint)
    if problem is not None:
        return Line(number, custom_id, problem=problem)
    try:
        text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return Line(number, custom_id, problem="body has NaN, Infinity or a number beyond any float; send others")
    if (lone := _lone_surrogate(text)) is not None:
        return Line(number, custom_id, problem=f"body has half of a character, {lone}; send whole ones")
    return Line(number, custom_id, str(url), text.encode())


def _lone_surrogate(text: str) -> str | None:
    """The first half of a surrogate pair without the other one, as JSON writes it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"\\u{ord(text[error.start]):04x} at {error.start + 1}"
    return None


def _problem(method: Any, url: Any, body: Any, endpoint: str | None) -> str | None:
    allowed = ENDPOINTS if endpoint is None else (endpoint,)
    if method != "POST":
        return f"method must be POST, got {json.dumps(method)[:100]}"
    if url not in allowed:
        return f"url must be {' or '.join(allowed)}, got {json.dumps(url)[:100]}"
    if not isinstance(body, dict):
        return "body must be an object"
    if body.get("encoding_format") in ("bytes", "bytes_only"):
        return f"body.encoding_format {body['encoding_format']} is no JSON, which a line must be; send float or base64"
    if body.get("stream"):
        return "stream is not possible in batches; drop it"
    return None


def answered(line: Line, status: int, request_id: str, body: bytes) -> bytes:
    """The line of a request that was answered, whether with success or with an error of its own."""
    head = {"id": line.id, "custom_id": line.custom_id}
    response = json.dumps({"status_code": status, "request_id": request_id})[:-1]
    error: dict[str, Any] | None = None
    if status >= 400:
        error = error_of(body) or {"code": f"http_{status}", "message": body.decode(errors="replace")[:500]}
    return b'%b, "response": %b, "body": %b}, "error": %b}\n' % (
        json.dumps(head)[:-1].encode(),
        response.encode(),
        body.strip() or b"null",
        json.dumps(error).encode(),
    )


def error_of(body: bytes) -> dict[str, Any] | None:
    """Code and message of an error response; None for something else."""
    try:
        error = json.loads(body)["error"]
        return {"code": str(error.get("code") or error.get("type") or "error"), "message": str(error["message"])}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def failed(line: Line, code: str, message: str) -> bytes:
    """The line of a request that was not sent."""
    error = {"code": code, "message": message}
    return json.dumps({"id": line.id, "custom_id": line.custom_id, "response": None, "error": error}).encode() + b"\n"


def done_in(output: BinaryIO) -> tuple[set[str], set[str], int]:
    """Ids and custom_ids of the whole lines of an output file, and how many bytes these are: what follows was being
    written when the writer was killed. Raises ValueError for a file of something else, which is not ours to cut."""
    ids, custom_ids, length = set(), set(), 0
    for number, raw in enumerate(output, 1):
        if not raw.endswith(b"\n") and raw[: len(_BEGINNING)] == _BEGINNING[: len(raw)]:
            break
        try:
            value = json.loads(raw)
            own = isinstance(value["id"], str) and value["id"].startswith(_OWN_ID) and raw.endswith(b"\n")
        except (ValueError, KeyError, TypeError, RecursionError):
            own = False
        if not own:
            raise ValueError(f"line {number} is not an answer of a batch")
        ids.add(value["id"])
        if isinstance(value.get("custom_id"), str):
            custom_ids.add(value["custom_id"])
        length += len(raw)
    return ids, custom_ids, length
