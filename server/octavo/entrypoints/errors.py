"""Errors in OpenAI's form: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

_MAX_SHOWN = 200  # characters of a refused value that a message repeats

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES = {
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    413: "request_too_large",
    429: "rate_limit_exceeded",
}


class ErrorDetail(msgspec.Struct):
    """What an error response says."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(msgspec.Struct):
    """The body of an error response."""

    error: ErrorDetail


class APIError(Exception):
    """An error response with ``status``. Type and code follow from the status unless ``code`` is given."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.detail = ErrorDetail(message, kind, param, code or _CODES.get(status))

    @property
    def body(self) -> bytes:
        """The error as JSON."""
        return msgspec.json.encode(ErrorResponse(self.detail))

    def response(self) -> Response:
        """The error as a response."""
        return Response(self.body, self.status, self.headers, "application/json")


def bad_request(error: ValueError | str, param: str | None = None, code: str | None = None) -> APIError:
    """A 400. Our messages begin with the name of the field, which becomes ``param``."""
    message = str(error)
    if param is None:
        word = message.split(" ", 1)[0].rstrip(":")
        param = word if word in _FIELDS or ("_" in word and word.isidentifier()) else None
    return APIError(400, message, param=param, code=code)


_FIELDS = {
    "prompt",
    "messages",
    "model",
    "n",
    "seed",
    "stop",
    "temperature",
    "logprobs",
    "priority",
    "echo",
    "suffix",
    "dimensions",
    "pooling",
}


def from_validation(error: ValidationError) -> APIError:
    """pydantic's errors as one readable 400."""
    findings = error.errors(include_url=False, include_context=False)
    first = findings[0]
    if first["type"] == "json_invalid":
        return APIError(
            400, f"The body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}", code="invalid_json"
        )
    lines = [_describe(finding) for finding in findings[:3]]
    if len(findings) > 3:
        lines.append(f"and {len(findings) - 3} more")
    return APIError(400, "; ".join(lines), param=_path(first["loc"]) or None)


def _describe(finding: Any) -> str:
    path = _path(finding["loc"]) or "the body"
    message = finding["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if finding["type"] in ("missing", "value_error"):
        return f"{path}: {message}"
    return f"{path}: {message}, got {shown(finding['input'])}"


def _path(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in location)


def shown(value: Any) -> str:
    """A value as JSON for a message, truncated if long."""
    if isinstance(value, (dict, list)) and len(value) > 20:
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)} entries"
    try:
        text = msgspec.json.encode(value).decode()
    except (TypeError, ValueError, OverflowError, RecursionError):
        text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


async def on_http_exception(request: Request, error: Any) -> Response:
    """Starlette's own 404 and 405."""
    where = f"{request.method} {request.url.path[:_MAX_SHOWN]}"
    messages = {404: f"No route for {where}; see /docs", 405: f"{where} is not allowed; see the Allow header"}
    return APIError(
        error.status_code, messages.get(error.status_code, str(error.detail)), headers=dict(error.headers or {})
    ).response()


async def on_unexpected(request: Request, error: Exception) -> Response:
    """A bug; the log has the details."""
    return APIError(500, "Internal server error; see the server's log").response()
