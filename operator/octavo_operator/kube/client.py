"""The way to the API server: aiohttp sessions, and a few calls."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import aiohttp

from octavo_operator.api import API_VERSION, KIND, PLURAL
from octavo_operator.kube import credentials
from octavo_operator.kube.credentials import Credentials

logger = logging.getLogger("octavo.operator.cluster")

Json = Any


@dataclass(frozen=True)
class Resource:
    api_version: str
    plural: str

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        prefix = "api" if "/" not in self.api_version else "apis"
        where = f"/namespaces/{namespace}" if namespace else ""
        parts = f"/{prefix}/{self.api_version}{where}/{self.plural}"
        return parts + (f"/{name}" if name else "") + (f"/{subresource}" if subresource else "")


RESOURCES = {
    KIND: Resource(API_VERSION, PLURAL),
    "ServiceAccount": Resource("v1", "serviceaccounts"),
    "PersistentVolumeClaim": Resource("v1", "persistentvolumeclaims"),
    "NetworkPolicy": Resource("networking.k8s.io/v1", "networkpolicies"),
    "Service": Resource("v1", "services"),
    "Deployment": Resource("apps/v1", "deployments"),
    "PodDisruptionBudget": Resource("policy/v1", "poddisruptionbudgets"),
    "PodMonitor": Resource("monitoring.coreos.com/v1", "podmonitors"),
    "ServiceMonitor": Resource("monitoring.coreos.com/v1", "servicemonitors"),
    "HorizontalPodAutoscaler": Resource("autoscaling/v2", "horizontalpodautoscalers"),
    "ScaledObject": Resource("keda.sh/v1alpha1", "scaledobjects"),
    "EndpointSlice": Resource("discovery.k8s.io/v1", "endpointslices"),
    "Pod": Resource("v1", "pods"),
    "Event": Resource("v1", "events"),
    "Lease": Resource("coordination.k8s.io/v1", "leases"),
}


@dataclass(frozen=True)
class Page:
    """Part of a list. `is_first`: the list begins, or begins once more. `version`: the cluster's when it was made."""

    items: list[Json]
    is_first: bool
    version: str


class ApiError(Exception):
    """An answer of 400 and more. `reason` and `message` are the API server's."""

    def __init__(self, status: int, body: Json) -> None:
        body = body if isinstance(body, dict) else {"message": str(body)[:500]}
        self.status = status
        self.reason = body.get("reason") or ""
        self.message = body.get("message") or f"HTTP {status}"
        self.details = body.get("details") or {}
        super().__init__(f"{status} {self.reason}: {self.message}")

    @property
    def is_transient(self) -> bool:
        return self.status in (401, 409, 429) or (self.status >= 500 and not self._is_of_types)

    @property
    def _is_of_types(self) -> bool:
        """Server-side apply answers 500 to a field that the kind does not have, or one of another type: it never will
        take that."""
        return self.message.startswith(("failed to create typed patch object", "failed to convert new object"))

    @property
    def is_unknown_field(self) -> bool:
        """The kind that the cluster has lacks a field of ours: it is of an earlier version."""
        return self._is_of_types and "field not declared in schema" in self.message

    @property
    def is_namespace_leaving(self) -> bool:
        causes = self.details.get("causes") or []
        return any(cause.get("reason") == "NamespaceTerminating" for cause in causes)

    @property
    def is_kind_leaving(self) -> bool:
        """Not the object is refused: its kind is gone or about to, as optional ones are with whoever brought them."""
        return (self.status == 404 and not self.details.get("name")) or (
            "custom resource definition is terminating" in self.message
        )


TRANSPORT_ERRORS = (aiohttp.ClientError, asyncio.TimeoutError, OSError)


class Cluster:
    """Calls to one API server. Methods raise ApiError for refusals and TRANSPORT_ERRORS when it is out of reach."""

    def __init__(self, found: Credentials) -> None:
        self._credentials = found
        self.server, self.namespace = found.server, found.namespace
        self.session = self.new_session()
        self.on_answer: Callable[[str, int], None] = lambda method, status: None  # 0: there was none

    @classmethod
    def connect(cls) -> Cluster:
        """Call it inside the event loop. Raises CredentialsError."""
        return cls(credentials.find())

    async def log_in_anew(self, used: str | None = None) -> bool:
        """We were refused; False: there are no other credentials to try. In any event loop."""
        return await asyncio.to_thread(self._credentials.renew, used)

    def new_session(self, response_class: type[aiohttp.ClientResponse] | None = None) -> aiohttp.ClientSession:
        """One more session with the same credentials: kopf closes the one that it is given."""
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
        url = f"{self.server}{path}" + (f"?{urlencode(params)}" if params else "")
        data = None if body is None else json.dumps(body).encode()
        used = self._credentials.authorization
        try:
            return await self._call(method, url, data, content_type, timeout)
        except ApiError as error:
            if error.status != 401 or not await self.log_in_anew(used):
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
            await self._leave(session)
            raise
        finally:
            self.on_answer(method, status)
        try:
            answer = json.loads(text)
        except ValueError:
            answer = text.decode(errors="replace")
        if status >= 400:
            raise ApiError(status, answer)
        return answer

    async def _leave(self, session: aiohttp.ClientSession) -> None:
        """No answer came in time: the session's other connections may be as dead, so none is used again."""
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

    async def pages(self, kind: str, namespace: str | None, label_selector: str | None = None) -> AsyncIterator[Page]:
        """All objects of a kind, page by page; none when the cluster does not know the kind."""
        params = {"limit": "500", **({"labelSelector": label_selector} if label_selector else {})}
        first = True
        while True:
            try:
                page = await self.call("GET", RESOURCES[kind].path(namespace), params=params, timeout=60)
            except ApiError as error:
                if error.status == 404:
                    return
                if error.status == 410 and "continue" in params:  # the list took too long: from the start
                    del params["continue"]
                    first = True
                    continue
                raise
            yield Page(page["items"], first, page["metadata"]["resourceVersion"])
            first = False
            if not (mark := page["metadata"].get("continue")):
                return
            params["continue"] = mark

    async def list(self, kind: str, namespace: str | None, label_selector: str | None = None) -> list[Json]:
        """All objects of a kind at once, for a few of them."""
        out: list[Json] = []
        async for page in self.pages(kind, namespace, label_selector):
            out = [*([] if page.is_first else out), *page.items]
        return out

    async def apply(self, manifest: Json, manager: str, subresource: str | None = None) -> Json:
        """Server-side apply; what we say wins over what others said about the same fields."""
        meta = manifest["metadata"]
        path = RESOURCES[manifest["kind"]].path(meta["namespace"], meta["name"], subresource)
        params = {"fieldManager": manager, "force": "true"}
        return await self.call("PATCH", path, manifest, params=params, content_type="application/apply-patch+yaml")

    async def json_patch(self, kind: str, namespace: str, name: str, operations: Json, manager: str) -> Json:
        path = RESOURCES[kind].path(namespace, name)
        params = {"fieldManager": manager}
        return await self.call("PATCH", path, operations, params=params, content_type="application/json-patch+json")

    async def delete(self, kind: str, namespace: str, name: str, uid: str) -> None:
        """Deletes the very object that was seen; one that is gone, or another of its name, is left alone."""
        body = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        try:
            await self.call("DELETE", RESOURCES[kind].path(namespace, name), body)
        except ApiError as error:
            if error.status not in (404, 409):
                raise

    async def kinds(self, api_version: str) -> set[str]:
        """The kinds that an API serves now; none when there is no such API."""
        try:
            found = await self.call("GET", f"/apis/{api_version}")
        except ApiError as error:
            if error.status in (403, 404):
                return set()
            raise
        return {resource["kind"] for resource in found["resources"]}

    async def close(self) -> None:
        await self.session.close()
