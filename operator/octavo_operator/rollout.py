"""Rollouts where every GPU is taken: first a new pod beside the old ones, and when it finds no place, one old pod
makes room. Decided from our own pods alone, so it works without rights over nodes, and autoscalers of nodes act first.

How a Deployment's rollout would stand still, and what is done about it:

- every GPU is taken: after surgePatienceSeconds one replica may be missing, so the controller takes an old one away
- fewer GPUs than replicas: the replica that never had a place is the one that may be missing, and nothing moves. So as
  many may be missing as are missing, and one more
- old pods that do not serve (a broken version that is being reverted) hold the GPUs: they go at once, no other does
- a quota is used up: the new pod cannot even be made; the same as a GPU that is taken
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo_operator.api import GROUP, LLMDeployment
from octavo_operator.diagnosis import is_over
from octavo_operator.render.deployment import shares_nothing
from octavo_operator.times import parse_time

MAKE_ROOM = f"{GROUP}/make-room"  # annotation of the Deployment: the rollout for which old pods go first
_REVISION = "deployment.kubernetes.io/revision"  # which rollout it is, as the Deployment's controller counts them
STEP_SECONDS = 30.0  # no further replica goes missing before that: the scheduler looks again every few seconds
_LEAVING_SECONDS = 30.0  # how long a pod may exceed its grace period and still count as leaving

Json = dict[str, Any]


@dataclass(frozen=True)
class Room:
    """Of one rollout: old pods go before new ones come, and so many replicas may be missing."""

    rollout: str
    unavailable: int

    def __str__(self) -> str:
        return f"{self.rollout}/{self.unavailable}"

    @classmethod
    def of(cls, text: str | None) -> Room | None:
        rollout, _, count = (text or "").partition("/")
        return cls(rollout, int(count)) if count.isdigit() else None


def make_room(
    deployment: LLMDeployment, live: Json | None, pods: list[Json], now: float
) -> tuple[Room | None, float | None]:
    """Whether old pods make room in the present rollout, and after how many seconds to look again."""
    spec = deployment.spec.rollout
    if spec.type != "Auto" or shares_nothing(deployment) or live is None:
        return None, None
    annotations = live["metadata"].get("annotations") or {}
    rollout = annotations.get(_REVISION, "")
    decided = Room.of(annotations.get(MAKE_ROOM))
    if decided and (decided.rollout != rollout or is_complete(live)):
        decided = None
    staying = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"] and not is_over(pod)]
    stuck = _stuck(live, staying)
    if stuck is None:
        return decided, None
    since, in_vain = stuck
    if any(now < parse_time(pod["metadata"]["deletionTimestamp"]) + _LEAVING_SECONDS for pod in pods if _leaves(pod)):
        return decided, 5.0  # there will be room
    replicas = live["spec"].get("replicas", 1)
    counts = live.get("status") or {}
    # One that is ready serves, though it counts as available only after minReadySeconds.
    missing = replicas - max(counts.get("readyReplicas", 0), counts.get("availableReplicas", 0))
    if in_vain and missing > (decided.unavailable if decided else 0):
        return Room(rollout, missing), None  # so many are missing anyway: none that serves is taken
    patience: float = spec.surge_patience_seconds
    if decided or spec.surge_patience_seconds == 0:  # one may be missing already, and that was not enough
        patience = max(patience, STEP_SECONDS)
        since = max(since, _progressed_at(live))
    if now < since + patience:
        return decided, since + patience - now
    wanted = Room(rollout, min(max(missing + 1, 1), replicas))
    if decided and decided.unavailable >= wanted.unavailable:
        return decided, STEP_SECONDS
    return wanted, None


def is_complete(live: Json) -> bool:
    """All replicas are of the latest template and available, and no old one is left."""
    status = live.get("status") or {}
    wanted = live["spec"].get("replicas", 1)
    return (
        status.get("observedGeneration", 0) >= live["metadata"].get("generation", 1)
        and status.get("updatedReplicas", 0) == wanted
        and status.get("replicas", 0) == wanted
        and status.get("availableReplicas", 0) == wanted
    )


def revision(pod: Json) -> str | None:
    return (pod["metadata"].get("labels") or {}).get("pod-template-hash")


def _stuck(live: Json, pods: list[Json]) -> tuple[float, bool] | None:
    """Since when a new pod lacks what an old one holds, and whether some old one holds it in vain; None: not so."""
    status = live.get("status") or {}
    if not pods or status.get("observedGeneration", 0) < live["metadata"].get("generation", 1):
        return None
    template = live["spec"].get("template") or {}
    # Times alone do not tell: they are whole seconds, and an old pod that was lost is made anew during a rollout.
    newest = revision(max(pods, key=lambda pod: (_likeness(pod, template), pod["metadata"]["creationTimestamp"])))
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


def _likeness(pod: Json, template: Json) -> int:
    """How much of the template is found in the pod. Not always all of it: what admits pods may have changed them."""
    marks = (template.get("metadata") or {}).get("annotations") or {}
    found = pod["metadata"].get("annotations") or {}
    alike = sum(found.get(name) == value for name, value in marks.items())
    for kind in ("initContainers", "containers"):
        known = {one["name"]: one for one in (pod.get("spec") or {}).get(kind) or []}
        for wanted in (template.get("spec") or {}).get(kind) or []:
            one = known.get(wanted["name"], {})
            alike += sum(one.get(field) == value for field, value in wanted.items())
    return alike


def _condition(body: Json, kind: str) -> Json:
    found = (body.get("status") or {}).get("conditions") or []
    return next((condition for condition in found if condition["type"] == kind), {})


def _leaves(pod: Json) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def _progressed_at(live: Json) -> float:
    stamp = _condition(live, "Progressing").get("lastUpdateTime")
    return parse_time(stamp) if stamp else 0.0


def _waits_for_resources(pod: Json) -> float | None:
    """Since when the scheduler finds no node with enough of something. A pod that fits nowhere for other reasons (a
    misspelt node selector) would not be helped by killing one that serves."""
    condition = _condition(pod, "PodScheduled")
    message = condition.get("message", "")
    if condition.get("status") != "False" or condition.get("reason") != "Unschedulable":
        return None
    if "Insufficient" not in message and "Too many pods" not in message:
        return None
    return parse_time(condition.get("lastTransitionTime") or pod["metadata"]["creationTimestamp"])
