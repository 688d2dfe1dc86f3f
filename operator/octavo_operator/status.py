"""From what is there to what is said: counts, conditions, events. Pure; a clock is passed in.

Available     at least one replica answers requests now
Ready         all replicas answer, all of the latest spec, and nothing is wrong
Progressing   a rollout is under way (False: finished, or stuck)
ModelCached   the model has been fetched (absent where nothing is to be fetched)
ImageUpToDate the pods are of the operator's engine image (absent unless they follow it)
AutoscalerReady  the number of replicas follows the load (absent without spec.autoscaling)
Degraded      something is wrong, with its cause
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from octavo_operator.api import LLMDeployment, Unreadable
from octavo_operator.autoscaling.condition import Scaling, autoscaler_ready
from octavo_operator.autoscaling.decision import noted
from octavo_operator.diagnosis import Events, Problem, diagnose, evicted, is_over, pulling, worst
from octavo_operator.image_rollout import ImageTurn
from octavo_operator.render import names
from octavo_operator.rollout import is_complete, revision

Json = dict[str, Any]


@dataclass(frozen=True)
class Event:
    kind: str  # Normal | Warning
    reason: str
    message: str


@dataclass(frozen=True)
class Observation:
    """All that a status is made of. `problem`: of the operator's own work (bad patch, refused object)."""

    live: Json | None  # the Deployment
    pods: list[Json]
    claim: Json | None = None
    problem: Problem | None = None
    made_room: bool = False
    autoscaler: Json | None = None  # the HorizontalPodAutoscaler or ScaledObject
    scaling: Scaling = field(default_factory=Scaling)
    apis: frozenset[str] = frozenset()  # optional kinds that the cluster has
    pending: bool = False  # `live` has not been told of the spec of today
    template: Json | None = None  # of pods of the spec of today; None: it makes none (a bad patch)
    image_turn: ImageTurn | None = None  # of one that follows the operator's engine image
    contested: Problem | None = None  # what somebody else alters again and again: it may serve all the same
    pod_events: Events = field(default_factory=dict)  # of pods that hang


def expected_status(deployment: LLMDeployment, seen: Observation, cluster_domain: str, now: float) -> Json:
    """The whole status. Times of conditions change only with their status."""
    counts = (seen.live or {}).get("status") or {}
    problem = seen.problem or _degradation(deployment, seen)
    conditions = [_available(deployment, seen, problem), _progressing(deployment, seen, problem)]
    conditions.append(_degraded(problem or seen.contested))
    if deployment.spec.model.is_fetched:
        conditions.insert(0, _model_cached(deployment, seen, problem))
    if verdict := autoscaler_ready(deployment, seen.autoscaler, seen.scaling, seen.apis):
        conditions.insert(-1, _condition("AutoscalerReady", *verdict))
    if seen.image_turn:
        conditions.insert(-1, _image_up_to_date(seen.image_turn))
    conditions.insert(0, _ready(deployment, seen, conditions, problem))
    _stamp(conditions, deployment, now)
    out: Json = {
        **_counts(deployment, counts),
        "selector": names.selector_text(deployment),
        "url": names.url(deployment, cluster_domain),
        "conditions": conditions,
    }
    if image := _image(seen.live):
        out["image"] = image
    if deployment.spec.autoscaling and (
        capacity := noted(deployment.status.get("replicaCapacity"), seen.scaling.capacity)
    ):
        out["replicaCapacity"] = capacity
    return out


def unreadable_status(deployment: Unreadable, live: Json | None, now: float) -> Json:
    """Of one whose spec makes no sense: pods are still counted, the rest stays as it was last."""
    counts = (live or {}).get("status") or {}
    problem = Problem("InvalidSpec", f"{deployment.why}; correct it. What runs goes on running, unchanged")
    available = counts.get("availableReplicas", 0)
    conditions = [
        _condition("Ready", False, problem.reason, problem.message),
        _condition("Available", True, "Serving", f"{available} replicas answer requests")
        if available
        else _condition("Available", False, problem.reason, problem.message),
        _condition("Progressing", False, problem.reason, problem.message),
        _degraded(problem),
    ]
    _stamp(conditions, deployment, now)
    kept = {
        name: value
        for name, value in deployment.status.items()
        if name in ("selector", "url", "image", "replicaCapacity")
    }
    return {**_counts(deployment, counts), **kept, "conditions": conditions}


def _counts(deployment: LLMDeployment | Unreadable, counts: Json) -> Json:
    kinds = ("replicas", "readyReplicas", "availableReplicas", "updatedReplicas")
    return {"observedGeneration": deployment.generation, **{name: counts.get(name, 0) for name in kinds}}


def _stamp(conditions: list[Json], deployment: LLMDeployment | Unreadable, now: float) -> None:
    before = {condition["type"]: condition for condition in deployment.status.get("conditions") or []}
    stamp = datetime.fromtimestamp(int(now), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    for condition in conditions:
        known = before.get(condition["type"])
        same = known is not None and known.get("status") == condition["status"]
        condition["lastTransitionTime"] = known["lastTransitionTime"] if same and known else stamp
        condition["observedGeneration"] = deployment.generation


def events(before: Json, after: Json) -> list[Event]:
    """What is worth an event: a condition that changed, or its cause."""
    known = {condition["type"]: condition for condition in before.get("conditions") or []}
    out = []
    for condition in after["conditions"]:
        old = known.get(condition["type"])
        if old and (old["status"], old["reason"]) == (condition["status"], condition["reason"]):
            continue
        kind, name, status = condition["type"], condition["reason"], condition["status"]
        if kind == "Degraded" and status == "True":
            out.append(Event("Warning", name, condition["message"]))
        elif kind == "Degraded" and old and old["status"] == "True":
            out.append(Event("Normal", "Recovered", f"{old['reason']} is over"))
        elif kind == "Ready" and status == "True":
            out.append(Event("Normal", "Ready", condition["message"]))
        elif kind == "Available" and status == "False" and old and old["status"] == "True":
            out.append(Event("Warning", "Unavailable", condition["message"]))
        elif kind == "ModelCached" and status == "True":
            out.append(Event("Normal", "ModelCached", condition["message"]))
        elif kind == "AutoscalerReady" and status == "False":
            out.append(Event("Warning", name, condition["message"]))
        elif kind == "AutoscalerReady" and status == "True" and old and old["status"] == "False":
            out.append(Event("Normal", "AutoscalerReady", condition["message"]))
        elif kind == "Progressing" and name == "MakingRoom":
            out.append(Event("Warning", "MakingRoom", condition["message"]))
    return out


def _condition(kind: str, status: bool | None, reason: str, message: str) -> Json:
    text = {True: "True", False: "False", None: "Unknown"}[status]
    return {"type": kind, "status": text, "reason": reason, "message": message[:1024]}


def _degradation(deployment: LLMDeployment, seen: Observation) -> Problem | None:
    gpu = deployment.spec.accelerator.resource if deployment.spec.accelerator else None
    found = [(pod, problem) for pod in seen.pods if (problem := diagnose(pod, gpu, _events(seen, pod)))]
    if one := worst([problem for _, problem in found]):
        count = sum(problem.reason == one.reason for _, problem in found)
        total = sum(not is_over(pod) for pod in seen.pods)
        where = f"{count} of {total} pods: " if total > 1 else ""
        return Problem(one.reason, where + one.message)
    counts = (seen.live or {}).get("status") or {}
    if counts.get("availableReplicas", 0) < deployment.replicas and (one := evicted(seen.pods)):
        return one
    for condition in counts.get("conditions") or []:
        message = condition.get("message", "")
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            if "exceeded quota" in message:
                return Problem(
                    "QuotaExceeded",
                    f"the namespace's quota leaves no room for a replica; raise it or lower resources. {message}",
                )
            if "violates PodSecurity" in message:
                return Problem(
                    "PodSecurityViolation",
                    f"the namespace's Pod Security level forbids the pods; see spec.podPatches. {message}",
                )
            return Problem("PodsNotCreated", f"pods cannot be created: {message}")
        if condition["type"] == "Progressing" and condition.get("reason") == "ProgressDeadlineExceeded":
            return Problem(
                "ProgressDeadlineExceeded",
                "the rollout makes no progress: pods run but are not ready in time; see their logs, or raise "
                "probes.startup.budgetSeconds and rollout.progressDeadlineSeconds",
            )
    if seen.claim and (seen.claim.get("status") or {}).get("phase") == "Lost":
        return Problem(
            "PVCLost", "the volume of the cache's PersistentVolumeClaim is gone; delete the claim to get a new one"
        )
    return None


def _events(seen: Observation, pod: Json) -> list[Json]:
    return seen.pod_events.get(pod["metadata"].get("uid", ""), [])


def _pulling(seen: Observation) -> str | None:
    return next((text for pod in seen.pods if (text := pulling(_events(seen, pod)))), None)


def _available(deployment: LLMDeployment, seen: Observation, problem: Problem | None) -> Json:
    counts = (seen.live or {}).get("status") or {}
    available = counts.get("availableReplicas", 0)
    if available:
        return _condition(
            "Available", True, "Serving", f"{available} of {deployment.replicas} replicas answer requests"
        )
    if deployment.replicas == 0:
        if deployment.spec.suspend:
            return _condition("Available", False, "Suspended", "spec.suspend is true: set it to false to serve again")
        return _condition("Available", False, "ScaledToZero", "spec.replicas is 0: raise it to serve again")
    if problem:
        return _condition("Available", False, problem.reason, problem.message)
    if text := _pulling(seen):
        return _condition("Available", False, "PullingImage", text)
    return _condition("Available", False, "Starting", "no replica answers requests yet")


def _progressing(deployment: LLMDeployment, seen: Observation, problem: Problem | None) -> Json:
    if seen.live is None or seen.pending or _outdated(seen.live, deployment):
        if seen.problem:
            return _condition("Progressing", False, seen.problem.reason, seen.problem.message)
        return _condition("Progressing", True, "Applying", "the spec is being applied")
    counts = seen.live.get("status") or {}
    if is_complete(seen.live):
        return _condition("Progressing", False, "Complete", "all pods are of the latest spec")
    if seen.problem:
        return _condition("Progressing", False, seen.problem.reason, seen.problem.message)
    done = (
        f"{counts.get('updatedReplicas', 0)} of {deployment.replicas} replicas are of the latest spec, "
        f"{counts.get('availableReplicas', 0)} available"
    )
    if text := _pulling(seen):
        done += f"; {text}"
    if seen.made_room:
        return _condition(
            "Progressing", True, "MakingRoom", f"no room for an additional pod, so old pods go first; {done}"
        )
    if problem and problem.reason == "ProgressDeadlineExceeded":
        return _condition("Progressing", False, problem.reason, problem.message)
    old = len({revision(pod) for pod in seen.pods if not is_over(pod)}) > 1
    return _condition("Progressing", True, "RollingOut" if old else "Starting", done)


def _degraded(problem: Problem | None) -> Json:
    if problem:
        return _condition("Degraded", True, problem.reason, problem.message)
    return _condition("Degraded", False, "AsExpected", "nothing is wrong")


_DOWNLOAD = frozenset({"GatedModel", "Unauthorized", "ModelNotFound", "CacheFull", "DownloadFailed"})


def _model_cached(deployment: LLMDeployment, seen: Observation, problem: Problem | None) -> Json:
    wanted = _fetch_arguments(seen.template or {})  # pods of an earlier spec have fetched another model
    states = [
        status.get("state") or {}
        for pod in seen.pods
        if "deletionTimestamp" not in pod["metadata"] and _fetch_arguments(pod) == wanted
        for status in (pod.get("status") or {}).get("initContainerStatuses") or []
        if status["name"] == names.FETCH
    ]
    cached = f"{_fetched(deployment)} is in the cache"
    if any((state.get("terminated") or {}).get("exitCode") == 0 for state in states):
        return _condition("ModelCached", True, "Fetched", cached)
    if problem and problem.reason in _DOWNLOAD:
        return _condition("ModelCached", False, problem.reason, problem.message)
    if any("running" in state for state in states):
        return _condition("ModelCached", False, "Fetching", f"{_fetched(deployment)} is being fetched")
    known = next((c for c in deployment.status.get("conditions") or [] if c["type"] == "ModelCached"), None)
    lasts = names.cache_claim(deployment) or seen.template is None
    if known and (known["status"], known["message"]) == ("True", cached) and lasts:
        return _condition("ModelCached", True, "Fetched", cached)
    return _condition("ModelCached", None, "NotFetchedYet", "no pod has fetched the model yet")


def _image_up_to_date(turn: ImageTurn) -> Json:
    kind = "ImageUpToDate"
    if not turn.is_behind:
        return _condition(kind, True, "UpToDate", f"the pods are of the operator's engine image {turn.image}")
    if turn.may_go:
        return _condition(kind, False, "RollingOut", f"the pods are about to take {turn.image}")
    names, more = ", ".join(turn.waits_for[:3]), len(turn.waits_for) - 3
    return _condition(
        kind, False, "WaitingForOthers",
        f"{turn.image} is rolled out step by step; before this one: {names}{f' and {more} more' if more > 0 else ''}",
    )  # fmt: skip


def _fetched(deployment: LLMDeployment) -> str:
    model = deployment.spec.model
    return f"{model.uri} ({model.revision})" if model.revision else model.uri


def _fetch_arguments(pod: Json) -> Any:
    """What a pod, or a template of pods, fetches."""
    containers = (pod.get("spec") or {}).get("initContainers") or []
    return next((container.get("args") for container in containers if container["name"] == names.FETCH), None)


def _ready(deployment: LLMDeployment, seen: Observation, conditions: list[Json], problem: Problem | None) -> Json:
    by_kind = {condition["type"]: condition for condition in conditions}
    if problem:
        return _condition("Ready", False, problem.reason, problem.message)
    if by_kind["Available"]["status"] != "True":
        return _condition("Ready", False, by_kind["Available"]["reason"], by_kind["Available"]["message"])
    if by_kind["Progressing"]["reason"] != "Complete":
        return _condition("Ready", False, by_kind["Progressing"]["reason"], by_kind["Progressing"]["message"])
    count = deployment.replicas
    return _condition("Ready", True, "Ready", f"{count} of {count} replicas answer requests")


def _outdated(live: Json, deployment: LLMDeployment) -> bool:
    """Whether the Deployment still says something else than the spec, in what can be seen at a glance."""
    return live["spec"].get("replicas") != deployment.replicas


def _image(live: Json | None) -> str | None:
    containers = ((live or {}).get("spec") or {}).get("template", {}).get("spec", {}).get("containers") or []
    return next((container.get("image") for container in containers if container["name"] == names.ENGINE), None)
