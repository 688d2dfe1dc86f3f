"""What the operator says of itself and of its LLMDeployments to Prometheus, at /metrics.

Labels are bounded: an LLMDeployment's name, its pods, and words of our own. Only the operator that leads speaks of
LLMDeployments, so nothing is counted twice where several run. Scrape it with honorLabels: `namespace` is the
LLMDeployment's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo_operator import __version__
from octavo_operator.api import LLMDeployment, Unreadable
from octavo_operator.autoscaling.decision import Decision
from octavo_operator.kube.store import Key
from octavo_operator.times import parse_time

if TYPE_CHECKING:
    from octavo_operator.controller import Controller

RESULTS = ("done", "retried", "failed")  # carried out; to be tried again; a defect of the operator
COUNTS = {
    "current": "replicas",
    "ready": "readyReplicas",
    "available": "availableReplicas",
    "updated": "updatedReplicas",
}
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

Json = dict[str, Any]


@dataclass(frozen=True)
class Snapshot:
    """One LLMDeployment as it was when it was last looked at."""

    desired: int
    status: Json
    limits: tuple[int, int] | None  # of its autoscaling, least and most replicas
    restarts: tuple[tuple[str, int], ...]  # of its pods, by name

    @classmethod
    def of(cls, deployment: LLMDeployment | Unreadable, status: Json, pods: list[Json]) -> Snapshot:
        restarts = tuple((pod["metadata"]["name"], _restarts(pod)) for pod in pods)
        if isinstance(deployment, Unreadable):  # whatever it may want, what runs goes on running
            return cls(status["replicas"], status, None, restarts)
        autoscaling = deployment.spec.autoscaling
        limits = (autoscaling.min_replicas, autoscaling.max_replicas) if autoscaling else None
        return cls(deployment.replicas, status, limits, restarts)


def _restarts(pod: Json) -> int:
    status = pod.get("status") or {}
    kinds = ("initContainerStatuses", "containerStatuses")
    return sum(one.get("restartCount", 0) for kind in kinds for one in status.get(kind) or [])


class Metrics:
    """The instruments. `expose` may be called by any thread, all else belongs to the event loop."""

    def __init__(self, controller: Controller, resync_seconds: float) -> None:
        disable_created_metrics()
        self.registry = CollectorRegistry()
        self.deployments: dict[Key, Snapshot] = {}
        ProcessCollector(registry=self.registry)
        count = self._counter
        self._reconciles = count("octavo_operator_reconciles", "Looks at an LLMDeployment, by how they ended", "result")
        for result in RESULTS:
            self._reconciles.labels(result)
        self._seconds = Histogram(
            "octavo_operator_reconcile_seconds", "Duration of a look", buckets=_SECONDS, registry=self.registry
        )
        self._calls = count("octavo_operator_api_requests", "Requests to the API server", "method", "code")
        self._events = count("octavo_operator_watch_events", "What watches told of", "kind")
        self._missed = count(
            "octavo_operator_missed_changes", "Changes that a listing found and no watch had told of", "kind"
        )
        self._listings = count("octavo_operator_listings", "Complete listings, by how they ended", "result")
        for result in ("done", "failed"):
            self._listings.labels(result)
        self._state = _OperatorState(controller, resync_seconds)
        self.registry.register(self._state)
        self._fleet = _Deployments(self.deployments)
        self.registry.register(self._fleet)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def watch_silence(self, read: Callable[[], float], limit: float) -> None:
        """``read()``: seconds for which the most silent watch has been silent; more than `limit` is too long."""
        self._state.silence, self._state.silence_limit = read, limit

    def watch_decisions(self, read: Callable[[], dict[Key, Decision]]) -> None:
        """``read()``: what autoscaling has found out last."""
        self._fleet.decisions = read

    # What happened.

    def reconciled(self, result: str, seconds: float) -> None:
        self._reconciles.labels(result).inc()
        self._seconds.observe(seconds)

    def looked(self, key: Key, snapshot: Snapshot | None) -> None:
        """None: the LLMDeployment is gone."""
        if snapshot is None:
            self.deployments.pop(key, None)
        else:
            self.deployments[key] = snapshot

    def answered(self, method: str, code: int) -> None:
        """The API server did; 0: it did not."""
        self._calls.labels(method, str(code) if code else "none").inc()

    def watched(self, kind: str) -> None:
        self._events.labels(kind).inc()
        self._missed.labels(kind)  # none so far

    def missed(self, kind: str, count: int) -> None:
        self._missed.labels(kind).inc(count)

    def listed(self, succeeded: bool) -> None:
        self._listings.labels("done" if succeeded else "failed").inc()

    def expose(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)


class _Asked(Collector):
    """Says nothing of itself beforehand, so that registering asks nobody."""

    def describe(self) -> Iterable[Metric]:
        return []


class _OperatorState(_Asked):
    def __init__(self, controller: Controller, resync_seconds: float) -> None:
        self._controller, self._resync_seconds = controller, resync_seconds
        self._started = time.monotonic()
        self.silence: Callable[[], float] = lambda: 0.0
        self.silence_limit = 0.0

    def collect(self) -> Iterator[Metric]:
        of = self._controller
        age = of.listed_seconds_ago
        for name, text, value in (
            ("leading", "1 for the operator that works, 0 for those that wait", of.is_leading),
            ("queue_depth", "LLMDeployments that wait to be looked at, or are being", len(of.queue)),
            ("queue_retrying", "LLMDeployments whose last look failed", of.queue.num_failing),
            ("llmdeployments_of_others", "LLMDeployments in reach that another operator serves", len(of.claims.others)),
            (
                "listing_age_seconds",
                "Time since everything was last listed, or since the start",
                time.monotonic() - self._started if age is None else age,
            ),
            ("resync_seconds", "Time between two listings", self._resync_seconds),
            ("watch_silence_seconds", "For how long the most silent watch has been silent", self.silence()),
            ("watch_silence_limit_seconds", "From when on that is taken for dead", self.silence_limit),
        ):
            yield GaugeMetricFamily(f"octavo_operator_{name}", text, value=value)
        info = GaugeMetricFamily("octavo_operator_info", "The operator's version", labels=["version"])
        info.add_metric([__version__], 1)
        yield info


class _Deployments(_Asked):
    def __init__(self, deployments: dict[Key, Snapshot], clock: Callable[[], float] = time.time) -> None:
        self._deployments, self._clock = deployments, clock
        self.decisions: Callable[[], dict[Key, Decision]] = dict

    def collect(self) -> Iterator[Metric]:
        own = ["namespace", "llmdeployment"]
        prefix = "octavo_llmdeployment_"
        condition = GaugeMetricFamily(
            f"{prefix}condition", "1 while the condition is True, 0 False, -1 Unknown", labels=[*own, "type"]
        )
        reason = GaugeMetricFamily(
            f"{prefix}condition_reason", "1 for each condition's present reason", labels=[*own, "type", "reason"]
        )
        replicas = GaugeMetricFamily(f"{prefix}replicas", "Replicas, by what they are", labels=[*own, "state"])
        limits = GaugeMetricFamily(f"{prefix}replicas_limit", "Of its autoscaling", labels=[*own, "limit"])
        rollout = GaugeMetricFamily(
            f"{prefix}rollout_seconds", "How long pods have not all been of the latest spec; 0: they are", labels=own
        )
        restarts = CounterMetricFamily(f"{prefix}pod_restarts", "Restarts of a pod's containers", labels=[*own, "pod"])
        requests = GaugeMetricFamily(
            f"{prefix}requests", "What autoscaling counted in the pods, by state", labels=[*own, "state"]
        )
        capacity = GaugeMetricFamily(
            f"{prefix}replica_capacity", "Requests that a replica holds at once, as autoscaling sees it", labels=own
        )
        for key, decision in self.decisions().items():
            replicas.add_metric([*key, "needed"], decision.needed)
            requests.add_metric([*key, "running"], decision.running)
            requests.add_metric([*key, "waiting"], decision.waiting)
            if decision.capacity is not None:
                capacity.add_metric([*key], decision.capacity)
        now = self._clock()
        for key, one in list(self._deployments.items()):
            since = {
                entry["type"]: parse_time(entry["lastTransitionTime"]) for entry in one.status.get("conditions") or []
            }
            for entry in one.status.get("conditions") or []:
                value = {"True": 1.0, "False": 0.0}.get(entry["status"], -1.0)
                condition.add_metric([*key, entry["type"]], value)
                reason.add_metric([*key, entry["type"], entry["reason"]], 1)
                if entry["type"] == "Progressing":
                    under_way = entry["reason"] != "Complete"
                    # One that cannot begin (a bad patch) is as False as the one before that was complete; it is no
                    # longer Ready, though, and that has its time.
                    seconds = max(0.0, now - max(since["Progressing"], since["Ready"])) if under_way else 0.0
                    rollout.add_metric([*key], seconds)
            replicas.add_metric([*key, "desired"], one.desired)
            for state, field in COUNTS.items():
                replicas.add_metric([*key, state], one.status.get(field, 0))
            for limit, count in zip(("min", "max"), one.limits or (), strict=False):
                limits.add_metric([*key, limit], count)
            for pod, count in one.restarts:
                restarts.add_metric([*key, pod], count)
        yield from (condition, reason, replicas, limits, rollout, restarts, requests, capacity)
