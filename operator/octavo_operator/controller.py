"""The control loop: each change of an LLMDeployment or of its children causes one reconciliation of the whole."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from octavo_operator.api import KIND, InvalidLLMDeployment, LLMDeployment
from octavo_operator.apply import Applier, NotLeaderError
from octavo_operator.autoscaling.condition import Scaling
from octavo_operator.claims import Claims, claimant
from octavo_operator.config import OperatorConfig
from octavo_operator.diagnosis import Events, Problem
from octavo_operator.image_rollout import ImageRollout
from octavo_operator.kube.client import TRANSPORT_ERRORS, ApiError, KubeClient
from octavo_operator.kube.lease import LeaderElector
from octavo_operator.kube.resources import RESOURCES
from octavo_operator.kube.store import Key, Observed, Store
from octavo_operator.kube.workqueue import WorkQueue
from octavo_operator.metrics import Metrics, OperatorState, Snapshot
from octavo_operator.plan import Plan
from octavo_operator.pod_events import PodEvents
from octavo_operator.reconcile import Outcome, parse, reconcile, reconcile_invalid
from octavo_operator.rejections import is_transient, rejection
from octavo_operator.status import Event, events

logger = logging.getLogger("octavo.operator")

_LEASE_RETRY_SECONDS = 1.0
_CLAIM_CHECK_SECONDS = 10.0  # of an LLMDeployment that another operator has claimed

Json = dict[str, Any]


class Controller:
    """Reconciles LLMDeployments while `lease` is held. The methods on_* are for watches (kube/handlers.py)."""

    def __init__(self, client: KubeClient, config: OperatorConfig, lease: LeaderElector) -> None:
        self.store = Store()
        self.queue: WorkQueue[Key] = WorkQueue(max_delay=30.0)
        self.claims = Claims(client, config, time.monotonic)
        self._pod_events = PodEvents(client)
        self._config, self._lease = config, lease
        self._applier = Applier(client, self.store, lambda: lease.is_held)
        self._image_rollout = ImageRollout(self.store, config, time.monotonic)
        self._apis: frozenset[str] = frozenset()
        self.listed_at: float | None = None
        self.synced = asyncio.Event()  # everything has been listed once
        self.metrics = Metrics(self._state, config.resync_seconds)
        client.on_response = self.metrics.on_response
        self.scaling: Callable[[LLMDeployment], Scaling] = lambda _: Scaling()  # set by __main__.py

    def on_change(self, kind: str, body: Any) -> None:
        """A watch reported an object as new or changed."""
        self.metrics.on_watch_event(kind)
        if self.store.is_stale(kind, body):
            return
        if key := self.store.put(Observed.of(kind, RESOURCES[kind].api_version, body)):
            self.queue.add(key)

    def on_delete(self, kind: str, namespace: str, name: str, uid: str, version: str) -> None:
        """A watch reported an object as deleted, or as no longer selected."""
        self.metrics.on_watch_event(kind)
        if key := self.store.delete(kind, namespace, name, uid, version):
            self.queue.add(key)

    def on_optional_kinds(self, kinds: frozenset[str]) -> None:
        """The cluster has these of OPTIONAL_KINDS."""
        self._apis = kinds
        for key in self.store.deployments():
            self.queue.add(key)

    def on_listing(self, kind: str, changed: set[Key]) -> None:
        """A kind was listed; that changed what is known of these LLMDeployments."""
        if changed and self.listed_at is not None:
            self.metrics.on_missed_changes(kind, len(changed))
        for key in changed:
            self.queue.add(key)

    def on_all_listed(self) -> None:
        """All kinds were listed."""
        self.listed_at = time.monotonic()
        self.synced.set()
        self.metrics.on_listing(succeeded=True)

    def on_listing_failed(self) -> None:
        """The API server did not list everything."""
        self.metrics.on_listing(succeeded=False)

    def _state(self) -> OperatorState:
        age = None if self.listed_at is None else time.monotonic() - self.listed_at
        others = len(self.claims.others)
        return OperatorState(self._lease.leading.is_set(), len(self.queue), self.queue.num_failing, others, age)

    async def run_worker(self) -> None:
        """One of several workers. Until cancelled; starts once everything is listed and the Lease is held."""
        await self.synced.wait()
        await self._lease.leading.wait()
        while True:
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
        seen = self.store.get(KIND, *key)
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
        deployment = parse(body)
        if isinstance(deployment, InvalidLLMDeployment):
            return await self._reconcile_invalid(key, deployment)
        pods = [one.body for one in self.store.children(key) if one.kind == "Pod"]
        pod_events, events_due = await self._pod_events.read(key, pods, time.time())
        outcome = self._compute(deployment, pod_events)
        problem, transient = await self._execute(deployment, outcome.plan)
        if outcome.plan.actions:
            # Report what exists now, responses to our own writes included.
            outcome = self._compute(deployment, pod_events, problem)
        if outcome.status is not None:
            transient |= not await self._write_status(deployment, outcome.status)
            self._record(deployment, outcome.status)
        if transient:
            delay = self.queue.retry(key)
            logger.debug("%s/%s: retry in %.1f s", *key, delay)
        else:
            self.queue.succeeded(key)
        applier = self._applier
        for seconds in (
            outcome.requeue_after, events_due, applier.rejected_writes.retry_after(key),
            applier.contests.requeue_after(key),
        ):  # fmt: skip
            if seconds is not None:
                self.queue.add_after(key, seconds)
        return not (problem or transient)

    async def _reconcile_invalid(self, key: Key, deployment: InvalidLLMDeployment) -> bool:
        status = reconcile_invalid(deployment, self.store.children(key), time.time()).status
        succeeded = status is None or await self._write_status(deployment, status)
        if status is not None:
            self._record(deployment, status)
        if not succeeded:
            self.queue.retry(key)
        return succeeded

    def _forget(self, key: Key) -> None:
        """The LLMDeployment is gone."""
        self.queue.forget(key)
        for memory in (self._applier.rejected_writes, self._applier.contests, self._pod_events, self.claims):
            memory.forget(key)
        self.metrics.record(key, None)

    async def _claim(self, key: Key, body: Json) -> Json | None:
        """The LLMDeployment once it is ours; None: another operator serves it. Raises TRANSPORT_ERRORS and ApiError."""
        operator, ours = claimant(body), self.claims.ours
        if operator == ours or not self.claims.are_supported:
            self.claims.others.pop(key, None)
            return body
        deployment = parse(body)
        if operator is not None and await self.claims.is_valid(operator, body):
            self.queue.add_after(key, _CLAIM_CHECK_SECONDS)
            self.metrics.record(key, None)
            if self.claims.others.get(key) != operator:
                self.claims.others[key] = operator
                text = f"operator {operator} serves it, so operator {ours} ignores it"
                logger.warning("%s/%s: %s", *key, text)
                await self._applier.post(deployment, Event("Warning", "ServedByAnother", text))
            return None
        try:
            claimed = await self._applier.claim(body, ours)
        except ApiError as error:
            if not error.is_unknown_field:
                raise
            self.claims.mark_unsupported()
            logger.error("the CRD of LLMDeployment is older than this operator and lacks status.operator; "
                         "install the CustomResourceDefinition of this version")  # fmt: skip
            return body
        if operator is not None:
            logger.warning("%s/%s: taken over from operator %s, which no longer serves it", *key, operator)
        self.claims.forget(key)
        return claimed

    def _compute(self, deployment: LLMDeployment, pod_events: Events, problem: Problem | None = None) -> Outcome:
        key = (deployment.namespace, deployment.name)
        return reconcile(
            deployment, self.store.children(key), self._config, self._apis, time.time(), problem,
            self.scaling(deployment), self._image_rollout.turn(deployment), self._applier.contests.problem(key),
            pod_events,
        )  # fmt: skip

    def _record(self, deployment: LLMDeployment | InvalidLLMDeployment, status: Json) -> None:
        key = (deployment.namespace, deployment.name)
        pods = [one.body for one in self.store.children(key) if one.kind == "Pod"]
        self.metrics.record(key, Snapshot.of(deployment, status, pods))

    async def _execute(self, deployment: LLMDeployment, plan: Plan) -> tuple[Problem | None, bool]:
        """The cause to report, and whether to retry in any case."""
        key = (deployment.namespace, deployment.name)
        transient = False
        try:
            errors = await self._applier.execute(deployment, plan)
            transient = any(is_transient(one) for one in errors)
        except TRANSPORT_ERRORS:
            transient = True
        except ApiError as error:
            if error.is_namespace_terminating:
                return None, False
            transient = True
        reported = self._applier.rejected_writes.error_to_report(key)
        return rejection(reported) if reported else None, transient

    async def _write_status(self, deployment: LLMDeployment | InvalidLLMDeployment, status: Json) -> bool:
        """False: it is to be retried."""
        before = deployment.status
        if claimant({"status": before}) == self.claims.ours:  # otherwise the CRD lacks the field
            status = {**status, "operator": self.claims.ours}
        if status == before:
            return True
        try:
            await self._applier.write_status(deployment, status)
        except TRANSPORT_ERRORS:
            return False
        except ApiError as error:
            if error.status != 404:
                logger.warning("%s/%s: status rejected: %s", deployment.namespace, deployment.name, error.message)
            return not error.is_transient
        for event in events(before, status):
            await self._applier.post(deployment, event)
        return True
