"""Envoy's own answers, in the form of errors of the dialect that the client speaks. Pure."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

MAX_BODY_BYTES = 32 * 2**20
_STARTING, _FAILED, _LIMITED, _GONE, _PREVIOUS_GONE, _PARTIAL = 425, 424, 423, 410, 409, 406  # the picker's: a text
_MODELS_LIMIT = 416  # Lua's, a text, too
_TOLD = {_STARTING: 503, _FAILED: 503, _LIMITED: 429, _GONE: 404, _PREVIOUS_GONE: 400, _PARTIAL: 400}  # to clients
_TOLD[_MODELS_LIMIT] = 413
_TEXT = "%LOCAL_REPLY_BODY%"
# status -> (OpenAI's type, Anthropic's type, code, message)
_ERRORS = {
    413: (
        "invalid_request_error",
        "request_too_large",
        "request_too_large",
        f"the request is larger than {MAX_BODY_BYTES // 2**20} MiB, which is the router's limit",
    ),
    _MODELS_LIMIT: ("invalid_request_error", "request_too_large", "request_too_large", _TEXT),
    _STARTING: ("server_error", "overloaded_error", "model_starting", _TEXT),
    _FAILED: ("server_error", "api_error", "model_failed", _TEXT),
    _LIMITED: ("rate_limit_error", "rate_limit_error", "rate_limit_exceeded", _TEXT),
    _GONE: ("invalid_request_error", "not_found_error", "not_found", _TEXT),
    _PREVIOUS_GONE: ("invalid_request_error", "invalid_request_error", "previous_response_not_found", _TEXT),
    _PARTIAL: ("invalid_request_error", "invalid_request_error", "several_replicas", _TEXT),
    429: (
        "rate_limit_error",
        "rate_limit_error",
        "rate_limit_exceeded",
        "too many requests a minute for this API key: retry after the number of seconds in Retry-After",
    ),
    503: (
        "server_error",
        "overloaded_error",
        "service_unavailable",
        "no replica could answer the request: none is ready, or those that were tried failed; try again",
    ),
    408: (
        "invalid_request_error",
        "invalid_request_error",
        "request_timeout",
        "the request was not complete in time: send it within {body_seconds} s",
    ),
    504: ("server_error", "timeout_error", "timeout", "the replica sent nothing for 600 s"),
}
_OLLAMA = {"header_filter": {"header": {"name": ":path", "string_match": {"prefix": "/api/"}}}}
_ANTHROPIC = {
    "or_filter": {
        "filters": [
            {"header_filter": {"header": {"name": ":path", "string_match": {"prefix": "/v1/messages"}}}},
            {"header_filter": {"header": {"name": "anthropic-version", "present_match": True}}},
        ]
    }
}


def local_replies(body_seconds: int) -> Json:
    """The HTTP connection manager's local_reply_config. `body_seconds`: until a request has to be here."""
    mappers = []
    for status, (openai, anthropic, code, text) in _ERRORS.items():
        message = text.replace("{body_seconds}", str(body_seconds))
        comparison = {"op": "EQ", "value": {"default_value": status, "runtime_key": f"octavo.status_{status}"}}
        this = {"status_code_filter": {"comparison": comparison}}
        bodies: list[tuple[Json, Json]] = [  # the first that fits is taken
            (_both(this, _OLLAMA), {"error": message}),
            (_both(this, _ANTHROPIC), {"type": "error", "error": {"type": anthropic, "message": message}}),
            (this, {"error": {"message": message, "type": openai, "param": None, "code": code}}),
        ]
        for fits, body in bodies:
            form = {"json_format": body, "content_type": "application/json"}
            told = {"status_code": _TOLD[status]} if status in _TOLD else {}
            mappers.append({"filter": fits, "body_format_override": form, **told})
    return {"mappers": mappers}


def _both(one: Json, other: Json) -> Json:
    return {"and_filter": {"filters": [one, other]}}
