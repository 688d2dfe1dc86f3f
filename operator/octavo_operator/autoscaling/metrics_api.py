"""external.metrics.k8s.io/v1beta1 as the aggregation layer asks for it, and the same number as JSON for KEDA.

A HorizontalPodAutoscaler's request comes through the API server: over TLS, with the front proxy's certificate, the
user in headers. Certificates and trust are exchanged under way by choosing the TLS context of each new connection.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from octavo_operator.api import KIND
from octavo_operator.autoscaling import GROUP, METRIC, VERSION
from octavo_operator.autoscaling.certificate import ServingCertificate
from octavo_operator.autoscaling.decision import Decision
from octavo_operator.autoscaling.front_proxy import FrontProxy, Reviews
from octavo_operator.autoscaling.load_reader import NoReading, Reader
from octavo_operator.kube.client import TRANSPORT_ERRORS, ApiError, Cluster
from octavo_operator.kube.store import Key, Store
from octavo_operator.render.names import OWNER_LABEL

logger = logging.getLogger("octavo.operator.autoscaling")

Json = dict[str, Any]

HANDSHAKE_SECONDS = 5.0


class BadSelector(ValueError):
    """A label selector that cannot be read, or asks for labels that no metric has."""


class _Context(ssl.SSLContext):
    trusts: FrontProxy


class MetricsApi:
    """Answers once `present` has given it a certificate and the front proxy to trust, and `leading` is set."""

    def __init__(self, cluster: Cluster, store: Store, reader: Reader, leading: asyncio.Event) -> None:
        self._store, self._reader, self._leading = store, reader, leading
        self._reviews = Reviews(cluster)
        self._context: _Context | None = None
        self._server: asyncio.Server | None = None
        self._runner: web.AppRunner | None = None

    def present(self, certificate: ServingCertificate, front: FrontProxy) -> None:
        """From now on, new connections see this certificate, and only this front proxy is believed."""
        self._context = _tls(certificate, front)

    async def listen(self, port: int, host: str | None = None) -> int:
        """Returns the port (0: any free one). `present` comes first."""
        assert self._context is not None
        app = web.Application(middlewares=[self._guard])
        root = f"/apis/{GROUP}/{VERSION}"
        app.add_routes(
            [
                web.get("/apis", self._groups), web.get(f"/apis/{GROUP}", self._group),
                web.get(root, self._resources), web.get(f"{root}/namespaces/{{namespace}}/{{metric}}", self._values),
            ]
        )  # fmt: skip
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=2)
        await self._runner.setup()
        front_door = _new_context()

        def choose(connection: Any, _: str | None, __: ssl.SSLContext) -> None:
            connection.context = self._context

        front_door.sni_callback = choose
        self._server = await asyncio.get_running_loop().create_server(
            self._runner.server,  # type: ignore[arg-type]
            host, port, ssl=front_door, ssl_handshake_timeout=HANDSHAKE_SECONDS,
        )  # fmt: skip
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server:
            self._server.close()
        if self._runner:
            await self._runner.cleanup()

    # Who asks.

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Nobody gets further who does not come through the front proxy."""
        try:
            if self._user(request) is None:
                answer = _status(401, "Unauthorized", "ask through the API server: this is an aggregated API")
                answer.force_close()
                return answer
            return await handler(request)
        except web.HTTPException as error:
            return _status(error.status, error.reason.replace(" ", ""), f"{request.path}: {error.reason}")
        except (*TRANSPORT_ERRORS, ApiError) as error:
            return _status(
                503, "ServiceUnavailable", f"the API server cannot be asked: {str(error) or type(error).__name__}"
            )
        except Exception:
            logger.exception("%s: a defect of the operator", request.path)
            return _status(500, "InternalError", "a defect of the operator; see its log")

    def _user(self, request: web.Request) -> Json | None:
        connection = request.transport.get_extra_info("ssl_object") if request.transport else None
        if connection is None or self._context is None:
            return None
        front = self._context.trusts
        if getattr(connection.context, "trusts", None) != front:  # of before the trust changed
            return None
        return front.user(request.headers) if front.admits(connection.getpeercert()) else None

    # What there is.

    async def _groups(self, _: web.Request) -> web.Response:
        return _json({"kind": "APIGroupList", "apiVersion": "v1", "groups": [_GROUP]})

    async def _group(self, _: web.Request) -> web.Response:
        return _json({"kind": "APIGroup", "apiVersion": "v1", **_GROUP})

    async def _resources(self, _: web.Request) -> web.Response:
        if not self._leading.is_set():
            return _status(503, "ServiceUnavailable", "another replica of the operator leads")
        resource = {
            "name": METRIC, "singularName": "", "namespaced": True, "kind": "ExternalMetricValueList", "verbs": ["get"],
        }  # fmt: skip
        body = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": f"{GROUP}/{VERSION}"}
        return _json({**body, "resources": [resource]})

    async def _values(self, request: web.Request) -> web.Response:
        namespace, metric = request.match_info["namespace"], request.match_info["metric"]
        user = self._user(request) or {}
        if not await self._reviews.allows(user, GROUP, VERSION, namespace, metric):
            who = user.get("user")
            return _status(403, "Forbidden", f"{who} may not list {metric}.{GROUP} in the namespace {namespace}")
        if not self._leading.is_set():
            return _status(503, "ServiceUnavailable", "another replica of the operator leads")
        if metric != METRIC:
            return _status(404, "NotFound", f"there is no metric {metric}; there is {METRIC}")
        try:
            keys = self._chosen(namespace, request.query.get("labelSelector", ""))
        except BadSelector as error:
            return _status(400, "BadRequest", str(error))
        if not keys:
            return _status(
                404, "NotFound", f"no {KIND} with spec.autoscaling in {namespace} has the labels that are asked for"
            )
        try:
            items = [_item(key, await self._reader.read(key)) for key in keys]
        except NoReading as error:
            return _status(503, "ServiceUnavailable", error.problem.message)
        body = {"kind": "ExternalMetricValueList", "apiVersion": f"{GROUP}/{VERSION}", "metadata": {}}
        return _json({**body, "items": items})

    def _chosen(self, namespace: str, selector: str) -> list[Key]:
        fits = parse_selector(selector)
        known = [key for key in self._store.deployments() if key[0] == namespace and fits(key[1])]
        return sorted(key for key in known if self._reader.deployment(key))


def queue_depth_route(reader: Reader, leading: asyncio.Event) -> web.RouteDef:
    """For KEDA: `GET /queue-depth/NAMESPACE/NAME` -> {"value": 8, ...}. As open as metrics are."""

    async def answer(request: web.Request) -> web.Response:
        if not leading.is_set():
            return web.json_response({"error": "another replica of the operator leads"}, status=503)
        key = (request.match_info["namespace"], request.match_info["name"])
        if reader.deployment(key) is None:
            return web.json_response({"error": f"there is no {KIND} {key[1]} with spec.autoscaling"}, status=404)
        try:
            return web.json_response({"value": (decision := await reader.read(key)).metric, **_details(decision)})
        except NoReading as error:
            return web.json_response({"error": error.problem.message}, status=503)

    return web.get("/queue-depth/{namespace}/{name}", answer)


def parse_selector(text: str) -> Any:
    """A predicate over names of LLMDeployments, from a label selector over the one label that the metric has. Pure."""
    allowed: set[str] | None = None
    for part in re.findall(r"[^,(]+(?:\([^)]*\))?", text):
        part = part.strip()
        if not part:
            continue
        if match := re.fullmatch(r"([^\s=!]+)\s*==?\s*(\S*)", part):
            label, names = match[1], {match[2]}
        elif match := re.fullmatch(r"(\S+)\s+in\s*\(([^)]*)\)", part):
            label, names = match[1], {one.strip() for one in match[2].split(",")}
        else:
            raise BadSelector(f"labelSelector: only = and in are understood, got {part!r}")
        if label != OWNER_LABEL:
            raise BadSelector(f"labelSelector: the metric's label is {OWNER_LABEL}, got {label!r}")
        allowed = names if allowed is None else allowed & names
    return lambda name: allowed is None or name in allowed


def _item(key: Key, decision: Decision) -> Json:
    labels = {OWNER_LABEL: key[1], **{name: str(value) for name, value in _details(decision).items()}}
    stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"metricName": METRIC, "metricLabels": labels, "timestamp": stamp, "value": str(decision.metric)}


def _details(decision: Decision) -> Json:
    """For people who ask by `kubectl get --raw`."""
    return {"running": decision.running, "waiting": decision.waiting, "needed_replicas": decision.needed}


_GROUP: Json = {
    "name": GROUP,
    "versions": [{"groupVersion": f"{GROUP}/{VERSION}", "version": VERSION}],
    "preferredVersion": {"groupVersion": f"{GROUP}/{VERSION}", "version": VERSION},
}


def _json(body: Json) -> web.Response:
    return web.json_response(body)


def _status(code: int, reason: str, message: str) -> web.Response:
    body = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    return web.json_response({**body, "message": message, "reason": reason, "code": code}, status=code)


def _tls(certificate: ServingCertificate, front: FrontProxy) -> _Context:
    context = _new_context()
    context.load_verify_locations(cadata=front.authority)
    context.trusts = front
    certificate.load_into(context)
    return context


def _new_context() -> _Context:
    context = _Context(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_OPTIONAL  # who has none is told how to ask
    context.options |= ssl.OP_NO_TICKET  # a resumed session would be of the trust of before
    return context
