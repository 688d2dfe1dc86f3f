"""Restrict the page in the browser, whatever an answer of a model contains: a second wall behind Gradio's sanitiser.

Nothing is loaded from elsewhere or sent there, and no script runs but those of the page itself: they carry a nonce.
Scripts in attributes (onerror=) and javascript: addresses have none. Gradio's HTML components evaluate their own
templates, hence 'unsafe-eval'; they take values, which are never templates. Nobody uploads anything: Gradio would take
files from everybody who reaches the port, key or not. Pages of others read nothing: Gradio would let all of them.
"""

from __future__ import annotations

import secrets
from typing import Any

from octavo.dashboard.same_origin import refusal

_UPLOAD = "/gradio_api/upload"
_ASSETS = "/assets/"  # their names change with what is in them
_HEADERS = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}


def _policy(nonce: str) -> str:
    return (
        f"default-src 'self' data: blob:; script-src 'self' 'nonce-{nonce}' 'unsafe-eval'; style-src 'self' "
        "'unsafe-inline'; form-action 'self'; base-uri 'self'; frame-ancestors 'self'; object-src 'none'"
    )


def with_policy(app: Any, local: bool) -> Any:
    """``app`` (ASGI) with the policy in every answer's headers, and the nonce in its page's scripts. ``local``: only
    this machine can open it."""

    async def wrapped(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        path = scope["path"]
        if local and (told := refusal(scope)):
            await _answer(send, 403, told)
        elif path.startswith(_UPLOAD):
            await _answer(send, 404, "nobody uploads here\n")
        else:
            sender = _Sender(send, path)
            if local or sender.is_page:  # compressing takes longer than sending; a page is written into
                headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"accept-encoding"]
                scope = scope | {"headers": headers}
            await app(scope, receive, sender.send)

    return wrapped


async def _answer(send: Any, status: int, text: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"x-content-type-options", b"nosniff")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode()})


class _Sender:
    """Adds to one answer. A page is held back until it is whole."""

    def __init__(self, send: Any, path: str) -> None:
        self._send, self.is_page, self._lasts = send, path == "/", path.startswith(_ASSETS)
        self._nonce, self._start, self._body = secrets.token_urlsafe(16), None, b""

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            own = _HEADERS | {"content-security-policy": _policy(self._nonce)}
            if self._lasts and message["status"] == 200:
                own["cache-control"] = "max-age=31536000, immutable"
            message["headers"] = [
                *((name, value) for name, value in message["headers"] if not name.startswith(b"access-control-")),
                *((name.encode(), value.encode()) for name, value in own.items()),
            ]
            if self.is_page:
                self._start = message
                return
        elif message["type"] == "http.response.body" and self.is_page:
            self._body += message.get("body", b"")
            if message.get("more_body"):
                return
            await self._send_page()
            return
        await self._send(message)

    async def _send_page(self) -> None:
        # Its JSON has no "<": Gradio writes that as \\u003c.
        body = self._body.replace(b"<script", f'<script nonce="{self._nonce}"'.encode())
        start: Any = self._start
        headers = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
        start["headers"] = [*headers, (b"content-length", str(len(body)).encode())]
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body})
