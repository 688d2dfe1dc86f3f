"""Scrapes the load of the pods: concurrently, with limits on time and size, and no more often than useful.

A faulty pod harms no other: an endless page, a malformed one or no response costs its timeout and makes the decision
conservative (decision.py). Concurrent requests share one scrape.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from octavo_operator.api import KIND, LLMDeployment
from octavo_operator.autoscaling.decision import Decision, decide, estimate_capacity, rounded_capacity, update_capacity
from octavo_operator.autoscaling.metrics_page import MAX_BYTES, Load, engine_start, parse
from octavo_operator.claims.own_deployments import OwnDeployments
from octavo_operator.groups.scheduling import num_held
from octavo_operator.kube.pod_client import PodClient, PodUnreadableError
from octavo_operator.kube.store import Key, Store
from octavo_operator.observed.children import pods_of
from octavo_operator.observed.diagnosis import Problem, diagnose, is_finished
from octavo_operator.observed.pod_starts import EngineStart
from octavo_operator.observed.workload import live_of
from octavo_operator.render import names

logger = logging.getLogger("octavo.operator.autoscaling")

Json = dict[str, Any]

TIMEOUT_SECONDS = 2.0  # of one pod
CACHE_SECONDS = 1.0  # of a decision
RECHECK_SECONDS = 0.25  # before scaling up: requests may have waited for one step only
REPORT_AFTER_SECONDS = 5.0  # of failing scrapes of a pod
IDLE_INTERVAL_SECONDS = 20.0  # of scrapes for the status while no autoscaler asks


class MetricUnavailableError(Exception):
    """The load is unknown. `problem`: why."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


@dataclass(frozen=True)
class ScrapeTarget:
    """A pod to scrape."""

    uid: str
    name: str
    url: str | None  # None: it has no address yet
    ready: bool


@dataclass
class _Memory:
    """State of one LLMDeployment between scrapes."""

    capacity: float | None = None
    failing_since: dict[str, float] = field(default_factory=dict)  # uids of pods
    read_at: float = -1e9
    decision: Decision | None = None
    problem: Problem | None = None
    running: asyncio.Task[Decision] | None = None


class LoadReader:
    """Decisions by LLMDeployment. `changed` is called with a key when the status must change: its `problem` or rounded
    `capacity` is another one, or its load begins or ceases to need more than maxReplicas."""

    def __init__(
        self,
        store: Store,
        changed: Callable[[Key], None],
        clock: Callable[[], float] = time.monotonic,
        operator: str | None = None,
    ) -> None:
        """`operator`: our name in claims; LLMDeployments of other operators are left out. None: there are none."""
        self._store, self._changed, self._clock = store, changed, clock
        self._memory: dict[Key, _Memory] = {}
        self._client = PodClient(TIMEOUT_SECONDS, MAX_BYTES)
        self._deployments = OwnDeployments(store, "autoscaling", operator)

    def deployment(self, key: Key) -> LLMDeployment | None:
        """The LLMDeployment if it has spec.autoscaling and is ours."""
        return self._deployments.get(key)

    def scaled(self) -> list[LLMDeployment]:
        """All LLMDeployments with spec.autoscaling that are ours."""
        return list(self._deployments.all().values())

    def problem(self, key: Key) -> Problem | None:
        """The problem of the last scrape."""
        memory = self._memory.get(key)
        return memory.problem if memory else None

    def capacity(self, key: Key) -> float | None:
        """Return how many requests a replica handles at once, as observed."""
        memory = self._memory.get(key)
        return memory.capacity if memory else None

    def needed(self, key: Key) -> int | None:
        """Return how many replicas the load of the last scrape needs; None: unknown."""
        memory = self._memory.get(key)
        return memory.decision.needed if memory and memory.decision else None

    def decisions(self) -> dict[Key, Decision]:
        """The last decisions, for the metrics."""
        return {key: memory.decision for key, memory in list(self._memory.items()) if memory.decision}

    async def read(self, key: Key) -> Decision:
        """A decision at most CACHE_SECONDS old. Raises MetricUnavailableError."""
        memory = self._memory.setdefault(key, _Memory())
        if memory.running is None:
            if memory.decision and self._clock() - memory.read_at < CACHE_SECONDS:
                return memory.decision
            memory.running = asyncio.create_task(self._read(key, memory))
            memory.running.add_done_callback(lambda task: self._finished(memory, task))
        return await asyncio.shield(memory.running)

    async def read_start(self, pod: Json) -> EngineStart:
        """The start of the engine of a pod, as its page tells it; nothing where that cannot be read."""
        url = metrics_url(pod)
        try:
            return engine_start(await self._fetch(url)) if url else EngineStart()
        except ValueError:
            return EngineStart()

    async def run(self, leading: asyncio.Event) -> None:
        """Scrapes what no autoscaler has asked for lately. Until cancelled."""
        while True:
            await leading.wait()
            keys = [(one.namespace, one.name) for one in self.scaled()]
            for gone in self._memory.keys() - set(keys):
                if self._memory[gone].running is None:
                    del self._memory[gone]
            now = self._clock()
            due = [key for key in keys if now - self._memory.get(key, _Memory()).read_at > IDLE_INTERVAL_SECONDS]
            await asyncio.gather(*(self.read(key) for key in due), return_exceptions=True)
            await asyncio.sleep(1)

    async def close(self) -> None:
        """Cancels scrapes and closes connections."""
        for memory in self._memory.values():
            if memory.running:
                memory.running.cancel()
        await self._client.close()

    def _finished(self, memory: _Memory, task: asyncio.Task[Decision]) -> None:
        memory.running = None
        if not task.cancelled():
            task.exception()  # mark it as retrieved: it may have no awaiter

    async def _read(self, key: Key, memory: _Memory) -> Decision:
        before, deployment = (memory.problem, self._exceeds(key)), self.deployment(key)
        recorded = deployment.status.get("replicaCapacity") if deployment else None
        try:
            if deployment is None:
                raise MetricUnavailableError(Problem("NotFound", f"there is no {KIND} {key[1]} with spec.autoscaling"))
            if memory.capacity is None:
                memory.capacity = recorded  # by an earlier operator
            decision, loads = await self._scrape(deployment, memory)
            if decision.needed > deployment.replicas:
                # Requests that have just arrived wait for one step of the engine, which needs no other replica.
                await asyncio.sleep(RECHECK_SECONDS)
                again, loads_again = await self._scrape(deployment, memory)
                if again.needed <= decision.needed:
                    decision, loads = again, loads_again
            memory.capacity = update_capacity(memory.capacity, loads)
            memory.decision, memory.read_at = decision, self._clock()
            return decision
        except MetricUnavailableError:
            memory.decision, memory.read_at = None, self._clock()
            raise
        finally:
            if (memory.problem, self._exceeds(key)) != before or rounded_capacity(
                recorded, memory.capacity
            ) != recorded:
                self._changed(key)

    def _exceeds(self, key: Key) -> bool:
        """True if the load needs more than maxReplicas."""
        deployment, needed = self.deployment(key), self.needed(key)
        limits = deployment.spec.autoscaling if deployment else None
        return limits is not None and needed is not None and needed > limits.max_replicas

    async def _scrape(self, deployment: LLMDeployment, memory: _Memory) -> tuple[Decision, list[Load]]:
        autoscaling = deployment.spec.autoscaling
        assert autoscaling is not None
        children = self._store.children((deployment.namespace, deployment.name))
        live = live_of(deployment.name, children, deployment.spec.parallelism.nodes > 1)
        targets, complete = scrape_targets(deployment, pods_of(children), live)
        answers = await asyncio.gather(*(self._scrape_pod(target) for target in targets))
        loads = [answer for answer in answers if isinstance(answer, Load)]
        failed = [
            (target, str(answer))
            for target, answer in zip(targets, answers, strict=True)
            if isinstance(answer, Exception)
        ]
        memory.problem = self._lasting_problem(memory, failed, len(targets))
        if failed and not loads and all(target.ready for target, _ in failed):
            raise MetricUnavailableError(memory.problem or _unreadable(failed, len(targets)))
        one = update_capacity(memory.capacity, loads) or estimate_capacity(loads, deployment.spec.engine.max_num_seqs)
        per_replica = autoscaling.queue_depth.target_per_replica
        unsure = not complete or bool(failed) or not loads or deployment.spec.suspend
        return decide(deployment.scaled_replicas, per_replica, loads, one, unsure=unsure), loads

    def _lasting_problem(self, memory: _Memory, failed: list[tuple[ScrapeTarget, str]], count: int) -> Problem | None:
        """A loading pod does not answer yet, and a ready one may fail for a moment: neither is a problem."""
        now = self._clock()
        serving = [(target, why) for target, why in failed if target.ready]
        memory.failing_since = {target.uid: memory.failing_since.get(target.uid, now) for target, _ in serving}
        lasting = [one for one in serving if now - memory.failing_since[one[0].uid] >= REPORT_AFTER_SECONDS]
        return _unreadable(lasting, count) if lasting else None

    async def _scrape_pod(self, target: ScrapeTarget) -> Load | Exception:
        if target.url is None:
            return PodUnreadableError("it has no IP address yet")
        try:
            return parse(await self._fetch(target.url))
        except ValueError as error:
            return error

    async def _fetch(self, url: str) -> bytes:
        return await self._client.call(url)


def scrape_targets(deployment: LLMDeployment, pods: list[Json], live: Json | None) -> tuple[list[ScrapeTarget], bool]:
    """The pods to scrape, and whether their load is the whole demand. Pure.

    Terminating pods finish their requests, which add no demand to the others. Pods that cannot run (no node, no image,
    a crash) have no requests. All others may have some.
    """
    out, complete, staying = [], True, 0
    gpu = deployment.spec.accelerator.resource if deployment.spec.accelerator else None
    for pod in pods:
        status = pod.get("status") or {}
        if "deletionTimestamp" in pod["metadata"] or is_finished(pod):
            continue
        staying += 1
        ready = any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions") or [])
        if not ready and diagnose(pod, gpu) is not None:
            continue
        if not ready:
            complete = False
        out.append(ScrapeTarget(pod["metadata"]["uid"], pod["metadata"]["name"], metrics_url(pod), ready))
    conditions = ((live or {}).get("status") or {}).get("conditions") or []
    not_created = any(c["type"] == "ReplicaFailure" and c["status"] == "True" for c in conditions)
    if staying < deployment.replicas - num_held(live) and not not_created:
        complete = False  # a pod is missing, and its requests may be anywhere
    return out, complete


def metrics_url(pod: Json) -> str | None:
    """Return the URL of a pod's metrics; None if the pod has no address yet."""
    url = management_url(pod)
    return f"{url}/metrics" if url else None


def management_url(pod: Json) -> str | None:
    """Return the URL of a pod's management port; None if the pod has no address yet."""
    address = (pod.get("status") or {}).get("podIP")
    host = f"[{address}]" if address and ":" in address else address
    return f"http://{host}:{_management_port(pod)}" if host else None


def _management_port(pod: Json) -> int:
    for container in pod["spec"].get("containers") or []:
        for port in container.get("ports") or []:
            if port.get("name") == "management":
                return int(port["containerPort"])
    return names.MANAGEMENT_PORT


def _unreadable(failed: list[tuple[ScrapeTarget, str]], count: int) -> Problem:
    target, why = failed[0]
    return Problem(
        "PodMetricsUnavailable",
        f"metrics of {len(failed)} of {count} pods cannot be read, so no replica is removed; {target.name}: "
        f"{why}. See its logs, and whether a NetworkPolicy keeps the operator from the management port",
    )
