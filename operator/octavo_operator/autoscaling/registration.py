"""Registers the metrics API: the APIService names a Service, and that Service's EndpointSlice names this pod.

Only the leader does this and answers, so there is one state and one decision. A change of the leader takes as long as
the Lease lasts; until then autoscalers leave the replicas unchanged.

The API is registered while some LLMDeployment is scaled with provider hpa. It is unregistered after the last one, and
when the operator ends: an APIService without a server disturbs the whole cluster (namespaces cannot be deleted). It is
owned by our ClusterRole, so it is deleted with the release in any case. Another adapter's is never changed.
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

from octavo_operator.api import FIELD_MANAGER
from octavo_operator.autoscaling import API_SERVICE, GROUP, VERSION, certificate
from octavo_operator.autoscaling.front_proxy import FrontProxy, FrontProxyConfigError
from octavo_operator.autoscaling.metrics_api import MetricsApi
from octavo_operator.config import OperatorConfig
from octavo_operator.diff import first_difference
from octavo_operator.kube.client import TRANSPORT_ERRORS, ApiError, KubeClient
from octavo_operator.observed.diagnosis import Problem

logger = logging.getLogger("octavo.operator.autoscaling")

Json = Any

PERIOD_SECONDS = 5.0
OVERLAP_SECONDS = 15.0  # for the API server to trust a new authority
_API_SERVICES = "/apis/apiregistration.k8s.io/v1/apiservices"
_NOT_SERVED = Problem(
    "MetricsAPIDisabled",
    "this operator does not serve external.metrics.k8s.io: it watches only some namespaces and has no rights over the "
    "whole cluster, or its chart was installed with metricsApi.enabled=false; change that, or use autoscaling.provider "
    "keda",
)


@dataclass(frozen=True)
class RegistrationPlan:
    """Write of the APIService that is due; `problem`: why it does not work."""

    write: Json | None = None  # to create, or to replace the live one
    delete: bool = False
    problem: Problem | None = None


def plan_registration(
    live: Json | None, wanted: bool, service: Json, bundle: str, owner: Json | None
) -> RegistrationPlan:
    """Decide what to write, given the APIService that is `live`. Pure. `service`: {namespace, name, port} of ours;
    `bundle`: base64 of the authorities to trust; `owner`: reference to our ClusterRole."""
    if live is not None:
        named = live["spec"].get("service") or {}
        ours = (named.get("namespace"), named.get("name")) == (service["namespace"], service["name"])
        if not ours:
            return RegistrationPlan(problem=_taken(named) if wanted else None)
        if "deletionTimestamp" in live["metadata"]:
            return RegistrationPlan()
    if not wanted:
        return RegistrationPlan(delete=live is not None)
    spec: dict[str, Json] = {
        "group": GROUP,
        "version": VERSION,
        "groupPriorityMinimum": 100,
        "versionPriority": 100,
        "service": service,
        "caBundle": bundle,
    }
    whole = {**(live["spec"] if live else {}), **spec}
    if live is not None and whole == live["spec"]:
        return RegistrationPlan(problem=_unavailable(live))
    metadata: dict[str, Json] = dict(live["metadata"]) if live else {"name": API_SERVICE}
    metadata["labels"] = {
        **(metadata.get("labels") or {}),
        "app.kubernetes.io/part-of": "octavo",
        "app.kubernetes.io/managed-by": FIELD_MANAGER,
    }
    if owner:
        metadata["ownerReferences"] = [owner]
    body: dict[str, Json] = {"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": metadata}
    return RegistrationPlan(write={**body, "spec": whole})


def _taken(named: Json) -> Problem:
    whose = f"{named.get('namespace')}/{named.get('name')}" if named else "the API server itself"
    return Problem(
        "APIServiceConflict",
        f"{API_SERVICE} is served by {whose}, and a cluster has only one; with KEDA use autoscaling.provider keda, "
        f"with another adapter let it serve the metric, or remove it (`kubectl get apiservice {API_SERVICE}`)",
    )


def _unavailable(live: Json) -> Problem | None:
    for condition in (live.get("status") or {}).get("conditions") or []:
        if condition["type"] == "Available" and condition["status"] != "True":
            since = datetime.fromisoformat(condition["lastTransitionTime"].replace("Z", "+00:00"))
            if datetime.now(UTC) - since < timedelta(seconds=3 * PERIOD_SECONDS):
                return None  # it has just been registered
            return Problem(
                "MetricsAPIUnreachable",
                f"the API server cannot reach the operator for {API_SERVICE}: {condition.get('reason')}: "
                f"{condition.get('message')}",
            )
    return None


def _bundle_of(live: Json) -> str:
    return str(live["spec"].get("caBundle") or "")


class ListenError(Exception):
    """The metrics port cannot be opened."""


class Registration:
    """Keeps the metrics API registered. `problem`: why autoscalers of provider hpa get no metric; None: they do."""

    def __init__(
        self,
        client: KubeClient,
        config: OperatorConfig,
        api: MetricsApi,
        wanted: Callable[[], frozenset[str]],
        changed: Callable[[], None],
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        """`wanted()`: providers of all LLMDeployments with autoscaling. `changed()` is called when `problem` changes.
        `may_write()`: whether we are the leader."""
        self.problem: Problem | None = None if config.metrics_api else _NOT_SERVED
        self._client, self._config, self._api = client, config, api
        self._wanted, self._changed, self._may_write = wanted, changed, may_write
        self._lifetime = timedelta(seconds=config.metrics_certificate_seconds)
        self._port: int | None = None  # once the server runs
        self._current: certificate.ServingCertificate | None = None
        self._next: tuple[certificate.ServingCertificate, datetime] | None = None  # in the caBundle, not in use yet
        self._front: FrontProxy | None = None
        self._registered: str | None = None  # our caBundle; None: we have not registered
        self._owner_reference: Json | None = None

    async def run(self, leading: asyncio.Event) -> None:
        """Runs until cancelled."""
        done: frozenset[str] | None = None
        due = 0.0
        period = min(PERIOD_SECONDS, self._lifetime.total_seconds() / 20)
        while True:
            await leading.wait()
            wanted = self._wanted()
            # A suspended process may have lost the Lease without noticing.
            if (wanted != done or time.monotonic() >= due) and self._may_write():
                due, done = time.monotonic() + period, wanted
                await self._reconcile(wanted)
            await asyncio.sleep(min(1.0, period))

    async def unregister(self) -> None:
        """Deletes the APIService when the operator ends, unless another leader has registered its own already."""
        if self._registered is None:
            return
        try:
            async with asyncio.timeout(3):
                live = await self._live()
                if (
                    plan_registration(live, False, self._service(), "", None).delete
                    and _bundle_of(live) == self._registered
                ):
                    await self._delete(live)
        except (*TRANSPORT_ERRORS, ApiError) as error:
            logger.warning("deleting %s failed: %s", API_SERVICE, str(error) or type(error).__name__)

    async def _reconcile(self, wanted: frozenset[str]) -> None:
        before = self.problem
        try:
            async with asyncio.timeout(30):
                if wanted and (self._config.metrics_api or "keda" in wanted):
                    await self._keep_endpoints()
                if self._config.metrics_api:
                    self.problem = await self._register("hpa" in wanted)
        except FrontProxyConfigError as error:
            self.problem = Problem("NoAggregationLayer", str(error))
        except ListenError as error:
            self.problem = Problem("MetricsAPIUnreachable", str(error))
        except ApiError as error:
            if error.status == 403:
                self.problem = Problem(
                    "Forbidden",
                    f"the operator lacks a permission (see the chart's RBAC for metricsApi): {error.message}",
                )
            elif not error.is_transient:
                self.problem = Problem("ObjectRejected", f"registering {API_SERVICE} failed: {error.message}")
        except TRANSPORT_ERRORS as error:
            logger.warning("no response from the API server: %r", error)
        if self.problem != before:
            if self.problem:
                logger.warning("%s: %s", self.problem.reason, self.problem.message)
            self._changed()

    async def _register(self, wanted: bool) -> Problem | None:
        live = await self._live()
        plan = plan_registration(live, wanted, self._service(), "", None)
        if not wanted or (plan.problem and plan.problem.reason == "APIServiceConflict"):
            if plan.delete:
                await self._delete(live)
            self._registered = None
            return plan.problem
        await self._serve()
        bundle = self._bundle()
        plan = plan_registration(live, True, self._service(), bundle, await self._owner())
        if plan.write is not None:
            if live is None:
                await self._client.call("POST", _API_SERVICES, plan.write)
            else:
                await self._client.call("PUT", f"{_API_SERVICES}/{API_SERVICE}", plan.write)
            logger.info("%s: %s", API_SERVICE, "registered" if live is None else "updated")
        self._registered = bundle
        return plan.problem

    async def _serve(self) -> None:
        """Keeps the server running, with a valid certificate and the cluster's current front proxy."""
        now = datetime.now(UTC)
        config_map = await self._client.call(
            "GET", "/api/v1/namespaces/kube-system/configmaps/extension-apiserver-authentication"
        )
        front = FrontProxy.of(config_map)
        current = self._current
        if current is None or now >= current.expires_at:
            current, self._next = certificate.make(self._names(), self._lifetime), None
        elif self._next is None:
            if current.is_due(now):  # its authority goes into the caBundle before it is used
                self._next = certificate.make(self._names(), self._lifetime), now
        elif now - self._next[1] >= min(timedelta(seconds=OVERLAP_SECONDS), self._lifetime / 8):
            current, self._next = self._next[0], None
            logger.info("the metrics API uses a new certificate, valid until %s", current.expires_at)
        if current is not self._current or front != self._front:
            self._api.use_certificate(current, front)
            self._current, self._front = current, front
        if self._port is None:
            try:
                self._port = await self._api.listen(self._config.metrics_port)
            except OSError as error:
                raise ListenError(f"the operator cannot listen on port {self._config.metrics_port}: {error}") from None

    def _names(self) -> list[str]:
        name = f"{self._config.metrics_service}.{self._config.namespace}.svc"
        return [name, f"{name}.{self._config.cluster_domain}"]

    def _bundle(self) -> str:
        current = [self._current] if self._current else []
        coming = [self._next[0]] if self._next else []
        return base64.b64encode(b"".join(one.authority for one in (*current, *coming))).decode()

    def _service(self) -> Json:
        return {"namespace": self._config.namespace, "name": self._config.metrics_service, "port": 443}

    async def _live(self) -> Json | None:
        try:
            return await self._client.call("GET", f"{_API_SERVICES}/{API_SERVICE}")
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def _delete(self, live: Json) -> None:
        meta = live["metadata"]
        body = {"preconditions": {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"]}}
        try:
            await self._client.call("DELETE", f"{_API_SERVICES}/{API_SERVICE}", body)
            logger.info("%s: deleted", API_SERVICE)
        except ApiError as error:
            if error.status not in (404, 409):
                raise

    async def _owner(self) -> Json | None:
        """Reference to our ClusterRole: the garbage collector deletes the APIService with it."""
        if self._owner_reference is None and (name := self._config.metrics_owner):
            role = await self._client.call("GET", f"/apis/rbac.authorization.k8s.io/v1/clusterroles/{name}")
            self._owner_reference = {
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "kind": "ClusterRole",
                "name": name,
                "uid": role["metadata"]["uid"],
            }
        return self._owner_reference

    async def _keep_endpoints(self) -> None:
        """Makes this pod the only endpoint of the Service, which has no selector."""
        config, name = self._config, self._config.metrics_service
        live = await self._client.get("EndpointSlice", config.namespace, name)
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
        service = await self._client.get("Service", config.namespace, name)
        if service is None:
            raise ApiError(404, {"message": f"there is no Service {name} in {config.namespace}; the chart creates it"})
        labels = {
            "kubernetes.io/service-name": name,
            "endpointslice.kubernetes.io/managed-by": FIELD_MANAGER,
            "app.kubernetes.io/part-of": "octavo",
        }
        owner = {"apiVersion": "v1", "kind": "Service", "name": name, "uid": service["metadata"]["uid"]}
        meta = {"name": name, "namespace": config.namespace, "labels": labels, "ownerReferences": [owner]}
        await self._client.apply(
            {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "metadata": meta, **body}, FIELD_MANAGER
        )
