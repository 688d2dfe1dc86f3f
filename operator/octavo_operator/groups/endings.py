"""Find out why pods of a group were replaced. Pure.

LeaderWorkerSet makes a group anew as soon as a container of it has ended: nothing of it stays that would tell why. So
the containers of pods that are about to go are looked at, and what was found is told until all groups are ready.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from octavo_operator.api import LLMDeployment
from octavo_operator.observed.diagnosis import DOWNLOAD, Problem, diagnose, most_severe

Json = dict[str, Any]

_REASONS = DOWNLOAD | {"CrashLoop", "OOMKilled", "ContainerError"}


def ending(deployment: LLMDeployment, pods: Iterable[Json], are_ready: bool) -> Problem | None:
    """`are_ready`: all groups are, so that there is nothing to tell."""
    if are_ready:
        return None
    if found := most_severe([one for pod in pods if _was_restarted(pod) and (one := diagnose(_as_if_staying(pod)))]):
        return found
    known = {one["type"]: one for one in deployment.status.get("conditions") or []}.get("Degraded", {})
    if known.get("reason") in _REASONS and known.get("observedGeneration") == deployment.generation:
        return Problem(known["reason"], known["message"])
    return None


def _statuses(pod: Json, kind: str) -> list[Json]:
    return (pod.get("status") or {}).get(kind) or []


def _was_restarted(pod: Json) -> bool:
    containers = [*_statuses(pod, "initContainerStatuses"), *_statuses(pod, "containerStatuses")]
    return "deletionTimestamp" in pod["metadata"] and any(one.get("restartCount") for one in containers)


def _as_if_staying(pod: Json) -> Json:
    meta = {name: value for name, value in pod["metadata"].items() if name != "deletionTimestamp"}
    kinds = ("initContainerStatuses", "containerStatuses")
    unready = {kind: [{**one, "ready": False} for one in _statuses(pod, kind)] for kind in kinds}
    return {**pod, "metadata": meta, "status": {**pod["status"], **unready}}
