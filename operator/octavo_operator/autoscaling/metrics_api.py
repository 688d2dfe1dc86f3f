"""external.metrics.k8s.io/v1beta1 for the aggregation layer, and the same number as JSON for KEDA.

A HorizontalPodAutoscaler's request comes through the API server: over TLS, with the front proxy's certificate and the
user in headers. Certificates and trust are replaced at runtime by choosing the TLS context of each new connection.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from octavo_operator.api import KIND, OWNER_LABEL
from octavo_operator.autoscaling import GROUP, VERSION
from octavo_operator.autoscaling.certificate import ServingCertificate
from octavo_operator.autoscaling.decision import Decision
from octavo_operator.autoscaling.front_proxy import FrontProxy, Reviews
from octavo_operator.autoscaling.load_reader import LoadReader, MetricUnavailableError
from octavo_operator.kube.client import TRANSPORT_ERRORS, ApiError, KubeClient
from octavo_operator.kube.store import Key, Store
from octavo_operator.render.names import QUEUE_DEPTH_METRIC

logger = logging.getLogger("octavo.operator.autoscaling")

Json = dict[str, Any]

HANDSHAKE_SECONDS = 5.0


class InvalidSelectorError(ValueError):
    """A label selector with unknown syntax or labels."""


class _Context(ssl.SSLContext):
    trusts: FrontProxy


class MetricsApi:
    """The HTTPS server. It answers after `use_certificate`, and while `leading` is set."""

    def __init__(self, client: KubeClient, store: Store, reader: LoadReader, leading: asyncio.Event) -> None:
        self._store, self._reader, self._leading = store, reader, leading
        self._reviews = Reviews(client)
        self._context: _Context | None = None
        self._server: asyncio.Server | None = None
        self._runner: web.AppRunner | None = None

    def use_certificate(self, certificate: ServingCertificate, front: FrontProxy) -> None:
        """New connections get this certificate, and only this front proxy is trusted from now on."""
        self._context = _tls(certificate, front)

    async def listen(self, port: int, host: str | None = None) -> int:
        """Starts the server, after `use_certificate`. Returns the port, which is chosen where `port` is 0."""
        assert self._context is not None
        app = web.Application(middlewares=[self._guard])
        root = f"/apis/{GROUP}/{VERSION}"
        app.add_routes(
            [
                web.get("/apis", self._groups),
                web.get(f"/apis/{GROUP}", self._group),
                web.get(root, self._resources),
                web.get(f"{root}/namespaces/{{namespace}}/{{metric}}", self._values),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=2)
        await self._runner.setup()
        first_context = _new_context()

        def choose(connection: Any, _: str | None, __: ssl.SSLContext) -> None:
            connection.context = self._context

        first_context.sni_callback = choose
        self._server = await asyncio.get_running_loop().create_server(
            self._runner.server,  # type: ignore[arg-type]
            host,
            port,
            ssl=first_context,
            ssl_handshake_timeout=HANDSHAKE_SECONDS,
        )
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stops the server."""
        if self._server:
            self._server.close()
        if self._runner:
            await self._runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Rejects requests that do not come through the front proxy, and turns errors into Status objects."""
        try:
            if self._user(request) is None:
                answer = _status(401, "Unauthorized", "this is an aggregated API: send requests to the API server")
                answer.force_close()
                return answer
            response: web.StreamResponse = await handler(request)
            return response
        except web.HTTPException as error:
            return _status(error.status, error.reason.replace(" ", ""), f"{request.path}: {error.reason}")
        except (*TRANSPORT_ERRORS, ApiError) as error:
            return _status(
                503, "ServiceUnavailable", f"no authorization from the API server: {str(error) or type(error).__name__}"
            )
        except Exception:
            logger.exception("%s: internal error", request.path)
            return _status(500, "InternalError", "internal error of the operator; see its log")

    def _user(self, request: web.Request) -> Json | None:
        connection = request.transport.get_extra_info("ssl_object") if request.transport else None
        if connection is None or self._context is None:
            return None
        front = self._context.trusts
        if getattr(connection.context, "trusts", None) != front:  # from before the trust changed
            return None
        return front.user(request.headers) if front.is_trusted(connection.getpeercert()) else None

    async def _groups(self, _: web.Request) -> web.Response:
        return _json({"kind": "APIGroupList", "apiVersion": "v1", "groups": [_GROUP]})

    async def _group(self, _: web.Request) -> web.Response:
        return _json({"kind": "APIGroup", "apiVersion": "v1", **_GROUP})

    async def _resources(self, _: web.Request) -> web.Response:
        if not self._leading.is_set():
            return _status(503, "ServiceUnavailable", "another replica of the operator is the leader")
        resource = {
            "name": QUEUE_DEPTH_METRIC,
            "singularName": "",
            "namespaced": True,
            "kind": "ExternalMetricValueList",
            "verbs": ["get"],
        }
        body = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": f"{GROUP}/{VERSION}"}
        return _json({**body, "resources": [resource]})

    async def _values(self, request: web.Request) -> web.Response:
        namespace, metric = request.match_info["namespace"], request.match_info["metric"]
        user = self._user(request) or {}
        if not await self._reviews.allows(user, GROUP, VERSION, namespace, metric):
            who = user.get("user")
            return _status(403, "Forbidden", f"{who} may not list {metric}.{GROUP} in the namespace {namespace}")
        if not self._leading.is_set():
            return _status(503, "ServiceUnavailable", "another replica of the operator is the leader")
        if metric != QUEUE_DEPTH_METRIC:
            return _status(404, "NotFound", f"there is no metric {metric}; there is {QUEUE_DEPTH_METRIC}")
        try:
            keys = self._chosen(namespace, request.query.get("labelSelector", ""))
        except InvalidSelectorError as error:
            return _status(400, "BadRequest", str(error))
        if not keys:
            return _status(
                404, "NotFound", f"no {KIND} with spec.autoscaling in {namespace} matches the label selector"
            )
        try:
            items = [_item(key, await self._reader.read(key)) for key in keys]
        except MetricUnavailableError as error:
            return _status(503, "ServiceUnavailable", error.problem.message)
        body = {"kind": "ExternalMetricValueList", "apiVersion": f"{GROUP}/{VERSION}", "metadata": {}}
        return _json({**body, "items": items})

    def _chosen(self, namespace: str, selector: str) -> list[Key]:
        fits = parse_selector(selector)
        known = [key for key in self._store.deployments() if key[0] == namespace and fits(key[1])]
        return sorted(key for key in known if self._reader.deployment(key))


def queue_depth_route(reader: LoadReader, leading: asyncio.Event) -> web.RouteDef:
    """Return the route for KEDA: `GET /queue-depth/NAMESPACE/NAME` -> {"value": 8, ...}. It needs no authentication,
    like /metrics."""

    async def answer(request: web.Request) -> web.Response:
        if not leading.is_set():
            return web.json_response({"error": "another replica of the operator is the leader"}, status=503)
        key = (request.match_info["namespace"], request.match_info["name"])
        if reader.deployment(key) is None:
            return web.json_response({"error": f"there is no {KIND} {key[1]} with spec.autoscaling"}, status=404)
        try:
            return web.json_response({"value": (decision := await reader.read(key)).metric, **_details(decision)})
        except MetricUnavailableError as error:
            return web.json_response({"error": error.problem.message}, status=503)

    return web.get("/queue-depth/{namespace}/{name}", answer)


def parse_selector(text: str) -> Any:
    """A predicate over names of LLMDeployments, from a label selector over the metric's only label. Pure. Raises
    InvalidSelectorError."""
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
            raise InvalidSelectorError(f"labelSelector: only = and in are supported, got {part!r}")
        if label != OWNER_LABEL:
            raise InvalidSelectorError(f"labelSelector: the metric's label is {OWNER_LABEL}, got {label!r}")
        allowed = names if allowed is None else allowed & names
    return lambda name: allowed is None or name in allowed


def _item(key: Key, decision: Decision) -> Json:
    labels = {OWNER_LABEL: key[1], **{name: str(value) for name, value in _details(decision).items()}}
    stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"metricName": QUEUE_DEPTH_METRIC, "metricLabels": labels, "timestamp": stamp, "value": str(decision.metric)}


def _details(decision: Decision) -> Json:
    """Return labels for people who use `kubectl get --raw`."""
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
    context.verify_mode = ssl.CERT_OPTIONAL  # without one the response says what to do
    context.options |= ssl.OP_NO_TICKET  # a resumed session would keep the earlier trust
    return context
