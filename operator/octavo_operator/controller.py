"""The loop: whatever happens to an LLMDeployment or its children leads to one `look` at the whole of it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from octavo_operator.api import KIND, LLMDeployment, Unreadable
from octavo_operator.apply import Applier, Leaving, NameTaken, NotLeading
from octavo_operator.autoscaling.condition import Scaling
from octavo_operator.cluster import RESOURCES, TRANSPORT_ERRORS, ApiError, Cluster
from octavo_operator.config import OperatorConfig
from octavo_operator.diagnosis import Problem
from octavo_operator.image_rollout import ImageRollout
from octavo_operator.lease import LeaseHolder
from octavo_operator.metrics import Metrics, Snapshot
from octavo_operator.plan import CHILD_KINDS, Plan
from octavo_operator.reconcile import Outcome, look, look_at_unreadable, parse
from octavo_operator.status import Event, events
from octavo_operator.store import Key, Observed, Store
from octavo_operator.workqueue import WorkQueue

logger = logging.getLogger("octavo.operator")

WATCHED = (KIND, *CHILD_KINDS, "Pod")
OPTIONAL = ("PodMonitor", "ServiceMonitor", "ScaledObject")

_LEASE_WAIT_SECONDS = 1.0

Json = dict[str, Any]


class Controller:
    def __init__(self, cluster: Cluster, config: OperatorConfig, lease: LeaseHolder) -> None:
        self.store = Store()
        self.queue: WorkQueue[Key] = WorkQueue()
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
            self.queue.forget(key)
            self._applier.refusals.forget(key)
            self.metrics.looked(key, None)
            return True
        body = seen.body
        deployment = parse(body)
        if isinstance(deployment, Unreadable):
            said = look_at_unreadable(deployment, self.store.children(key), time.time()).status
            succeeded = said is None or await self._say(deployment, said)
            if said is not None:
                self._note(deployment, said)
            if not succeeded:
                self.queue.retry(key)
            return succeeded
        outcome = self._look(deployment)
        problem, transient = None, False
        if outcome.plan.actions:
            problem, transient = await self._do(deployment, outcome.plan)
            # Say how it stands by what is there now, the answers to our own writes included.
            outcome = self._look(deployment, problem)
        if outcome.status is not None and not await self._say(deployment, outcome.status):
            transient = True
        if outcome.status is not None:
            self._note(deployment, outcome.status)
        if transient:
            delay = self.queue.retry(key)
            logger.debug("%s/%s: again in %.1f s", *key, delay)
        else:
            self.queue.succeeded(key)
        for seconds in (outcome.again_after, self._applier.refusals.due_after(key)):
            if seconds is not None:
                self.queue.add_after(key, seconds)
        return not (problem or transient)

    def _look(self, deployment: LLMDeployment, problem: Problem | None = None) -> Outcome:
        children = self.store.children((deployment.namespace, deployment.name))
        scaling = self.scaling(deployment)
        turn = self._image_rollout.turn(deployment)
        return look(deployment, children, self._config, self._apis, time.time(), problem, scaling, turn)

    def _note(self, deployment: LLMDeployment | Unreadable, status: Json) -> None:
        key = (deployment.namespace, deployment.name)
        pods = [one.body for one in self.store.children(key) if one.kind == "Pod"]
        self.metrics.looked(key, Snapshot.of(deployment, status, pods))

    async def _do(self, deployment: LLMDeployment, todo: Plan) -> tuple[Problem | None, bool]:
        """Carries the plan out. What a user can mend, and whether to try again in any case."""
        where = (deployment.namespace, deployment.name)
        try:
            refused = await self._applier.execute(deployment, todo)
        except TRANSPORT_ERRORS as error:
            logger.warning("%s/%s: the API server is out of reach: %r", *where, error)
            return None, True
        except ApiError as error:
            logger.warning("%s/%s: not done for now: %s", *where, error)
            return None, not error.is_namespace_leaving
        final = [one for one in refused if not isinstance(one, Leaving)]
        return refusal(final[0]) if final else None, len(final) < len(refused)

    async def _say(self, deployment: LLMDeployment | Unreadable, status: Json) -> bool:
        before = deployment.status
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


def refusal(error: ApiError | NameTaken) -> Problem:
    """What a user is told when an object cannot be made."""
    if isinstance(error, NameTaken):
        return Problem(
            "NameConflict", f"{error} belongs to somebody else; delete it or choose another name for the {KIND}"
        )
    if "exceeded quota" in error.message:
        return Problem("QuotaExceeded", f"the namespace's quota leaves no room: {error.message}")
    if error.status == 403:
        return Problem(
            "Forbidden", f"the operator lacks a right (see the chart's RBAC), or a policy forbids it: {error.message}"
        )
    return Problem("Refused", f"the API server refuses an object made of this spec; correct the spec: {error.message}")


__all__ = ["Controller", "Event", "refusal"]
