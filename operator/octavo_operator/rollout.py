"""Rollouts where every GPU is taken: first a new pod beside the old ones, and when it finds no place, one old pod
makes room. Decided from our own pods alone, so it works without rights over nodes, and autoscalers of nodes act first.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from octavo_operator.api import GROUP, LLMDeployment
from octavo_operator.render.deployment import shares_nothing

MAKE_ROOM = f"{GROUP}/make-room"  # annotation of the Deployment: the rollout for which an old pod has to go first

Json = dict[str, Any]


def parse_time(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def make_room(
    deployment: LLMDeployment, live: Json | None, pods: list[Json], now: float
) -> tuple[str | None, float | None]:
    """For which rollout (hash of its pods) old pods make room, and after how many seconds to look again."""
    rollout = deployment.spec.rollout
    pods = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
    if rollout.type != "Auto" or shares_nothing(deployment) or live is None or not pods:
        return None, None
    newest = revision(max(pods, key=lambda pod: (pod["metadata"]["creationTimestamp"], pod["metadata"]["name"])))
    decided = (live["metadata"].get("annotations") or {}).get(MAKE_ROOM)
    if decided == newest and not is_complete(live):
        return newest, None
    # Is there an old pod at all, and does a new one wait for what an old one holds?
    if newest is None or all(revision(pod) == newest for pod in pods):
        return None, None
    waiting = [since for pod in pods if revision(pod) == newest and (since := _waits_for_resources(pod)) is not None]
    if not waiting:
        return None, None
    left = min(waiting) + rollout.surge_patience_seconds - now
    return (newest, None) if left <= 0 else (None, left)


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


def _waits_for_resources(pod: Json) -> float | None:
    """Since when the scheduler finds no node with enough of something. A pod that fits nowhere for other reasons (a
    misspelt node selector) would not be helped by killing one that serves."""
    for condition in (pod.get("status") or {}).get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            message = condition.get("message", "")
            if condition.get("reason") == "Unschedulable" and ("Insufficient" in message or "Too many pods" in message):
                return parse_time(condition.get("lastTransitionTime") or pod["metadata"]["creationTimestamp"])
    return None
