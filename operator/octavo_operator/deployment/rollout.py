"""Rollouts in a full cluster: a new pod is created first, and if it cannot be scheduled, an old pod is stopped.

Decided from our own pods alone, so it needs no rights over nodes, and cluster autoscalers act first. How the rollout of
a Deployment would get stuck, and what is done about it:

- no GPU is free: after surgePatienceSeconds maxUnavailable becomes 1, so the Deployment controller stops an old pod
- fewer GPUs than replicas: the unschedulable replica already uses up that 1, so nothing moves. maxUnavailable becomes
  the number of missing replicas, plus one
- old pods that are not ready (a broken version that is being reverted) hold the GPUs: only those are stopped, at once
- the quota is exhausted: the new pod cannot even be created; treated like a missing GPU
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo_operator.api import GROUP, LLMDeployment
from octavo_operator.observed.diagnosis import is_finished
from octavo_operator.observed.workload import Workload
from octavo_operator.render.deployment import has_exclusive_volume
from octavo_operator.render.workload import KIND as GROUPS
from octavo_operator.times import parse_time

MAKE_ROOM = f"{GROUP}/make-room"  # annotation of the Deployment: the rollout in which old pods are stopped first
_REVISION = "deployment.kubernetes.io/revision"  # counted by the Deployment controller
_GROUP_REVISION = "leaderworkerset.sigs.k8s.io/template-revision-hash"
STEP_SECONDS = 30.0  # before another pod is stopped: the scheduler retries every few seconds
_OVERDUE_SECONDS = 30.0  # by which a terminating pod may exceed its grace period and still be waited for

Json = dict[str, Any]


@dataclass(frozen=True)
class Room:
    """A rollout that stops old pods first. `unavailable`: the Deployment's maxUnavailable."""

    rollout: str
    unavailable: int

    def __str__(self) -> str:
        return f"{self.rollout}/{self.unavailable}"

    @classmethod
    def of(cls, text: str | None) -> Room | None:
        """Parse the annotation."""
        rollout, _, count = (text or "").partition("/")
        return cls(rollout, int(count)) if count.isdigit() else None


def make_room(
    deployment: LLMDeployment, live: Json | None, pods: list[Json], now: float
) -> tuple[Room | None, float | None]:
    """True if old pods are stopped first in the current rollout, and seconds until that is to be computed again."""
    spec = deployment.spec.rollout
    if spec.type != "Auto" or has_exclusive_volume(deployment) or live is None or live.get("kind") == GROUPS:
        return None, None  # groups end before their successors begin
    annotations = live["metadata"].get("annotations") or {}
    rollout = annotations.get(_REVISION, "")
    decided = Room.of(annotations.get(MAKE_ROOM))
    if decided and (decided.rollout != rollout or Workload.of(live).is_complete):
        decided = None
    staying = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"] and not is_finished(pod)]
    stuck = _stuck(live, staying)
    if stuck is None:
        return decided, None
    since, held_by_unready = stuck
    if any(
        now < parse_time(pod["metadata"]["deletionTimestamp"]) + _OVERDUE_SECONDS
        for pod in pods
        if _is_terminating(pod)
    ):
        return decided, 5.0  # resources will be free
    replicas = live["spec"].get("replicas", 1)
    counts = live.get("status") or {}
    # A ready pod serves, though it counts as available only after minReadySeconds.
    missing = replicas - max(counts.get("readyReplicas", 0), counts.get("availableReplicas", 0))
    if held_by_unready and missing > (decided.unavailable if decided else 0):
        return Room(rollout, missing), None  # as many are missing already: no ready pod is stopped
    patience = float(spec.surge_patience_seconds)
    if decided or spec.surge_patience_seconds == 0:  # one pod was stopped already, and that was not enough
        patience = max(patience, STEP_SECONDS)
        since = max(since, _progressed_at(live))
    if now < since + patience:
        return decided, since + patience - now
    wanted = Room(rollout, min(max(missing + 1, 1), replicas))
    if decided and decided.unavailable >= wanted.unavailable:
        return decided, STEP_SECONDS
    return wanted, None


def revision(pod: Json) -> str | None:
    """Hash of the pod template that the pod was created from."""
    labels = pod["metadata"].get("labels") or {}
    found: str | None = labels.get("pod-template-hash") or labels.get(_GROUP_REVISION)
    return found


def _stuck(live: Json, pods: list[Json]) -> tuple[float, bool] | None:
    """Return since when a new pod has lacked resources that old pods hold, and whether one of those is not ready; None
    if the rollout is not stuck."""
    status = live.get("status") or {}
    if not pods or status.get("observedGeneration", 0) < live["metadata"].get("generation", 1):
        return None
    template = live["spec"].get("template") or {}
    # Creation times do not suffice: they are whole seconds, and a lost old pod may be recreated during a rollout.
    newest = revision(max(pods, key=lambda pod: (_similarity(pod, template), pod["metadata"]["creationTimestamp"])))
    none_is_new = not status.get("updatedReplicas")  # absent when it is 0
    old = [pod for pod in pods if none_is_new or revision(pod) != newest]
    holding = [pod for pod in old if _condition(pod, "PodScheduled").get("status") != "False"]
    if not holding:
        return None
    waiting = [since for pod in pods if pod not in old and (since := _waits_for_resources(pod)) is not None]
    failure = _condition(live, "ReplicaFailure")
    if failure.get("status") == "True" and "exceeded quota" in failure.get("message", ""):
        waiting.append(parse_time(failure["lastTransitionTime"]))
    if not waiting:
        return None
    return min(waiting), any(_condition(pod, "Ready").get("status") != "True" for pod in holding)


def _similarity(pod: Json, template: Json) -> int:
    """Count the parts of the template that the pod has: admission may have changed some."""
    annotations = (template.get("metadata") or {}).get("annotations") or {}
    found = pod["metadata"].get("annotations") or {}
    matching: int = sum(found.get(name) == value for name, value in annotations.items())
    for kind in ("initContainers", "containers"):
        known = {one["name"]: one for one in (pod.get("spec") or {}).get(kind) or []}
        for wanted in (template.get("spec") or {}).get(kind) or []:
            one = known.get(wanted["name"], {})
            matching += sum(one.get(field) == value for field, value in wanted.items())
    return matching


def _condition(body: Json, kind: str) -> Json:
    found = (body.get("status") or {}).get("conditions") or []
    return next((condition for condition in found if condition["type"] == kind), {})


def _is_terminating(pod: Json) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def _progressed_at(live: Json) -> float:
    stamp = _condition(live, "Progressing").get("lastUpdateTime")
    return parse_time(stamp) if stamp else 0.0


def _waits_for_resources(pod: Json) -> float | None:
    """Return since when the scheduler has found no node with enough resources. A pod that is unschedulable for other
    reasons (a wrong node selector) does not count: stopping another one would not help it."""
    condition = _condition(pod, "PodScheduled")
    message = condition.get("message", "")
    if condition.get("status") != "False" or condition.get("reason") != "Unschedulable":
        return None
    if "Insufficient" not in message and "Too many pods" not in message:
        return None
    return parse_time(condition.get("lastTransitionTime") or pod["metadata"]["creationTimestamp"])
