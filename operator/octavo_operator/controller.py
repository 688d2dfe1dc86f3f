"""The loop: whatever happens to an LLMDeployment or its children leads to one `look` at the whole of it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from octavo_operator.api import KIND, LLMDeployment, Unreadable
from octavo_operator.apply import Applier, NotLeading
from octavo_operator.autoscaling.condition import Scaling
from octavo_operator.claims import Claims, claimant
from octavo_operator.config import OperatorConfig
from octavo_operator.diagnosis import Events, Problem
from octavo_operator.image_rollout import ImageRollout
from octavo_operator.kube.client import RESOURCES, TRANSPORT_ERRORS, ApiError, Cluster
from octavo_operator.kube.lease import LeaseHolder
from octavo_operator.kube.store import Key, Observed, Store
from octavo_operator.kube.workqueue import WorkQueue
from octavo_operator.metrics import Metrics, Snapshot
from octavo_operator.plan import CHILD_KINDS, Plan
from octavo_operator.pod_events import PodEvents
from octavo_operator.reconcile import Outcome, look, look_at_unreadable, parse
from octavo_operator.rejections import is_passing, rejection
from octavo_operator.status import Event, events

logger = logging.getLogger("octavo.operator")

WATCHED = (KIND, *CHILD_KINDS, "Pod")
OPTIONAL = ("PodMonitor", "ServiceMonitor", "ScaledObject")

_LEASE_WAIT_SECONDS = 1.0
_CLAIM_SECONDS = 10.0  # how often it is looked at whether another operator still serves what it has claimed

Json = dict[str, Any]


class Controller:
    def __init__(self, cluster: Cluster, config: OperatorConfig, lease: LeaseHolder) -> None:
        self.store = Store()
        self.queue: WorkQueue[Key] = WorkQueue(longest_delay=30.0)
        self.claims = Claims(cluster, config, time.monotonic)
        self._pod_events = PodEvents(cluster)
        self._config, self._lease = config, lease
        self._applier = Applier(cluster, self.store, lambda: lease.is_held)
        self._image_rollout = ImageRollout(self.store, config, time.monotonic)
        self._apis: frozenset[str] = frozenset()
        self.listed_at: float | None = None
        self.knows_all = asyncio.Event()
        self.metrics = Metrics(self, config.resync_seconds)
        cluster.on_answer = self.metrics.answered
        self.scaling: Callable[[LLMDeployment], Scaling] = lambda _: Scaling()  # set by who knows

    # What the watches tell.

    def saw(self, kind: str, body: Any) -> None:
        """A watch told of an object, new or changed."""
        self.metrics.watched(kind)
        if self.store.knows(kind, body):
            return
        if key := self.store.put(Observed.of(kind, RESOURCES[kind].api_version, body)):
            self.queue.add(key)

    def lost(self, kind: str, namespace: str, name: str, uid: str, version: str) -> None:
        """A watch told that an object is gone, or no longer ours."""
        self.metrics.watched(kind)
        if key := self.store.drop(kind, namespace, name, uid, version):
            self.queue.add(key)

    # What watching.py finds besides.

    def use(self, kinds: frozenset[str]) -> None:
        """These optional kinds the cluster has."""
        self._apis = kinds
        for key in self.store.deployments():
            self.queue.add(key)

    def listed(self, kind: str, changed: set[Key]) -> None:
        """All objects of a kind were listed, and that was news about these LLMDeployments."""
        if changed and self.listed_at is not None:
            self.metrics.missed(kind, len(changed))
        for key in changed:
            self.queue.add(key)

    def listed_all(self) -> None:
        self.listed_at = time.monotonic()
        self.knows_all.set()
        self.metrics.listed(succeeded=True)

    @property
    def listed_seconds_ago(self) -> float | None:
        return None if self.listed_at is None else time.monotonic() - self.listed_at

    @property
    def is_leading(self) -> bool:
        return self._lease.leading.is_set()

    # The work.

    async def work(self) -> None:
        """One worker; several of them may run. Nothing is done before everything is known."""
        await self.knows_all.wait()
        await self._lease.leading.wait()
        while True:
            key = await self.queue.get()
            began = time.monotonic()
            try:
                if not self._lease.is_held:
                    raise NotLeading
                succeeded = await self._look_at(key)
                self.metrics.reconciled("done" if succeeded else "retried", time.monotonic() - began)
            except NotLeading:
                # The Lease may be stale for a moment only (the process was frozen): renewed, it is ours again, and
                # what was to be done still is. If it is lost, the process ends.
                self.queue.add_after(key, _LEASE_WAIT_SECONDS)
            except Exception:
                logger.exception("%s/%s: a defect of the operator", *key)
                self.metrics.reconciled("failed", time.monotonic() - began)
                self.queue.retry(key)
            finally:
                self.queue.done(key)

    async def _look_at(self, key: Key) -> bool:
        """False: it has to be tried again."""
        seen = self.store.get(KIND, *key)
        if seen is None:
            self._forget(key)
            return True
        try:
            body = await self._claimed(key, seen.body)
        except (*TRANSPORT_ERRORS, ApiError) as error:
            logger.warning("%s/%s: cannot be claimed for now: %s", *key, str(error) or type(error).__name__)
            self.queue.retry(key)
            return False
        if body is None:
            return True
        deployment = parse(body)
        if isinstance(deployment, Unreadable):
            said = look_at_unreadable(deployment, self.store.children(key), time.time()).status
            succeeded = said is None or await self._say(deployment, said)
            if said is not None:
                self._note(deployment, said)
            if not succeeded:
                self.queue.retry(key)
            return succeeded
        pods = [one.body for one in self.store.children(key) if one.kind == "Pod"]
        pod_events, events_again = await self._pod_events.read(key, pods, time.time())
        outcome = self._look(deployment, pod_events)
        problem, transient = await self._do(deployment, outcome.plan)
        if outcome.plan.actions:
            # Say how it stands by what is there now, the answers to our own writes included.
            outcome = self._look(deployment, pod_events, problem)
        if outcome.status is not None and not await self._say(deployment, outcome.status):
            transient = True
        if outcome.status is not None:
            self._note(deployment, outcome.status)
        if transient:
            delay = self.queue.retry(key)
            logger.debug("%s/%s: again in %.1f s", *key, delay)
        else:
            self.queue.succeeded(key)
        applier = self._applier
        for seconds in (
            outcome.again_after, events_again, applier.refusals.due_after(key), applier.contests.due_after(key),
        ):  # fmt: skip
            if seconds is not None:
                self.queue.add_after(key, seconds)
        return not (problem or transient)

    def _forget(self, key: Key) -> None:
        """It is gone."""
        self.queue.forget(key)
        for memory in (self._applier.refusals, self._applier.contests, self._pod_events, self.claims):
            memory.forget(key)
        self.metrics.looked(key, None)

    async def _claimed(self, key: Key, body: Json) -> Json | None:
        """The LLMDeployment as it is once it is ours; None: another operator serves it. Raises TRANSPORT_ERRORS and
        ApiError."""
        operator, ours = claimant(body), self.claims.ours
        if operator == ours or not self.claims.are_kept:
            self.claims.others.pop(key, None)
            return body
        deployment = parse(body)
        if operator is not None and await self.claims.holds(operator, body):
            self.queue.add_after(key, _CLAIM_SECONDS)
            self.metrics.looked(key, None)
            if self.claims.others.get(key) != operator:
                self.claims.others[key] = operator
                text = f"operator {operator} serves it, so operator {ours} leaves it alone"
                logger.warning("%s/%s: %s", *key, text)
                await self._applier.post(deployment, Event("Warning", "ServedByAnother", text))
            return None
        try:
            claimed = await self._applier.claim(body, ours)
        except ApiError as error:
            if not error.is_unknown_field:
                raise
            self.claims.are_not_kept()
            logger.error("the kind LLMDeployment is older than this operator, so it cannot be said who serves what; "
                         "install the CustomResourceDefinition of this version")  # fmt: skip
            return body
        if operator is not None:
            logger.warning("%s/%s: taken over from operator %s, which does not serve it any more", *key, operator)
        self.claims.forget(key)
        return claimed

    def _look(self, deployment: LLMDeployment, pod_events: Events, problem: Problem | None = None) -> Outcome:
        key = (deployment.namespace, deployment.name)
        return look(
            deployment, self.store.children(key), self._config, self._apis, time.time(), problem,
            self.scaling(deployment), self._image_rollout.turn(deployment), self._applier.contests.problem(key),
            pod_events,
        )  # fmt: skip

    def _note(self, deployment: LLMDeployment | Unreadable, status: Json) -> None:
        key = (deployment.namespace, deployment.name)
        pods = [one.body for one in self.store.children(key) if one.kind == "Pod"]
        self.metrics.looked(key, Snapshot.of(deployment, status, pods))

    async def _do(self, deployment: LLMDeployment, todo: Plan) -> tuple[Problem | None, bool]:
        """Carries the plan out. What users are to be told of, and whether to try again in any case."""
        key = (deployment.namespace, deployment.name)
        transient = False
        try:
            refused = await self._applier.execute(deployment, todo)
            transient = any(is_passing(one) for one in refused)
        except TRANSPORT_ERRORS:
            transient = True
        except ApiError as error:
            if error.is_namespace_leaving:
                return None, False
            transient = True
        told = self._applier.refusals.to_tell(key)
        return rejection(told) if told else None, transient

    async def _say(self, deployment: LLMDeployment | Unreadable, status: Json) -> bool:
        before = deployment.status
        if claimant({"status": before}) == self.claims.ours:  # or there is no field for it
            status = {**status, "operator": self.claims.ours}
        if status == before:
            return True
        try:
            await self._applier.write_status(deployment, status)
        except TRANSPORT_ERRORS:
            return False
        except ApiError as error:
            if error.status != 404:
                logger.warning(
                    "%s/%s: the status was refused: %s", deployment.namespace, deployment.name, error.message
                )
            return not error.is_transient
        for event in events(before, status):
            await self._applier.post(deployment, event)
        return True


__all__ = ["Controller", "Event"]
