"""A few calls to the rig's API server, for bringing it up: cheaper than starting kubectl for each."""

from __future__ import annotations

import http.client
import json
import ssl
from typing import Any
from urllib.parse import urlsplit

from . import settings


class ApiError(Exception):
    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"the API server answered {status}: {body.strip()[:500]}")
        self.status = status


class Api:
    """Speaks as `admin`. Raises ApiError for an answer of 400 and more, OSError while nobody listens."""

    def __init__(self, places: settings.Places) -> None:
        self._tls = ssl.create_default_context(cafile=str(places.pki / "ca.crt"))
        self._tls.load_cert_chain(places.pki / "admin.crt", places.pki / "admin.key")

    def call(self, method: str, path: str, body: Any = None, content_type: str = "application/json") -> Any:
        server = urlsplit(settings.API_SERVER)
        connection = http.client.HTTPSConnection(server.hostname or "", server.port, timeout=10, context=self._tls)
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, payload, {"Content-Type": content_type, "Accept": "application/json"})
            answer = connection.getresponse()
            text = answer.read().decode()
        except http.client.HTTPException as error:
            raise OSError(str(error)) from error
        finally:
            connection.close()
        if answer.status >= 400:
            raise ApiError(answer.status, text)
        return json.loads(text) if text.startswith(("{", "[")) else text

    def has(self, path: str) -> bool:
        """True when a GET of it succeeds. False for a server that is still starting, as for what is not there."""
        try:
            self.call("GET", path)
        except (ApiError, OSError):
            return False
        return True

    def apply(self, path: str, manifest: dict[str, Any]) -> None:
        """Server-side apply of one object at its own path."""
        query = f"{path}?fieldManager=octavo-rig&force=true"
        self.call("PATCH", query, manifest, "application/apply-patch+yaml")
