"""Errors in OpenAI's form, ``{"error": {"message", "type", "param", "code"}}``, or in that of the route's dialect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.errors import FieldError
from octavo.text.shown import MAX_SHOWN
from octavo.text.shown import shown as shown

ERROR_CODE = "error_code"  # key of a request's scope["state"]: the code of the error that answers it
CONTEXT_LENGTH = "context_length_exceeded"
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES = {
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    413: "request_too_large",
    429: "rate_limit_exceeded",
}


class ErrorDetail(msgspec.Struct):
    """The error in a response."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(msgspec.Struct):
    """The body of an error response."""

    error: ErrorDetail


class APIError(Exception):
    """An error response with ``status``. Type and code follow from the status unless ``code`` is given.
    ``overloaded``: the server has no room, whoever asks; Anthropic's clients tell that from limits of their own."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        overloaded: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.overloaded = status, overloaded
        self.headers = headers or {}
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.detail = ErrorDetail(message, kind, param, code or _CODES.get(status))

    @property
    def body(self) -> bytes:
        """The error as JSON."""
        return msgspec.json.encode(ErrorResponse(self.detail))

    def response(self) -> Response:
        """The error as a response, in the form of the dialect that the request's path belongs to."""
        return _ErrorAnswer(self)


class AnthropicError(msgspec.Struct):
    """The error in a response of Anthropic's routes."""

    type: str
    message: str


class AnthropicErrorResponse(msgspec.Struct):
    """The body of an error response of Anthropic's routes, and an event of a stream that failed."""

    error: AnthropicError
    type: str = "error"


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_OVERLOADED = 529
_ATTEMPT = b"x-envoy-attempt-count"  # of a router in front of several servers


def in_anthropic_form(error: APIError) -> AnthropicErrorResponse:
    """The same error as Anthropic's clients expect it."""
    if error.overloaded:
        return AnthropicErrorResponse(AnthropicError("overloaded_error", error.detail.message))
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return AnthropicErrorResponse(AnthropicError(kind, error.detail.message))


class OllamaErrorResponse(msgspec.Struct):
    """The body of an error response of Ollama's routes, and a line of a stream that failed."""

    error: str


def in_ollama_form(error: APIError) -> OllamaErrorResponse:
    """The same error as Ollama's clients expect it."""
    return OllamaErrorResponse(error.detail.message)


def is_anthropic(scope: Scope) -> bool:
    """Return True for a client of Anthropic's API, by the path or by the header that all of them send."""
    if _path(scope).startswith("/v1/messages"):
        return True
    return any(name == b"anthropic-version" for name, _ in scope["headers"])


def _form_of(scope: Scope) -> Callable[[APIError], msgspec.Struct] | None:
    """None: OpenAI's."""
    if _path(scope).startswith("/api/"):
        return in_ollama_form
    return in_anthropic_form if is_anthropic(scope) else None


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


class _ErrorAnswer(Response):
    """Chooses the form when it is sent, so that those who raise an error need not know the dialect."""

    def __init__(self, error: APIError) -> None:
        super().__init__(error.body, error.status, error.headers, "application/json")
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})[ERROR_CODE] = self._error.detail.code
        if (form := _form_of(scope)) is None:
            await super().__call__(scope, receive, send)
            return
        body, status = msgspec.json.encode(form(self._error)), self._error.status
        # Routers try another server after a 429, and know no 529.
        routed = any(name == _ATTEMPT for name, _ in scope["headers"])
        if form is in_anthropic_form and self._error.overloaded and not routed:
            status = _OVERLOADED
        await Response(body, status, self._error.headers, "application/json")(scope, receive, send)


def is_about_length(message: str) -> bool:
    """Tell whether a prompt was refused because it has more tokens than the model takes."""
    return message.startswith("prompt has") and "max_model_len" in message


def bad_request(error: ValueError | str, param: str | None = None, code: str | None = None) -> APIError:
    """A 400. A FieldError knows its ``param``; other messages begin with the name of the field. Clients know a
    conversation that has grown too long by OpenAI's code for it."""
    message = str(error)
    if code is None and is_about_length(message):
        code = CONTEXT_LENGTH
    if isinstance(error, FieldError):
        param = param or error.param
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
    "normalize",
    "queries",
    "documents",
    "items",
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
    return APIError(400, "; ".join(lines), param=_field(first["loc"]) or None)


def _describe(finding: Any) -> str:
    path = _field(finding["loc"]) or "the body"
    message = finding["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if len(message) > 2 * MAX_SHOWN:  # pydantic repeats the type of a block, however long it is
        message = message[: 2 * MAX_SHOWN] + "..."
    if finding["type"] in ("missing", "value_error"):
        return f"{path}: {message}"
    return f"{path}: {message}, got {shown(finding['input'])}"


def _field(location: tuple[int | str, ...]) -> str:
    """The field. pydantic names the member of a union too, by the type or role of the value: left out."""
    last = len(location) - 1
    parts = [
        part
        for at, (before, part) in enumerate(zip((None, *location), location, strict=False))
        if not (part in _MEMBERS and (isinstance(before, int) or before in _UNIONS) and (at < last or part in _ROLES))
    ]
    return ".".join(map(str, parts))


_ROLES = ("user", "assistant", "system")
_UNIONS = ("tool_choice", "format", "trigger")
_MEMBERS = frozenset(
    {
        *_ROLES,
        "message",
        "reasoning",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "additional_tools",
        "item_reference",
        "input_text",
        "output_text",
        "text",
        "refusal",
        "thinking",
        "redacted_thinking",
        "tool_use",
        "tool_result",
        "function",
        "custom",
        "namespace",
        "tool",
        "auto",
        "any",
        "none",
        "allowed_tools",
        "json_schema",
        "json_object",
        "grammar",
        "client",
        "hosted",
        "input_tokens",
        "tool_uses",
        "thoughts",
    }
)


# The beginnings of paths of other servers, and what there is in their place.
_INSTEAD = {
    "/v1/systemone": "POST /v1/decisions answers questions about an input by probabilities",
    "/v1/messages/batches": "POST /v1/batches takes files of chat completions",
    "/v1/images": "no model makes images here",
    "/v1/audio": "no model hears or speaks here",
    "/v1/moderations": "POST /v1/decisions answers questions about a text",
    "/v1/assistants": "POST /v1/responses and /v1/conversations are their successors",
    "/v1/threads": "POST /v1/responses and /v1/conversations are their successors",
    "/v1/vector_stores": "POST /v1/embeddings makes the vectors for a store of your own",
    "/v1/containers": "models call tools, which run at the client",
    "/v1/fine_tuning": "--enable-lora serves adapters that were trained elsewhere",
}


def _missing(method: str, path: str) -> str:
    instead = next((text for begin, text in _INSTEAD.items() if f"{path}/".startswith(f"{begin}/")), None)
    return f"No route for {method} {path[:MAX_SHOWN]}" + ("; see /docs" if instead is None else f": {instead}")


async def on_http_exception(request: Request, error: Any) -> Response:
    """Starlette's own 404 and 405."""
    where = f"{request.method} {request.url.path[:MAX_SHOWN]}"
    messages = {
        404: _missing(request.method, _path(request.scope)),
        405: f"{where} is not allowed; see the Allow header",
    }
    return APIError(
        error.status_code, messages.get(error.status_code, str(error.detail)), headers=dict(error.headers or {})
    ).response()


async def on_unexpected(request: Request, error: Exception) -> Response:
    """A bug; the log has the details."""
    return APIError(500, "Internal server error; see the server's log").response()
