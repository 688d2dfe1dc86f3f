"""Decide when an LLMDeployment with minReplicas 0 starts its first replica, and stops its last ones. Pure.

Between one and more replicas the autoscaler decides, by the metric of decision.py. It leaves a number of 0 alone, so
each number has one writer.

A request that a router holds starts one replica. All are stopped after idleSeconds in which nobody asked for anything:
no request runs, waits, is held or under way in a router, none has ended since the last look, and all that is known for
sure. What cannot be read, starts or is being replaced is not idle. So replicas live for idleSeconds at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo_operator.api import LLMDeployment
from octavo_operator.autoscaling.decision import Decision
from octavo_operator.observed.workload import Workload
from octavo_operator.render import TEMPLATE_PROBLEMS, names

Json = dict[str, Any]

# Reasons of Degraded for which no replica starts, however long one waits. Others pass by themselves, as the lack of a
# node, or are none of the replicas'.
_FINAL = frozenset(
    {
        "OOMKilled",
        "Unauthorized",
        "GatedModel",
        "ModelNotFound",
        "CacheFull",
        "DownloadFailed",
        "SecretNotFound",
        "ConfigMapNotFound",
        "ImagePullBackOff",
        "CrashLoop",
        "ContainerError",
        "PVCNotFound",
        "PVCLost",
        "QuotaExceeded",
        "PodSecurityViolation",
        "PodsNotCreated",
        *TEMPLATE_PROBLEMS,
    }
)


@dataclass(frozen=True)
class RouterLoad:
    """Requests in one router: those that wait for a replica, and those that one has."""

    held: int
    in_flight: int


@dataclass(frozen=True)
class Sample:
    """One look at an LLMDeployment with replicas. `settled`: all are there, of the latest spec; `engines`: None: their
    load is unknown; `routers`: the loads of all, None: of one that cannot be read."""

    settled: bool
    engines: Decision | None
    routers: Sequence[RouterLoad | None]

    @property
    def is_idle(self) -> bool:
        """True if it is certain that there is no request."""
        if not self.settled or self.engines is None or not self.engines.idle or not self.routers:
            return False
        return all(one is not None and not one.held and not one.in_flight for one in self.routers)


@dataclass(frozen=True)
class Idle:
    """A period without requests: when it began, and how many requests (`finished`) had ended by then."""

    since: float
    finished: float


def watch_idle(before: Idle | None, sample: Sample, now: float) -> Idle | None:
    """Return the idle period after one more sample; None if it is not idle."""
    if not sample.is_idle or sample.engines is None:
        return None
    if before is None or before.finished != sample.engines.finished:  # short requests come and go between samples
        return Idle(now, sample.engines.finished)
    return before


def may_stop(deployment: LLMDeployment, idle: Idle | None, now: float) -> bool:
    """True if the replicas are to be stopped."""
    autoscaling = deployment.spec.autoscaling
    if autoscaling is None or idle is None or not deployment.scales_to_zero or deployment.replicas == 0:
        return False
    return now - idle.since >= autoscaling.idle_seconds


def sample_seconds(deployment: LLMDeployment) -> float:
    """Seconds between two samples."""
    autoscaling = deployment.spec.autoscaling
    return min(max(autoscaling.idle_seconds / 6 if autoscaling else 0.0, 2.0), 20.0)


def is_settled(deployment: LLMDeployment, workload: Workload) -> bool:
    """True if all replicas are of the latest spec, and serve."""
    return workload.is_complete and workload.available == deployment.replicas


def start_failure(deployment: LLMDeployment) -> str | None:
    """Return why no replica can start; None if one still may."""
    for condition in deployment.status.get("conditions") or []:
        if (condition["type"], condition["status"]) == ("Degraded", "True") and condition["reason"] in _FINAL:
            return f"{condition['reason']}: {condition['message']}"
    return None


def picker_addresses(routers: Sequence[Json]) -> dict[str, str | None]:
    """Return the URLs of the pickers of router pods, by uid; None for a pod without a picker. Pods without an address
    hold no requests, and are left out."""
    out: dict[str, str | None] = {}
    for pod in routers:
        address = (pod.get("status") or {}).get("podIP")
        if not address or (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
            continue
        containers = pod["spec"].get("containers") or []
        has_picker = any(one["name"] == names.PICKER for one in containers)
        host = f"[{address}]" if ":" in address else address
        # Routers of an older operator have one port for everything.
        named = (port.get("name") for one in containers for port in one.get("ports") or [])
        port = names.CONTROL_PORT if "control" in named else names.PICKER_PORT
        out[pod["metadata"]["uid"]] = f"http://{host}:{port}" if has_picker else None
    return out
