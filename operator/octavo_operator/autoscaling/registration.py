"""Keeps the way from the API server to us: Service -> EndpointSlice -> this process, and the APIService that names it.

Whoever holds the Lease does this and answers, nobody else: one memory, one decision, and two operators never tell the
API server different things. A takeover costs an autoscaler as many seconds as the Lease lasts, in which it leaves the
replicas as they are.

The API is registered while some LLMDeployment is scaled by provider hpa, and taken back after the last one, and when
the operator ends: an APIService that nobody answers for disturbs a whole cluster (namespaces cannot be deleted). It
belongs to our ClusterRole, so it goes with the release in any case. One that is somebody else's is never touched.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from octavo_operator.autoscaling import API_SERVICE, GROUP, VERSION, certificate
from octavo_operator.autoscaling.front_proxy import BadFrontProxy, FrontProxy
from octavo_operator.autoscaling.metrics_api import MetricsApi
from octavo_operator.config import OperatorConfig
from octavo_operator.diagnosis import Problem
from octavo_operator.diff import first_difference
from octavo_operator.kube.client import TRANSPORT_ERRORS, ApiError, Cluster
from octavo_operator.render.names import FIELD_MANAGER

logger = logging.getLogger("octavo.operator.autoscaling")

Json = Any

PERIOD_SECONDS = 5.0
OVERLAP_SECONDS = 15.0  # how long the API server may take to learn of a new authority
_API_SERVICES = "/apis/apiregistration.k8s.io/v1/apiservices"
_NOT_SERVED = Problem(
    "MetricsApiDisabled",
    "this operator does not serve external.metrics.k8s.io: it serves only some namespaces and has no right over the "
    "whole cluster, or its chart was installed with metricsApi.enabled=false; use autoscaling.provider keda, or change "
    "that",
)


@dataclass(frozen=True)
class Standing:
    """What is to be done about an APIService: `problem` when nothing can be."""

    write: Json | None = None  # create or replace by this
    delete: bool = False
    problem: Problem | None = None


def judge(live: Json | None, wanted: bool, service: Json, bundle: str, owner: Json | None) -> Standing:
    """Pure. `service`: {namespace, name, port} of ours; `bundle`: base64 of the authorities to be trusted."""
    if live is not None:
        named = live["spec"].get("service") or {}
        ours = (named.get("namespace"), named.get("name")) == (service["namespace"], service["name"])
        if not ours:
            return Standing(problem=_taken(named) if wanted else None)
        if "deletionTimestamp" in live["metadata"]:
            return Standing()
    if not wanted:
        return Standing(delete=live is not None)
    spec: dict[str, Json] = {
        "group": GROUP, "version": VERSION, "groupPriorityMinimum": 100, "versionPriority": 100, "service": service,
        "caBundle": bundle,
    }  # fmt: skip
    whole = {**(live["spec"] if live else {}), **spec}
    if live is not None and whole == live["spec"]:
        return Standing(problem=_unavailable(live))
    metadata: dict[str, Json] = dict(live["metadata"]) if live else {"name": API_SERVICE}
    metadata["labels"] = {
        **(metadata.get("labels") or {}), "app.kubernetes.io/part-of": "octavo",
        "app.kubernetes.io/managed-by": FIELD_MANAGER,
    }  # fmt: skip
    if owner:
        metadata["ownerReferences"] = [owner]
    body: dict[str, Json] = {"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": metadata}
    return Standing(write={**body, "spec": whole})


def _taken(named: Json) -> Problem:
    whose = f"{named.get('namespace')}/{named.get('name')}" if named else "the API server itself"
    return Problem(
        "APIServiceTaken",
        f"{API_SERVICE} is served by {whose}, and a cluster has only one; with KEDA use autoscaling.provider keda, "
        f"with another adapter have it serve the metric, or remove it (`kubectl get apiservice {API_SERVICE}`)",
    )


def _unavailable(live: Json) -> Problem | None:
    for condition in (live.get("status") or {}).get("conditions") or []:
        if condition["type"] == "Available" and condition["status"] != "True":
            since = datetime.fromisoformat(condition["lastTransitionTime"].replace("Z", "+00:00"))
            if datetime.now(UTC) - since < timedelta(seconds=3 * PERIOD_SECONDS):
                return None  # it has just begun
            return Problem(
                "MetricsApiUnreachable",
                f"the API server does not reach the operator for {API_SERVICE}: {condition.get('reason')}: "
                f"{condition.get('message')}",
            )
    return None


def _bundle_of(live: Json) -> str:
    return str(live["spec"].get("caBundle") or "")


class PortTaken(Exception):
    """We cannot listen."""


class Registration:
    """`problem` is what keeps autoscalers of provider hpa from their metric; None: nothing, as far as we know."""

    def __init__(
        self,
        cluster: Cluster,
        config: OperatorConfig,
        api: MetricsApi,
        wanted: Callable[[], frozenset[str]],
        changed: Callable[[], None],
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        """`wanted()`: providers that some LLMDeployment is scaled by. `changed()`: `problem` is another one.
        `may_write()`: whether the Lease is held this moment."""
        self.problem: Problem | None = None if config.metrics_api else _NOT_SERVED
        self._cluster, self._config, self._api = cluster, config, api
        self._wanted, self._changed, self._may_write = wanted, changed, may_write
        self._lifetime = timedelta(seconds=config.metrics_certificate_seconds)
        self._port: int | None = None  # on which we answer
        self._shown: certificate.ServingCertificate | None = None
        self._next: tuple[certificate.ServingCertificate, datetime] | None = None  # published, not shown yet
        self._front: FrontProxy | None = None
        self._registered: str | None = None  # the authorities of our registration; None: it is not ours
        self._owner_reference: Json | None = None

    async def keep(self, leading: asyncio.Event) -> None:
        """Until cancelled."""
        done: frozenset[str] | None = None
        due = 0.0
        period = min(PERIOD_SECONDS, self._lifetime.total_seconds() / 20)
        while True:
            await leading.wait()
            wanted = self._wanted()
            # One that was frozen may have been replaced without having heard of it.
            if (wanted != done or time.monotonic() >= due) and self._may_write():
                due, done = time.monotonic() + period, wanted
                await self._once(wanted)
            await asyncio.sleep(min(1.0, period))

    async def withdraw(self) -> None:
        """When the operator ends: nobody would answer. Whoever takes over registers anew; if another one has done so
        already, with authorities of its own, that stays."""
        if self._registered is None:
            return
        try:
            async with asyncio.timeout(3):
                live = await self._live()
                if judge(live, False, self._service(), "", None).delete and _bundle_of(live) == self._registered:
                    await self._delete(live)
        except (*TRANSPORT_ERRORS, ApiError) as error:
            logger.warning("%s could not be taken back: %s", API_SERVICE, str(error) or type(error).__name__)

    async def _once(self, wanted: frozenset[str]) -> None:
        before = self.problem
        try:
            async with asyncio.timeout(30):
                if wanted and (self._config.metrics_api or "keda" in wanted):
                    await self._keep_endpoints()
                if self._config.metrics_api:
                    self.problem = await self._step("hpa" in wanted)
        except BadFrontProxy as error:
            self.problem = Problem("NoAggregationLayer", str(error))
        except PortTaken as error:
            self.problem = Problem("MetricsApiUnreachable", str(error))
        except ApiError as error:
            if error.status == 403:
                self.problem = Problem(
                    "Forbidden", f"the operator lacks a right (see the chart's RBAC for metricsApi): {error.message}"
                )
            elif not error.is_transient:
                self.problem = Problem("Refused", f"{API_SERVICE} cannot be registered: {error.message}")
        except TRANSPORT_ERRORS as error:
            logger.warning("the API server is out of reach: %r", error)
        if self.problem != before:
            if self.problem:
                logger.warning("%s: %s", self.problem.reason, self.problem.message)
            self._changed()

    async def _step(self, wanted: bool) -> Problem | None:
        live = await self._live()
        standing = judge(live, wanted, self._service(), "", None)
        if not wanted or (standing.problem and standing.problem.reason == "APIServiceTaken"):
            if standing.delete:
                await self._delete(live)
            self._registered = None
            return standing.problem
        await self._serve()
        bundle = self._bundle()
        standing = judge(live, True, self._service(), bundle, await self._owner())
        if standing.write is not None:
            if live is None:
                await self._cluster.call("POST", _API_SERVICES, standing.write)
            else:
                await self._cluster.call("PUT", f"{_API_SERVICES}/{API_SERVICE}", standing.write)
            logger.info("%s: %s", API_SERVICE, "registered" if live is None else "brought up to date")
        self._registered = bundle
        return standing.problem

    # Our side.

    async def _serve(self) -> None:
        """Has us listening, with a certificate that is good for a while and the front proxy of today."""
        now = datetime.now(UTC)
        config_map = await self._cluster.call(
            "GET", "/api/v1/namespaces/kube-system/configmaps/extension-apiserver-authentication"
        )
        front = FrontProxy.of(config_map)
        shown = self._shown
        if shown is None or now >= shown.expires_at:
            shown, self._next = certificate.make(self._names(), self._lifetime), None
        elif self._next is None:
            if shown.is_due(now):  # first the API server learns of the authority, then it sees the certificate
                self._next = certificate.make(self._names(), self._lifetime), now
        elif now - self._next[1] >= min(timedelta(seconds=OVERLAP_SECONDS), self._lifetime / 8):
            shown, self._next = self._next[0], None
            logger.info("the metrics API shows a new certificate, good until %s", shown.expires_at)
        if shown is not self._shown or front != self._front:
            self._api.present(shown, front)
            self._shown, self._front = shown, front
        if self._port is None:
            try:
                self._port = await self._api.listen(self._config.metrics_port)
            except OSError as error:
                raise PortTaken(f"the operator cannot listen on port {self._config.metrics_port}: {error}") from None

    def _names(self) -> list[str]:
        name = f"{self._config.metrics_service}.{self._config.namespace}.svc"
        return [name, f"{name}.{self._config.cluster_domain}"]

    def _bundle(self) -> str:
        shown = [self._shown] if self._shown else []
        coming = [self._next[0]] if self._next else []
        return base64.b64encode(b"".join(one.authority for one in (*shown, *coming))).decode()

    def _service(self) -> Json:
        return {"namespace": self._config.namespace, "name": self._config.metrics_service, "port": 443}

    # The cluster's side.

    async def _live(self) -> Json | None:
        try:
            return await self._cluster.call("GET", f"{_API_SERVICES}/{API_SERVICE}")
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def _delete(self, live: Json) -> None:
        meta = live["metadata"]
        body = {"preconditions": {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"]}}
        try:
            await self._cluster.call("DELETE", f"{_API_SERVICES}/{API_SERVICE}", body)
            logger.info("%s: taken back", API_SERVICE)
        except ApiError as error:
            if error.status not in (404, 409):
                raise

    async def _owner(self) -> Json | None:
        """Our ClusterRole: what is left of us goes with it."""
        if self._owner_reference is None and (name := self._config.metrics_owner):
            role = await self._cluster.call("GET", f"/apis/rbac.authorization.k8s.io/v1/clusterroles/{name}")
            self._owner_reference = {
                "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "name": name,
                "uid": role["metadata"]["uid"],
            }  # fmt: skip
        return self._owner_reference

    async def _keep_endpoints(self) -> None:
        """Only we are behind the Service: it has no selector."""
        config, name = self._config, self._config.metrics_service
        live = await self._cluster.get("EndpointSlice", config.namespace, name)
        ports = [
            {"name": "metrics-api", "port": self._port or config.metrics_port, "protocol": "TCP"},
            {"name": "queue-depth", "port": config.health_port, "protocol": "TCP"},
        ]
        body = {
            "addressType": "IPv6" if ":" in config.address else "IPv4",
            "endpoints": [{"addresses": [config.address], "conditions": {"ready": True}}],
            "ports": ports,
        }
        if live and first_difference(body, live) is None:
            return
        service = await self._cluster.get("Service", config.namespace, name)
        if service is None:
            raise ApiError(404, {"message": f"there is no Service {name} in {config.namespace}; the chart makes it"})
        labels = {
            "kubernetes.io/service-name": name, "endpointslice.kubernetes.io/managed-by": FIELD_MANAGER,
            "app.kubernetes.io/part-of": "octavo",
        }  # fmt: skip
        owner = {"apiVersion": "v1", "kind": "Service", "name": name, "uid": service["metadata"]["uid"]}
        meta = {"name": name, "namespace": config.namespace, "labels": labels, "ownerReferences": [owner]}
        await self._cluster.apply(
            {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "metadata": meta, **body}, FIELD_MANAGER
        )
