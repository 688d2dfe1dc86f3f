"""Gives every request an id, checks its API key and counts it, before its route."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.entrypoints.admission import before_drain, was_retried
from octavo.entrypoints.chat_page import wants_page
from octavo.entrypoints.errors import CONTEXT_LENGTH, ERROR_CODE, APIError, is_anthropic
from octavo.entrypoints.state import REQUEST_ID, Phase, ServerState
from octavo.entrypoints.tenants import read_headers
from octavo.metrics.tracing import incoming_headers

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/livez", "/readyz"})  # without an API key, for probes
UNCOUNTED_PATHS = OPEN_PATHS | {"/metrics", "/load", "/ping", "/version"}  # not in the HTTP metrics
ROUTE_PATH = "route_path"  # key of a request's scope: the path of the route that it took
_REQUEST_ID = re.compile(REQUEST_ID)
_KEY_HEADERS = b"x-api-key", b"api-key"  # Anthropic's and Azure's


class RequestMiddleware:
    """Gives each request an id, checks its API key, and counts it; around the whole application."""

    def __init__(self, app: ASGIApp, state: ServerState, api_keys: Sequence[str], root_path: str = "") -> None:
        self.app = app
        self.state = state
        self._root_path = root_path.rstrip("/")  # which proxies may strip or not
        self._key_hashes = [hashlib.sha256(key.encode()).digest() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if self._root_path:
            scope["root_path"] = self._root_path
        path = _path(scope)  # answered with or without a slash at its end: not every client follows a redirect
        if surplus := len(path) - len(path.rstrip("/") or "/"):
            scope["path"] = scope["path"][:-surplus]
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        request_state = scope.setdefault("state", {})
        request_state["request_id"], request_state["client_chose_id"] = request_id, request_id == given
        if self.state.engine.tracer is not None:
            incoming_headers.set(Headers(scope=scope))
        read_headers(headers)
        before_drain.set(self.state.phase is not Phase.DRAINING or request_state.get("connection_draining", False))
        was_retried.set(headers.get(b"x-envoy-attempt-count", b"1") != b"1")
        started = time.monotonic()
        status, sent_bytes = 0, 0

        async def send_with_id(message: Message) -> None:
            nonlocal status, sent_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
                response_headers = MutableHeaders(scope=message)
                _name_request(response_headers, scope, request_state["request_id"])
                if self.state.phase is Phase.DRAINING:
                    response_headers["connection"] = "close"
            else:
                sent_bytes += len(message.get("body", b""))
            await send(message)

        is_post = scope["method"] == "POST"
        self.state.num_responding += is_post
        try:
            path = _path(scope)
            is_open = path in OPEN_PATHS or wants_page(scope, path)
            if self._key_hashes and not is_open and not self._has_key(headers):
                error = APIError(
                    401,
                    "Send a valid API key: Authorization: Bearer KEY, X-Api-Key: KEY or Api-Key: KEY",
                    headers={"www-authenticate": "Bearer"},
                )
                await error.response()(scope, receive, send_with_id)
                return
            await self.app(scope, receive, send_with_id)
        except Exception:
            logger.exception("request %s failed", request_state["request_id"])
            if not status:
                await APIError(500, "Internal server error; see the server's log").response()(
                    scope, receive, send_with_id
                )
        finally:
            self.state.num_responding -= is_post
            self.state.ids_in_use.discard(request_state.get("claimed_id", ""))
            self._count_error(request_state.get(ERROR_CODE))
            handler = scope.get(ROUTE_PATH, "none")
            if handler not in UNCOUNTED_PATHS:
                size = headers.get(b"content-length", b"")
                self.state.http_metrics.record(
                    handler,
                    scope["method"],
                    status or 499,
                    time.monotonic() - started,
                    int(size) if size.isdigit() else 0,
                    sent_bytes + request_state.get("streamed_bytes", 0),
                )

    def _count_error(self, code: str | None) -> None:
        if code == CONTEXT_LENGTH:
            self.state.metrics.record_too_long()

    def _has_key(self, headers: dict[bytes, bytes]) -> bool:
        """Compares hashes of all keys in constant time, so that timing tells nothing of a key's length or position."""
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        given = [
            token.strip() if scheme.lower() == b"bearer" else b"",
            *(headers.get(name, b"") for name in _KEY_HEADERS),
        ]
        found = False
        for digest in [hashlib.sha256(key).digest() for key in given]:
            for known in self._key_hashes:
                found |= hmac.compare_digest(digest, known)
        return found


def _name_request(headers: MutableHeaders, scope: Scope, request_id: str) -> None:
    headers.setdefault("x-request-id", request_id)
    if is_anthropic(scope):  # whose clients know it by another name
        headers.setdefault("request-id", headers["x-request-id"])


def _path(scope: Scope) -> str:
    """The path below --root-path."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))
