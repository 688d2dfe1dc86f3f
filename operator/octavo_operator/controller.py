"""The control loop: each change of an LLMDeployment, an LLMGateway or their children causes one reconciliation of the
whole."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from octavo_operator.api import KIND, InvalidLLMDeployment, LLMDeployment, Owner, gateway
from octavo_operator.api.common import gateway_key, gateway_name
from octavo_operator.api.gateway import InvalidLLMGateway
from octavo_operator.autoscaling.condition import Scaling
from octavo_operator.claims.claims import Claims, claimant
from octavo_operator.config import OperatorConfig
from octavo_operator.deployment.events import events
from octavo_operator.deployment.image_rollout import ImageRollout
from octavo_operator.deployment.reconcile import Outcome, parse, reconcile, reconcile_invalid
from octavo_operator.deployment.world import DeploymentWorld
from octavo_operator.gateway import reconcile as reconcile_gateway
from octavo_operator.gateway.links import GatewayLinks
from octavo_operator.gateway.world import GatewayWorld
from octavo_operator.groups.other_groups import read_other_groups
from octavo_operator.kube.client import TRANSPORT_ERRORS, ApiError, KubeClient
from octavo_operator.kube.lease import LeaderElector
from octavo_operator.kube.resources import RESOURCES
from octavo_operator.kube.store import OWNER_KINDS, Key, Observed, Store
from octavo_operator.kube.workqueue import WorkQueue
from octavo_operator.lora.summary import AdapterReports
from octavo_operator.metrics import Metrics, OperatorState, Snapshot
from octavo_operator.observed.children import pods_of
from octavo_operator.observed.diagnosis import Event, Problem
from octavo_operator.observed.hanging import pod_controllers
from octavo_operator.observed.pod_events import PodEvents
from octavo_operator.observed.pod_starts import PodStarts
from octavo_operator.render import names
from octavo_operator.writes.apply import Applier, NotLeaderError
from octavo_operator.writes.plan import Plan
from octavo_operator.writes.rejections import is_transient, rejection

logger = logging.getLogger("octavo.operator")

_LEASE_RETRY_SECONDS = 1.0
_CLAIM_CHECK_SECONDS = 10.0  # of what another operator has claimed

Json = dict[str, Any]


class Controller:
    """Reconciles LLMDeployments and LLMGateways while `lease` is held. The methods on_* are for watches
    (kube/handlers.py)."""

    def __init__(self, client: KubeClient, config: OperatorConfig, lease: LeaderElector) -> None:
        self.store = Store()
        self.queue: WorkQueue[Key] = WorkQueue(max_delay=30.0)
        self.claims = Claims(client, config, time.monotonic)
        self._pod_events = PodEvents(client)
        self.pod_starts = PodStarts(client, self.queue.add)
        self._config, self._lease = config, lease
        self._applier = Applier(client, self.store, lambda: lease.is_held)
        self._image_rollout = ImageRollout(self.store, config, time.monotonic)
        self._links = GatewayLinks(self.store, self.queue.add)
        self._apis: frozenset[str] = frozenset()
        self.listed_at: float | None = None
        self.synced = asyncio.Event()  # everything has been listed once
        self.metrics = Metrics(self._state, config.resync_seconds)
        client.on_response = self.metrics.on_response
        self.scaling: Callable[[LLMDeployment], Scaling] = lambda _: Scaling()  # set by __main__.py
        self.rejected: Callable[[Key], Problem | None] = lambda _: None  # by Envoy, in routers; set by __main__.py
        self.adapters: Callable[[Key], AdapterReports] = lambda _: {}  # what pods say; set by __main__.py

    def on_change(self, kind: str, body: Any) -> None:
        """A watch reported an object as new or changed."""
        self.metrics.on_watch_event(kind)
        if self.store.is_stale(kind, body):
            return
        if key := self.store.put(Observed.of(kind, RESOURCES[kind].api_version, body)):
            self._changed(kind, key)

    def on_delete(self, kind: str, namespace: str, name: str, uid: str, version: str) -> None:
        """A watch reported an object as deleted, or as no longer selected."""
        self.metrics.on_watch_event(kind)
        if key := self.store.delete(kind, namespace, name, uid, version):
            self._changed(kind, key)

    def _changed(self, kind: str, key: Key) -> None:
        self.queue.add(key)
        if kind in OWNER_KINDS:
            self._links.update(key)

    def on_optional_kinds(self, kinds: frozenset[str]) -> None:
        """The cluster has these of OPTIONAL_KINDS, and IMAGE_VOLUMES."""
        self._apis = kinds
        for key in self.store.owner_keys():
            self.queue.add(key)

    def on_listing(self, kind: str, changed: set[Key]) -> None:
        """A kind was listed; that changed what is known of these owners."""
        if changed and self.listed_at is not None:
            self.metrics.on_missed_changes(kind, len(changed))
        for key in changed:
            self._changed(kind, key)

    def on_all_listed(self) -> None:
        """All kinds were listed."""
        self.listed_at = time.monotonic()
        self.synced.set()
        self.metrics.on_listing(succeeded=True)

    def on_listing_failed(self) -> None:
        """The API server did not list everything."""
        self.metrics.on_listing(succeeded=False)

    async def post(self, deployment: LLMDeployment, reason: str, message: str) -> None:
        """Creates an event of an LLMDeployment; errors are only logged."""
        await self._applier.post(deployment, Event("Normal", reason, message))

    def _state(self) -> OperatorState:
        age = None if self.listed_at is None else time.monotonic() - self.listed_at
        others = len(self.claims.others)
        return OperatorState(self._lease.leading.is_set(), len(self.queue), self.queue.num_failing, others, age)

    async def run_worker(self) -> None:
        """One of several workers. Until cancelled; starts once everything is listed and the Lease is held."""
        await self.synced.wait()
        while True:
            await self._lease.leading.wait()  # it is lost while the API server is away
            key = await self.queue.get()
            began = time.monotonic()
            try:
                if not self._lease.is_held:
                    raise NotLeaderError
                succeeded = await self._reconcile(key)
                self.metrics.on_reconciled("done" if succeeded else "retried", time.monotonic() - began)
            except NotLeaderError:
                # The Lease may have expired for a moment only (the process was suspended), and will be renewed. If it
                # is lost, the process ends.
                self.queue.add_after(key, _LEASE_RETRY_SECONDS)
            except Exception:
                logger.exception("%s/%s: internal error", *key)
                self.metrics.on_reconciled("failed", time.monotonic() - began)
                self.queue.retry(key)
            finally:
                self.queue.done(key)

    async def _reconcile(self, key: Key) -> bool:
        """False: it is to be retried."""
        name = gateway_name(key)
        seen = self.store.get(gateway.KIND if name else KIND, key[0], name or key[1])
        if seen is None:
            self._forget(key)
            return True
        try:
            body = await self._claim(key, seen.body)
        except (*TRANSPORT_ERRORS, ApiError) as error:
            logger.warning("%s/%s: claiming failed: %s", *key, str(error) or type(error).__name__)
            self.queue.retry(key)
            return False
        if body is None:
            return True
        done = await (self._reconcile_gateway(key, body) if name else self._reconcile_deployment(key, body))
        self._links.update(key)  # its status may have changed: no watch tells of our own writes
        return done

    async def _reconcile_deployment(self, key: Key, body: Json) -> bool:
        deployment = parse(body)
        if isinstance(deployment, InvalidLLMDeployment):
            return await self._report_invalid(
                deployment, reconcile_invalid(deployment, self.store.children(key), time.time())
            )
        children = self.store.children(key)
        pods, fetching = pods_of(children), pods_of(children, names.PREFETCH)
        others = [*pods_of(children, names.WORKER), *fetching, *pods_of(children, names.ROUTER)]
        pod_events, events_due = await self._pod_events.read(
            key, [*pods, *others], time.time(), pod_controllers(children)
        )
        start = self.pod_starts.last(key, pods, deployment.status.get("start"))

        def compute(problem: Problem | None) -> Outcome:
            world = DeploymentWorld(
                children=self.store.children(key),
                now=time.time(),
                apis=self._apis,
                write_problem=problem,
                field_conflict=self._applier.field_conflicts.problem(key),
                pod_events=pod_events,
                rejected=self.rejected(key),
                scaling=self.scaling(deployment),
                image_turn=self._image_rollout.turn(deployment),
                start=start,
                gateways=self._links.gateways_of(deployment),
                other_groups=lambda: read_other_groups(self.store, key),
                adapters=self.adapters(key),
            )
            return reconcile(deployment, world, self._config)

        return await self._carry_out(deployment, compute, events_due)

    async def _reconcile_gateway(self, key: Key, body: Json) -> bool:
        owner = reconcile_gateway.parse(body)
        if isinstance(owner, InvalidLLMGateway):
            return await self._report_invalid(owner, reconcile_gateway.reconcile_invalid(owner, time.time()))
        pods = pods_of(self.store.children(key), names.ROUTER)
        pod_events, events_due = await self._pod_events.read(key, pods, time.time())

        def compute(problem: Problem | None) -> Outcome:
            world = GatewayWorld(
                children=self.store.children(key),
                now=time.time(),
                apis=self._apis,
                write_problem=problem,
                field_conflict=self._applier.field_conflicts.problem(key),
                pod_events=pod_events,
                rejected=self.rejected(key),
                candidates=self._links.candidates(owner),
                has_namesake=self._links.has_namesake(owner),
            )
            return reconcile_gateway.reconcile(owner, world, self._config)

        return await self._carry_out(owner, compute, events_due)

    async def _carry_out(
        self, owner: Owner, compute: Callable[[Problem | None], Outcome], events_due: float | None
    ) -> bool:
        """`compute`: from what is observed now, and the problem of the last execution; `events_due`: seconds until
        events of its pods are to be read again."""
        key, outcome = owner.key, compute(None)
        problem, transient = await self._execute(owner, outcome.plan)
        if outcome.plan.actions:
            # Report what exists now, responses to our own writes included.
            outcome = compute(problem)
        if outcome.status is not None:
            transient |= not await self._write_status(owner, outcome.status)
            self._record(owner, outcome.status)
        if transient:
            delay = self.queue.retry(key)
            logger.debug("%s/%s: retry in %.1f s", *key, delay)
        else:
            self.queue.succeeded(key)
        applier = self._applier
        for seconds in (
            outcome.requeue_after,
            events_due,
            applier.rejected_writes.retry_after(key),
            applier.field_conflicts.requeue_after(key),
        ):
            if seconds is not None:
                self.queue.add_after(key, seconds)
        return not (problem or transient)

    async def _report_invalid(self, owner: Owner, outcome: Outcome) -> bool:
        succeeded = outcome.status is None or await self._write_status(owner, outcome.status)
        if outcome.status is not None:
            self._record(owner, outcome.status)
        if not succeeded:
            self.queue.retry(owner.key)
        return succeeded

    def _forget(self, key: Key) -> None:
        """The LLMDeployment or LLMGateway is gone."""
        self.queue.forget(key)
        memories = (
            self._applier.rejected_writes,
            self._applier.field_conflicts,
            self._pod_events,
            self.pod_starts,
            self.claims,
        )
        for memory in memories:
            memory.forget(key)
        self._unrecord(key)
        self._links.update(key)

    def gateways_of(self, deployment: LLMDeployment) -> list[Key]:
        """Keys of the gateways that select it."""
        return [gateway_key(deployment.namespace, name) for name in self._links.gateways_of(deployment)]

    def _unrecord(self, key: Key) -> None:
        if name := gateway_name(key):
            self.metrics.record_gateway((key[0], name), None)
        else:
            self.metrics.record(key, None)

    async def _claim(self, key: Key, body: Json) -> Json | None:
        """The owner once it is ours; None: another operator serves it. Raises TRANSPORT_ERRORS and ApiError."""
        operator, ours = claimant(body), self.claims.ours
        if operator == ours or not self.claims.are_supported:
            self.claims.others.pop(key, None)
            return body
        owner: Owner = reconcile_gateway.parse(body) if gateway_name(key) else parse(body)
        if operator is not None and await self.claims.is_valid(operator, body):
            self.queue.add_after(key, _CLAIM_CHECK_SECONDS)
            self._unrecord(key)
            if self.claims.others.get(key) != operator:
                self.claims.others[key] = operator
                text = f"operator {operator} serves it, so operator {ours} ignores it"
                logger.warning("%s/%s: %s", *key, text)
                await self._applier.post(owner, Event("Warning", "ManagedByAnotherOperator", text))
            return None
        try:
            claimed = await self._applier.claim(body, ours)
        except ApiError as error:
            if not error.is_unknown_field:
                raise
            self.claims.mark_unsupported()
            logger.error(
                "the CRD of %s is older than this operator and lacks status.operator; "
                "install the CustomResourceDefinition of this version",
                owner.kind,
            )
            return body
        if operator is not None:
            logger.warning("%s/%s: taken over from operator %s, which no longer serves it", *key, operator)
        self.claims.forget(key)
        return claimed

    def _record(self, owner: Owner, status: Json) -> None:
        if isinstance(owner, LLMDeployment | InvalidLLMDeployment):
            children = self.store.children(owner.key)
            pods = [*pods_of(children), *pods_of(children, names.WORKER)]
            self.metrics.record(owner.key, Snapshot.of(owner, status, pods))
        else:
            self.metrics.record_gateway((owner.namespace, owner.name), status)

    async def _execute(self, owner: Owner, plan: Plan) -> tuple[Problem | None, bool]:
        """The cause to report, and whether to retry in any case."""
        transient = False
        try:
            errors = await self._applier.execute(owner, plan)
            transient = any(is_transient(one) for one in errors)
        except TRANSPORT_ERRORS:
            transient = True
        except ApiError as error:
            if error.is_namespace_terminating:
                return None, False
            transient = True
        reported = self._applier.rejected_writes.error_to_report(owner.key)
        return rejection(reported, owner.kind) if reported else None, transient

    async def _write_status(self, owner: Owner, status: Json) -> bool:
        """False: it is to be retried."""
        before = owner.status
        if claimant({"status": before}) == self.claims.ours:  # otherwise the CRD lacks the field
            status = {**status, "operator": self.claims.ours}
        if status == before:
            return True
        try:
            await self._applier.write_status(owner, status)
        except TRANSPORT_ERRORS:
            return False
        except ApiError as error:
            newer = ("start", "adapters")
            if error.is_unknown_field and any(name in status for name in newer):
                # The CRD is older than this operator: the rest of the status must not be lost.
                self.pod_starts.are_supported = False
                return await self._write_status(owner, {k: v for k, v in status.items() if k not in newer})
            if error.status != 404:
                logger.warning("%s/%s: status rejected: %s", *owner.key, error.message)
            return not error.is_transient
        for event in events(before, status):
            await self._applier.post(owner, event)
        return True
