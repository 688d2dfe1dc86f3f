"""Prometheus metrics of the operator and of its LLMDeployments and LLMGateways, at /metrics.

Labels are bounded: names of LLMDeployments and of their pods, and a few fixed words. Only the leader exports metrics of
LLMDeployments, so nothing is counted twice with several replicas. Scrape it with honorLabels: `namespace` is that of
the LLMDeployment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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
from octavo_operator.api import InvalidLLMDeployment, LLMDeployment
from octavo_operator.autoscaling.decision import Decision
from octavo_operator.kube.store import Key
from octavo_operator.observed.pod_starts import PHASES
from octavo_operator.times import parse_time

RESULTS = ("done", "retried", "failed")  # failed: an internal error of the operator
COUNTS = {
    "current": "replicas",
    "ready": "readyReplicas",
    "available": "availableReplicas",
    "updated": "updatedReplicas",
}
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

Json = dict[str, Any]


@dataclass(frozen=True)
class OperatorState:
    """The controller's state as the metrics show it."""

    is_leading: bool
    queue_depth: int
    num_retrying: int
    num_of_others: int  # LLMDeployments that other operators serve
    listing_age: float | None  # seconds since everything was listed; None: not yet


@dataclass(frozen=True)
class Snapshot:
    """One LLMDeployment at its last reconciliation."""

    desired: int
    status: Json
    limits: tuple[int, int] | None  # of its autoscaling: minimum and maximum
    restarts: tuple[tuple[str, int], ...]  # of its pods, by name

    @classmethod
    def of(cls, deployment: LLMDeployment | InvalidLLMDeployment, status: Json, pods: list[Json]) -> Snapshot:
        """Take a snapshot from its new status and its pods."""
        restarts = tuple((pod["metadata"]["name"], _restarts(pod)) for pod in pods)
        if isinstance(deployment, InvalidLLMDeployment):  # running pods stay
            return cls(status["replicas"], status, None, restarts)
        autoscaling = deployment.spec.autoscaling
        limits = (autoscaling.min_replicas, autoscaling.max_replicas) if autoscaling else None
        return cls(deployment.replicas, status, limits, restarts)


def _restarts(pod: Json) -> int:
    status = pod.get("status") or {}
    kinds = ("initContainerStatuses", "containerStatuses")
    return sum(one.get("restartCount", 0) for kind in kinds for one in status.get(kind) or [])


class Metrics:
    """All metrics. `expose` is thread-safe; everything else is for the event loop."""

    def __init__(self, read_state: Callable[[], OperatorState], resync_seconds: float) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.deployments: dict[Key, Snapshot] = {}
        self.gateways: dict[Key, Json] = {}
        ProcessCollector(registry=self.registry)
        count = self._counter
        self._reconciles = count("octavo_operator_reconciles", "Reconciliations, by result", "result")
        for result in RESULTS:
            self._reconciles.labels(result)
        self._seconds = Histogram(
            "octavo_operator_reconcile_seconds",
            "Duration of a reconciliation",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._calls = count(
            "octavo_operator_api_requests",
            "Requests to the API server, by method and status code (none: no response)",
            "method",
            "code",
        )
        self._events = count("octavo_operator_watch_events", "Watch events received, by kind", "kind")
        self._missed = count(
            "octavo_operator_missed_changes", "Changes that a listing found and no watch had reported, by kind", "kind"
        )
        self._listings = count("octavo_operator_listings", "Listings of all watched kinds, by result", "result")
        for result in ("done", "failed"):
            self._listings.labels(result)
        self._operator = _OperatorCollector(read_state, resync_seconds)
        self.registry.register(self._operator)
        self._fleet = _FleetCollector(self.deployments)
        self.registry.register(self._fleet)
        self.registry.register(_GatewayCollector(self.gateways))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def set_watch_silence(self, read: Callable[[], float], limit: float) -> None:
        """``read()``: seconds for which the most silent watch has been silent; above `limit` it counts as dead."""
        self._operator.silence, self._operator.silence_limit = read, limit

    def set_scaling(self, read: Callable[[], dict[Key, Decision]], wakes: Mapping[Key, int]) -> None:
        """``read()``: the last decisions of autoscaling; `wakes`: how often each was started for a request."""
        self._fleet.decisions, self._fleet.wakes = read, wakes

    def on_reconciled(self, result: str, seconds: float) -> None:
        """A reconciliation ended with one of RESULTS."""
        self._reconciles.labels(result).inc()
        self._seconds.observe(seconds)

    def record(self, key: Key, snapshot: Snapshot | None) -> None:
        """State of an LLMDeployment; None: it is gone, or another operator's."""
        if snapshot is None:
            self.deployments.pop(key, None)
        else:
            self.deployments[key] = snapshot

    def record_gateway(self, key: Key, status: Json | None) -> None:
        """The new status of an LLMGateway, by namespace and name; None: it is gone, or another operator's."""
        if status is None:
            self.gateways.pop(key, None)
        else:
            self.gateways[key] = status

    def on_response(self, method: str, code: int) -> None:
        """The API server responded; code 0: it did not."""
        self._calls.labels(method, str(code) if code else "none").inc()

    def on_watch_event(self, kind: str) -> None:
        """A watch reported an object of this kind."""
        self._events.labels(kind).inc()
        self._missed.labels(kind)  # exported as 0

    def on_missed_changes(self, kind: str, count: int) -> None:
        """A listing found changes that no watch had reported."""
        self._missed.labels(kind).inc(count)

    def on_listing(self, succeeded: bool) -> None:
        """A listing of all kinds ended."""
        self._listings.labels("done" if succeeded else "failed").inc()

    def expose(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _LazyCollector(Collector):
    """Collects nothing when it is registered."""

    def describe(self) -> Iterable[Metric]:
        return []


class _OperatorCollector(_LazyCollector):
    def __init__(self, read_state: Callable[[], OperatorState], resync_seconds: float) -> None:
        self._read_state, self._resync_seconds = read_state, resync_seconds
        self._started = time.monotonic()
        self.silence: Callable[[], float] = lambda: 0.0
        self.silence_limit = 0.0

    def collect(self) -> Iterator[Metric]:
        state = self._read_state()
        age = state.listing_age
        for name, text, value in (
            ("leading", "1 on the leader, 0 on other replicas", state.is_leading),
            ("queue_depth", "LLMDeployments queued for reconciliation or being reconciled", state.queue_depth),
            ("queue_retrying", "LLMDeployments whose last reconciliation is to be retried", state.num_retrying),
            ("llmdeployments_of_others", "LLMDeployments that another operator serves", state.num_of_others),
            (
                "listing_age_seconds",
                "Seconds since the last complete listing, or since the start",
                time.monotonic() - self._started if age is None else age,
            ),
            ("resync_seconds", "Seconds between complete listings", self._resync_seconds),
            ("watch_silence_seconds", "Seconds since the most silent watch received anything", self.silence()),
            (
                "watch_silence_limit_seconds",
                "Silence in seconds above which a watch counts as dead",
                self.silence_limit,
            ),
        ):
            yield GaugeMetricFamily(f"octavo_operator_{name}", text, value=value)
        info = GaugeMetricFamily("octavo_operator_info", "Version of the operator", labels=["version"])
        info.add_metric([__version__], 1)
        yield info


_Rows = Mapping[str, tuple[str, tuple[str, ...]]]  # text and labels by name
_CONDITIONS: _Rows = {
    "condition": ("Status of a condition: 1 True, 0 False, -1 Unknown", ("type",)),
    "condition_reason": ("Current reason of a condition: always 1", ("type", "reason")),
}
_FLEET: _Rows = {
    **_CONDITIONS,
    "replicas": ("Number of replicas, by state", ("state",)),
    "replicas_limit": ("Limits of spec.autoscaling", ("limit",)),
    "rollout_seconds": ("Seconds since the current rollout began; 0: all pods are of the latest spec", ()),
    "pod_restarts": ("Container restarts of a pod", ("pod",)),
    "requests": ("Requests in the pods, by state, as counted by autoscaling", ("state",)),
    "replica_capacity": ("Requests that one replica handles at once, as observed by autoscaling", ()),
    "wakes": ("Starts of the first replica for a request (minReplicas 0)", ()),
    "start_seconds": (
        "Seconds that the pod that became ready last took: image_pull, fetch, load; ready: all, from its creation",
        ("phase",),
    ),
}
_GATEWAYS: _Rows = {
    **_CONDITIONS,
    "models": ("Number of model names that it serves, by whether a replica is ready", ("ready",)),
}
_COUNTERS = ("pod_restarts", "wakes")


class _Families:
    """Metrics of all objects of a kind, while they are collected."""

    def __init__(self, kind: str, rows: _Rows) -> None:
        self.all = {
            name: (CounterMetricFamily if name in _COUNTERS else GaugeMetricFamily)(
                f"octavo_{kind}_{name}", text, labels=["namespace", kind, *labels]
            )
            for name, (text, labels) in rows.items()
        }

    def add(self, name: str, key: Key, value: float, *labels: str) -> None:
        self.all[name].add_metric([*key, *labels], value)

    def add_conditions(self, key: Key, status: Json) -> None:
        for entry in status.get("conditions") or []:
            value = {"True": 1.0, "False": 0.0}.get(entry["status"], -1.0)
            self.add("condition", key, value, entry["type"])
            self.add("condition_reason", key, 1, entry["type"], entry["reason"])


def _rollout_seconds(status: Json, now: float) -> float | None:
    """Return the seconds since the current rollout began, 0 if it is complete; None without the condition."""
    by_kind = {entry["type"]: entry for entry in status.get("conditions") or []}
    progressing = by_kind.get("Progressing")
    if progressing is None:
        return None
    if progressing["reason"] == "Complete":
        return 0.0
    # Progressing is False both for a rollout that cannot begin (a bad patch) and for the complete one before it; then
    # the transition time of Ready distinguishes them.
    since = max(parse_time(entry["lastTransitionTime"]) for entry in (progressing, by_kind["Ready"]))
    return max(0.0, now - since)


class _FleetCollector(_LazyCollector):
    def __init__(self, deployments: dict[Key, Snapshot], clock: Callable[[], float] = time.time) -> None:
        self._deployments, self._clock = deployments, clock
        self.decisions: Callable[[], dict[Key, Decision]] = dict
        self.wakes: Mapping[Key, int] = {}

    def collect(self) -> Iterator[Metric]:
        families = _Families("llmdeployment", _FLEET)
        add = families.add
        for key, decision in self.decisions().items():
            add("replicas", key, decision.needed, "needed")
            add("requests", key, decision.running, "running")
            add("requests", key, decision.waiting, "waiting")
            if decision.capacity is not None:
                add("replica_capacity", key, decision.capacity)
        now = self._clock()
        for key, one in list(self._deployments.items()):
            families.add_conditions(key, one.status)
            if (seconds := _rollout_seconds(one.status, now)) is not None:
                add("rollout_seconds", key, seconds)
            add("replicas", key, one.desired, "desired")
            for state, field in COUNTS.items():
                add("replicas", key, one.status.get(field, 0), state)
            for limit, count in zip(("min", "max"), one.limits or (), strict=False):
                add("replicas_limit", key, count, limit)
            if key in self.wakes or (one.limits and one.limits[0] == 0):  # from the start, so that the first one counts
                add("wakes", key, self.wakes.get(key, 0))
            for field, phase in PHASES.items():
                if field in (one.status.get("start") or {}):
                    add("start_seconds", key, one.status["start"][field], phase)
            for pod, count in one.restarts:
                add("pod_restarts", key, count, pod)
        yield from families.all.values()


class _GatewayCollector(_LazyCollector):
    def __init__(self, gateways: dict[Key, Json]) -> None:
        self._gateways = gateways

    def collect(self) -> Iterator[Metric]:
        families = _Families("llmgateway", _GATEWAYS)
        for key, status in list(self._gateways.items()):
            families.add_conditions(key, status)
            ready = [bool(one["ready"]) for one in status.get("models") or []]
            for word, state in (("true", True), ("false", False)):
                families.add("models", key, ready.count(state), word)
        yield from families.all.values()
