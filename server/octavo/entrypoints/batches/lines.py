"""Lines of batch files, as OpenAI writes them: requests in, answers out. Pure."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, BinaryIO

ENDPOINTS = (
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/score", "/score", "/v1/rerank",
    "/rerank", "/v2/rerank",
)  # fmt: skip
_MAX_ID = 512  # characters
_OWN_ID = "batch_req_"
_BEGINNING = f'{{"id": "{_OWN_ID}'.encode()  # of each line that is written


@dataclass(frozen=True)
class Line:
    """One request. ``problem``: why it cannot be sent; its other fields are what could be read. Numbers begin at 1."""

    number: int
    custom_id: str | None = None
    url: str = ""
    body: bytes = b""
    problem: str | None = None

    @property
    def id(self) -> str:
        """The same for the same line of the same file, so that a second run knows what the first has answered."""
        return _OWN_ID + hashlib.sha256(f"{self.number} {self.custom_id}".encode()).hexdigest()[:24]


def parse_line(number: int, raw: bytes, endpoint: str | None = None) -> Line:
    """The request of a line; ``endpoint`` is the only URL that is allowed, None: all that batches know."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        return Line(number, problem=f"line {number} is not valid JSON: {error}")
    if not isinstance(value, dict):
        return Line(number, problem=f"line {number} must be an object, got {type(value).__name__}")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_ID:
        return Line(number, problem=f"custom_id must be a string of 1 to {_MAX_ID} characters")
    url, body = value.get("url"), value.get("body")
    problem = _problem(value.get("method", "POST"), url, body, endpoint)
    if problem is not None:
        return Line(number, custom_id, problem=problem)
    return Line(number, custom_id, str(url), json.dumps(body).encode())


def _problem(method: Any, url: Any, body: Any, endpoint: str | None) -> str | None:
    allowed = ENDPOINTS if endpoint is None else (endpoint,)
    if method != "POST":
        return f"method must be POST, got {json.dumps(method)[:100]}"
    if url not in allowed:
        return f"url must be {' or '.join(allowed)}, got {json.dumps(url)[:100]}"
    if not isinstance(body, dict):
        return "body must be an object"
    if body.get("stream"):
        return "stream is not possible in batches; drop it"
    return None


def answered(line: Line, status: int, request_id: str, body: bytes) -> bytes:
    """The line of a request that was answered, whether with success or with an error of its own."""
    head = {"id": line.id, "custom_id": line.custom_id}
    response = json.dumps({"status_code": status, "request_id": request_id})[:-1]
    error: dict[str, Any] | None = None
    if status >= 400:
        error = _error_of(body) or {"code": f"http_{status}", "message": body.decode(errors="replace")[:500]}
    return b'%b, "response": %b, "body": %b}, "error": %b}\n' % (
        json.dumps(head)[:-1].encode(), response.encode(), body.strip() or b"null", json.dumps(error).encode(),
    )  # fmt: skip


def _error_of(body: bytes) -> dict[str, Any] | None:
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
