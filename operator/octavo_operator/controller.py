"""The loop: whatever happens to an LLMDeployment or its children leads to one `look` at the whole of it."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from octavo_operator.api import KIND, LLMDeployment
from octavo_operator.apply import Applier, Leaving, NameTaken
from octavo_operator.cluster import RESOURCES, TRANSPORT_ERRORS, ApiError, Cluster
from octavo_operator.config import OperatorConfig
from octavo_operator.diagnosis import Problem
from octavo_operator.metrics import Metrics, Snapshot
from octavo_operator.plan import CHILD_KINDS
from octavo_operator.reconcile import Outcome, look, parse
from octavo_operator.render import MONITORING_API
from octavo_operator.render.names import OWNER_LABEL
from octavo_operator.status import Event, events
from octavo_operator.store import Key, Observed, Store
from octavo_operator.workqueue import WorkQueue

logger = logging.getLogger("octavo.operator")

WATCHED = (KIND, *CHILD_KINDS, "Pod")
OPTIONAL = ("PodMonitor", "ServiceMonitor")

Json = dict[str, Any]


class Controller:
    def __init__(self, cluster: Cluster, config: OperatorConfig, leading: asyncio.Event) -> None:
        self.store = Store()
        self.queue: WorkQueue[Key] = WorkQueue()
        self._cluster, self._config, self._leading = cluster, config, leading
        self._applier = Applier(cluster, self.store)
        self._apis: frozenset[str] = frozenset()
        self._listed_at: float | None = None
        self.metrics = Metrics(self, config.resync_seconds)
        cluster.on_answer = self.metrics.answered

    # What the watches tell.

    def saw(self, kind: str, body: Any) -> None:
        """A watch told of an object, new or changed."""
        self.metrics.watched(kind)
        if key := self.store.put(Observed.of(kind, RESOURCES[kind].api_version, body)):
            self.queue.add(key)

    def lost(self, kind: str, namespace: str, name: str, uid: str) -> None:
        """A watch told that an object is gone, or no longer ours."""
        self.metrics.watched(kind)
        if key := self.store.drop(kind, namespace, name, uid):
            self.queue.add(key)

    # What we find ourselves: watches can miss things, so now and then everything is listed.

    async def list_all(self) -> None:
        apis = {MONITORING_API} if await self._cluster.has_api(MONITORING_API) else set()
        if apis != self._apis and self._listed_at is not None:
            for key in self.store.deployments():
                self.queue.add(key)
        self._apis = frozenset(apis)
        for kind in WATCHED:
            if kind in OPTIONAL and not apis:
                continue
            selector = self._config.selector if kind == KIND else OWNER_LABEL
            found: list[Observed] = []
            known_before = self.store.places(kind)
            for namespace in self._config.watch_namespaces or (None,):
                for body in await self._cluster.list(kind, namespace, selector):
                    found.append(Observed.of(kind, RESOURCES[kind].api_version, body))
            changed = self.store.replace(found, known_before)
            if changed and self._listed_at is not None:
                self.metrics.missed(kind, len(changed))
            for key in changed:
                self.queue.add(key)
        self._listed_at = time.monotonic()
        self.metrics.listed(succeeded=True)

    async def keep_listing(self) -> None:
        while True:
            await asyncio.sleep(self._config.resync_seconds)
            try:
                await self.list_all()
            except (*TRANSPORT_ERRORS, ApiError) as error:
                self.metrics.listed(succeeded=False)
                logger.warning("listing everything failed: %s", error)

    @property
    def listed_seconds_ago(self) -> float | None:
        return None if self._listed_at is None else time.monotonic() - self._listed_at

    @property
    def is_leading(self) -> bool:
        return self._leading.is_set()

    # The work.

    async def work(self) -> None:
        """One worker; several of them may run."""
        await self._leading.wait()
        while True:
            key = await self.queue.get()
            began = time.monotonic()
            try:
                if self._leading.is_set():
                    succeeded = await self._look_at(key)
                    self.metrics.reconciled("done" if succeeded else "retried", time.monotonic() - began)
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
            self.metrics.looked(key, None)
            return True
        body = seen.body
        deployment = parse(body)
        if isinstance(deployment, Problem):
            logger.error("%s/%s: %s", *key, deployment.message)
            return True
        problem, transient = await self._do(deployment)
        # Say how it stands by what is there now, the answers to our own writes included.
        outcome = self._look(deployment, problem)
        if outcome.status is not None and not await self._say(deployment, outcome.status):
            transient = True
        if outcome.status is not None:
            pods = [one.body for one in self.store.children(key) if one.kind == "Pod"]
            self.metrics.looked(key, Snapshot.of(deployment, outcome.status, pods))
        if problem or transient:
            delay = self.queue.retry(key)
            logger.debug("%s/%s: again in %.1f s", *key, delay)
        else:
            self.queue.succeeded(key)
        if outcome.again_after is not None:
            self.queue.add_after(key, outcome.again_after)
        return not (problem or transient)

    def _look(self, deployment: LLMDeployment, problem: Problem | None = None) -> Outcome:
        children = self.store.children((deployment.namespace, deployment.name))
        return look(deployment, children, self._config, self._apis, time.time(), problem)

    async def _do(self, deployment: LLMDeployment) -> tuple[Problem | None, bool]:
        """Carries the plan out. What a user can mend, and whether to try again in any case."""
        outcome = self._look(deployment)
        try:
            await self._applier.execute(deployment, outcome.plan)
        except NameTaken as error:
            text = f"{error} belongs to somebody else; delete it or choose another name for the {KIND}"
            return Problem("NameConflict", text), False
        except Leaving:
            return None, True
        except TRANSPORT_ERRORS as error:
            logger.warning("%s/%s: the API server is out of reach: %r", deployment.namespace, deployment.name, error)
            return None, True
        except ApiError as error:
            if error.is_namespace_leaving:
                return None, False
            if error.is_transient:
                return None, True
            logger.warning("%s/%s: refused: %s", deployment.namespace, deployment.name, error.message)
            return refusal(error), False
        return None, False

    async def _say(self, deployment: LLMDeployment, status: Json) -> bool:
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


def refusal(error: ApiError) -> Problem:
    """What a user is told when the API server refuses an object."""
    if "exceeded quota" in error.message:
        return Problem("QuotaExceeded", f"the namespace's quota leaves no room: {error.message}")
    if error.status == 403:
        return Problem(
            "Forbidden", f"the operator lacks a right (see the chart's RBAC), or a policy forbids it: {error.message}"
        )
    return Problem("Refused", f"the API server refuses an object made of this spec; correct the spec: {error.message}")


__all__ = ["Controller", "Event", "refusal"]
