"""Client of the API server: aiohttp sessions and the few calls that the operator makes."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import aiohttp

from octavo_operator.kube import credentials
from octavo_operator.kube.credentials import Credentials
from octavo_operator.kube.resources import RESOURCES

logger = logging.getLogger("octavo.operator.client")

Json = Any


@dataclass(frozen=True)
class ListPage:
    """Part of a list. `is_first`: of the list, or of a restarted one. `version`: the list's resourceVersion."""

    items: list[Json]
    is_first: bool
    version: str


class ApiError(Exception):
    """A response of status 400 or above. `reason`, `message` and `details` are those of its Status object."""

    def __init__(self, status: int, body: Json) -> None:
        body = body if isinstance(body, dict) else {"message": str(body)[:500]}
        self.status = status
        self.reason = body.get("reason") or ""
        self.message = body.get("message") or f"HTTP {status}"
        self.details = body.get("details") or {}
        super().__init__(f"{status} {self.reason}: {self.message}")

    @property
    def is_transient(self) -> bool:
        """True if the same request may succeed later."""
        return self.status in (401, 409, 429) or (self.status >= 500 and not self._is_schema_mismatch)

    @property
    def _is_schema_mismatch(self) -> bool:
        """Server-side apply answers 500 to a field that the kind does not have, or that has another type."""
        return self.message.startswith(("failed to create typed patch object", "failed to convert new object"))

    @property
    def is_unknown_field(self) -> bool:
        """The CRD in the cluster lacks a field of ours: it is of an earlier version."""
        return self._is_schema_mismatch and "field not declared in schema" in self.message

    @property
    def is_namespace_terminating(self) -> bool:
        """The namespace is being deleted."""
        causes = self.details.get("causes") or []
        return any(cause.get("reason") == "NamespaceTerminating" for cause in causes)

    @property
    def is_kind_missing(self) -> bool:
        """The CRD of the object's kind is gone or terminating."""
        return (self.status == 404 and not self.details.get("name")) or (
            "custom resource definition is terminating" in self.message
        )


class Answers:
    """True if the API server answers. `since`: when it began to, after the last time that it did not."""

    _PATIENCE_SECONDS = 10.0  # the Lease alone is asked for more often

    def __init__(self) -> None:
        self.since = self._last = time.monotonic()

    def note(self, now: float) -> None:
        """It has answered."""
        if self.are_missing(now):
            self.since = now
        self._last = now

    def are_missing(self, now: float) -> bool:
        """True if it has not answered for a while."""
        return now - self._last > self._PATIENCE_SECONDS


TRANSPORT_ERRORS = (aiohttp.ClientError, asyncio.TimeoutError, OSError)


class KubeClient:
    """Calls to one API server. Methods raise ApiError for error responses, TRANSPORT_ERRORS without a response."""

    def __init__(self, found: Credentials) -> None:
        self._credentials = found
        self.server, self.namespace = found.server, found.namespace
        self.session = self.new_session()
        self.answers = Answers()
        self.on_response: Callable[[str, int], None] = lambda method, status: None  # status 0: no response

    @classmethod
    def connect(cls) -> KubeClient:
        """Create a client with the credentials of this process; inside an event loop. Raises CredentialsError."""
        return cls(credentials.find())

    async def reauthenticate(self, used: str | None = None) -> bool:
        """Renews the credentials after a 401 to those `used`. False: there are no others. In any event loop."""
        return await asyncio.to_thread(self._credentials.renew, used)

    def new_session(self, response_class: type[aiohttp.ClientResponse] | None = None) -> aiohttp.ClientSession:
        """Another session with the same credentials: kopf closes the one that it is given."""
        found = self._credentials
        trace = aiohttp.TraceConfig()

        async def authorise(_: Any, __: Any, params: aiohttp.TraceRequestStartParams) -> None:
            if found.is_due():
                await asyncio.to_thread(found.renew)
            if found.authorization:
                params.headers["Authorization"] = found.authorization

        trace.on_request_start.append(authorise)
        connector = aiohttp.TCPConnector(limit=0, ssl=found.tls)
        agent = {"User-Agent": "octavo-operator"}
        return aiohttp.ClientSession(
            connector=connector,
            trace_configs=[trace],
            headers=agent,
            proxy=found.proxy,
            response_class=response_class or aiohttp.ClientResponse,
        )

    async def call(
        self,
        method: str,
        path: str,
        body: Json = None,
        *,
        params: Mapping[str, str] | None = None,
        content_type: str = "application/json",
        timeout: float = 15,
    ) -> Json:
        """The decoded response. `body` is sent as JSON; `timeout`: seconds."""
        url = f"{self.server}{path}" + (f"?{urlencode(params)}" if params else "")
        data = None if body is None else json.dumps(body).encode()
        used = self._credentials.authorization
        try:
            return await self._call(method, url, data, content_type, timeout)
        except ApiError as error:
            if error.status != 401 or not await self.reauthenticate(used):
                raise
        return await self._call(method, url, data, content_type, timeout)

    async def _call(self, method: str, url: str, data: bytes | None, content_type: str, timeout: float) -> Json:
        headers = {"Content-Type": content_type, "Accept": "application/json"}
        limits = aiohttp.ClientTimeout(total=timeout)
        status = 0
        session = self.session
        try:
            async with session.request(method, url, data=data, headers=headers, timeout=limits) as response:
                text = await response.read()
                status = response.status
        except TimeoutError:
            await self._replace_session(session)
            raise
        finally:
            if status:
                self.answers.note(time.monotonic())
            self.on_response(method, status)
        try:
            answer = json.loads(text)
        except ValueError:
            answer = text.decode(errors="replace")
        if status >= 400:
            raise ApiError(status, answer)
        return answer

    async def _replace_session(self, session: aiohttp.ClientSession) -> None:
        """Replace the session after a timeout: its other connections may be dead, too."""
        if session is self.session:
            self.session = self.new_session()
            await session.close()

    async def get(self, kind: str, namespace: str, name: str, timeout: float = 15) -> Json | None:
        """The object, or None when there is none."""
        try:
            return await self.call("GET", RESOURCES[kind].path(namespace, name), timeout=timeout)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def list_pages(
        self, kind: str, namespace: str | None, label_selector: str | None = None
    ) -> AsyncIterator[ListPage]:
        """All objects of a kind, page by page; none when the cluster does not have the kind."""
        params = {"limit": "500", **({"labelSelector": label_selector} if label_selector else {})}
        first = True
        while True:
            try:
                page = await self.call("GET", RESOURCES[kind].path(namespace), params=params, timeout=60)
            except ApiError as error:
                if error.status == 404:
                    return
                if error.status == 410 and "continue" in params:  # expired: from the start
                    del params["continue"]
                    first = True
                    continue
                raise
            yield ListPage(page["items"], first, page["metadata"]["resourceVersion"])
            first = False
            if not (token := page["metadata"].get("continue")):
                return
            params["continue"] = token

    async def list(self, kind: str, namespace: str | None, label_selector: str | None = None) -> list[Json]:
        """All objects of a kind, for kinds with few of them."""
        out: list[Json] = []
        async for page in self.list_pages(kind, namespace, label_selector):
            out = [*([] if page.is_first else out), *page.items]
        return out

    async def apply(self, manifest: Json, manager: str, subresource: str | None = None) -> Json:
        """Server-side apply that takes over fields of other managers (force)."""
        meta = manifest["metadata"]
        path = RESOURCES[manifest["kind"]].path(meta["namespace"], meta["name"], subresource)
        params = {"fieldManager": manager, "force": "true"}
        return await self.call("PATCH", path, manifest, params=params, content_type="application/apply-patch+yaml")

    async def json_patch(self, kind: str, namespace: str, name: str, operations: Json, manager: str) -> Json:
        """Applies a JSON patch (RFC 6902), and returns the object."""
        path = RESOURCES[kind].path(namespace, name)
        params = {"fieldManager": manager}
        return await self.call("PATCH", path, operations, params=params, content_type="application/json-patch+json")

    async def scale(self, kind: str, namespace: str, name: str, replicas: int, version: str, manager: str) -> None:
        """Writes `replicas` through /scale, if the object still has this resourceVersion (else ApiError 409)."""
        path = RESOURCES[kind].path(namespace, name, "scale")
        body = {"metadata": {"resourceVersion": version}, "spec": {"replicas": replicas}}
        params = {"fieldManager": manager}
        await self.call("PATCH", path, body, params=params, content_type="application/merge-patch+json")

    async def delete(self, kind: str, namespace: str, name: str, uid: str) -> None:
        """Deletes the object of this `uid`; does nothing when it is gone, or when another one has its name."""
        body = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        try:
            await self.call("DELETE", RESOURCES[kind].path(namespace, name), body)
        except ApiError as error:
            if error.status not in (404, 409):
                raise

    async def kinds(self, api_version: str) -> set[str]:
        """The kinds of an API group version; none when the cluster does not have it."""
        try:
            found = await self.call("GET", f"/apis/{api_version}")
        except ApiError as error:
            if error.status in (403, 404):
                return set()
            raise
        return {resource["kind"] for resource in found["resources"]}

    async def version(self) -> tuple[int, int]:
        """Major and minor version of the API server."""
        found = await self.call("GET", "/version")
        return int(found["major"]), int("".join(itertools.takewhile(str.isdigit, found["minor"])))  # "34+" of some

    async def close(self) -> None:
        """Closes the session."""
        await self.session.close()
