"""The status of an LLMDeployment: counts, conditions and events, from observed objects. Pure; the time is an argument.

Available        at least one replica serves requests
Ready            all replicas serve, all of the latest spec, and there is no problem
Progressing      a rollout is in progress (False: complete, or stuck)
ModelCached      the model has been fetched (absent where nothing is fetched)
ImageUpToDate    the pods have the operator's engine image (absent unless they follow it)
AutoscalerReady  the number of replicas follows the load (absent without spec.autoscaling)
Degraded         there is a problem, with its cause
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from octavo_operator.api import InvalidLLMDeployment, LLMDeployment
from octavo_operator.autoscaling.condition import Scaling, autoscaler_ready
from octavo_operator.autoscaling.decision import rounded_capacity
from octavo_operator.diagnosis import (
    Events,
    Problem,
    diagnose,
    eviction_problem,
    image_pull_progress,
    is_finished,
    most_severe,
)
from octavo_operator.image_rollout import ImageTurn
from octavo_operator.render import names
from octavo_operator.rollout import is_complete, revision

Json = dict[str, Any]


@dataclass(frozen=True)
class Event:
    """An event of an LLMDeployment, as `kubectl describe` shows it."""

    kind: str  # Normal | Warning
    reason: str
    message: str


@dataclass(frozen=True)
class Observation:
    """The input of a status. `problem`: of the operator's own work (invalid patch, rejected object)."""

    live: Json | None  # the Deployment
    pods: list[Json]
    claim: Json | None = None
    problem: Problem | None = None
    made_room: bool = False
    autoscaler: Json | None = None  # the HorizontalPodAutoscaler or ScaledObject
    scaling: Scaling = field(default_factory=Scaling)
    apis: frozenset[str] = frozenset()  # optional kinds that the cluster has
    pending: bool = False  # `live` is not yet updated to the current spec
    template: Json | None = None  # pod template of the current spec; None: it yields none (an invalid patch)
    image_turn: ImageTurn | None = None  # of one that follows the operator's engine image
    contested: Problem | None = None  # an object that others keep changing: pods may serve all the same
    pod_events: Events = field(default_factory=dict)  # of hanging pods


def expected_status(deployment: LLMDeployment, seen: Observation, cluster_domain: str, now: float) -> Json:
    """The whole status. lastTransitionTime of a condition changes only with its status."""
    counts = (seen.live or {}).get("status") or {}
    problem = seen.problem or _find_problem(deployment, seen)
    conditions = [_available(deployment, seen, problem), _progressing(deployment, seen, problem)]
    conditions.append(_degraded(problem or seen.contested))
    if deployment.spec.model.is_fetched:
        conditions.insert(0, _model_cached(deployment, seen, problem))
    if verdict := autoscaler_ready(deployment, seen.autoscaler, seen.scaling, seen.apis):
        conditions.insert(-1, _condition("AutoscalerReady", *verdict))
    if seen.image_turn:
        conditions.insert(-1, _image_up_to_date(seen.image_turn))
    conditions.insert(0, _ready(deployment, seen, conditions, problem))
    _set_times(conditions, deployment, now)
    out: Json = {
        **_counts(deployment, counts),
        "selector": names.selector_text(deployment),
        "url": names.url(deployment, cluster_domain),
        "conditions": conditions,
    }
    if image := _image(seen.live):
        out["image"] = image
    if deployment.spec.autoscaling and (
        capacity := rounded_capacity(deployment.status.get("replicaCapacity"), seen.scaling.capacity)
    ):
        out["replicaCapacity"] = capacity
    return out


def invalid_status(deployment: InvalidLLMDeployment, live: Json | None, now: float) -> Json:
    """The status with an invalid spec: pods are counted, everything else stays."""
    counts = (live or {}).get("status") or {}
    problem = Problem("InvalidSpec", f"{deployment.error}; correct it. Running pods are unchanged")
    available = counts.get("availableReplicas", 0)
    conditions = [
        _condition("Ready", False, problem.reason, problem.message),
        _condition("Available", True, "Serving", f"{available} replicas serve requests")
        if available
        else _condition("Available", False, problem.reason, problem.message),
        _condition("Progressing", False, problem.reason, problem.message),
        _degraded(problem),
    ]
    _set_times(conditions, deployment, now)
    fields = ("selector", "url", "image", "replicaCapacity")
    kept = {name: value for name, value in deployment.status.items() if name in fields}
    return {**_counts(deployment, counts), **kept, "conditions": conditions}


def _counts(deployment: LLMDeployment | InvalidLLMDeployment, counts: Json) -> Json:
    kinds = ("replicas", "readyReplicas", "availableReplicas", "updatedReplicas")
    return {"observedGeneration": deployment.generation, **{name: counts.get(name, 0) for name in kinds}}


def _set_times(conditions: list[Json], deployment: LLMDeployment | InvalidLLMDeployment, now: float) -> None:
    before = {condition["type"]: condition for condition in deployment.status.get("conditions") or []}
    timestamp = datetime.fromtimestamp(int(now), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    for condition in conditions:
        known = before.get(condition["type"])
        same = known is not None and known.get("status") == condition["status"]
        condition["lastTransitionTime"] = known["lastTransitionTime"] if same and known else timestamp
        condition["observedGeneration"] = deployment.generation


def events(before: Json, after: Json) -> list[Event]:
    """Events for conditions whose status or reason changed."""
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
            out.append(Event("Normal", "Recovered", f"{old['reason']} is resolved"))
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


def _find_problem(deployment: LLMDeployment, seen: Observation) -> Problem | None:
    gpu = deployment.spec.accelerator.resource if deployment.spec.accelerator else None
    found = [(pod, problem) for pod in seen.pods if (problem := diagnose(pod, gpu, _events(seen, pod)))]
    if one := most_severe([problem for _, problem in found]):
        count = sum(problem.reason == one.reason for _, problem in found)
        total = sum(not is_finished(pod) for pod in seen.pods)
        where = f"{count} of {total} pods: " if total > 1 else ""
        return Problem(one.reason, where + one.message)
    counts = (seen.live or {}).get("status") or {}
    if counts.get("availableReplicas", 0) < deployment.replicas and (one := eviction_problem(seen.pods)):
        return one
    for condition in counts.get("conditions") or []:
        message = condition.get("message", "")
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            if "exceeded quota" in message:
                return Problem(
                    "QuotaExceeded",
                    f"the namespace's quota is exhausted; raise it or lower resources. {message}",
                )
            if "violates PodSecurity" in message:
                return Problem(
                    "PodSecurityViolation",
                    f"the namespace's Pod Security level rejects the pods; see spec.podPatches. {message}",
                )
            return Problem("PodsNotCreated", f"creating pods fails: {message}")
        if condition["type"] == "Progressing" and condition.get("reason") == "ProgressDeadlineExceeded":
            return Problem(
                "ProgressDeadlineExceeded",
                "the rollout makes no progress: pods run but do not become ready in time; see their logs, or raise "
                "probes.startup.budgetSeconds and rollout.progressDeadlineSeconds",
            )
    if seen.claim and (seen.claim.get("status") or {}).get("phase") == "Lost":
        return Problem(
            "PVCLost", "the volume of the cache's PersistentVolumeClaim is lost; delete the claim to get a new one"
        )
    return None


def _events(seen: Observation, pod: Json) -> list[Json]:
    return seen.pod_events.get(pod["metadata"].get("uid", ""), [])


def _image_pull_progress(seen: Observation) -> str | None:
    return next((text for pod in seen.pods if (text := image_pull_progress(_events(seen, pod)))), None)


def _available(deployment: LLMDeployment, seen: Observation, problem: Problem | None) -> Json:
    counts = (seen.live or {}).get("status") or {}
    available = counts.get("availableReplicas", 0)
    if available:
        return _condition("Available", True, "Serving", f"{available} of {deployment.replicas} replicas serve requests")
    if deployment.replicas == 0:
        if deployment.spec.suspend:
            return _condition("Available", False, "Suspended", "spec.suspend is true: set it to false to serve again")
        return _condition("Available", False, "ScaledToZero", "spec.replicas is 0: raise it to serve again")
    if problem:
        return _condition("Available", False, problem.reason, problem.message)
    if text := _image_pull_progress(seen):
        return _condition("Available", False, "PullingImage", text)
    return _condition("Available", False, "Starting", "no replica serves requests yet")


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
    if text := _image_pull_progress(seen):
        done += f"; {text}"
    if seen.made_room:
        return _condition(
            "Progressing",
            True,
            "MakingRoom",
            f"no room for an additional pod, so old pods are stopped first; {done}",
        )
    if problem and problem.reason == "ProgressDeadlineExceeded":
        return _condition("Progressing", False, problem.reason, problem.message)
    old = len({revision(pod) for pod in seen.pods if not is_finished(pod)}) > 1
    return _condition("Progressing", True, "RollingOut" if old else "Starting", done)


def _degraded(problem: Problem | None) -> Json:
    if problem:
        return _condition("Degraded", True, problem.reason, problem.message)
    return _condition("Degraded", False, "AsExpected", "no problem")


_DOWNLOAD = frozenset({"GatedModel", "Unauthorized", "ModelNotFound", "CacheFull", "DownloadFailed"})


def _model_cached(deployment: LLMDeployment, seen: Observation, problem: Problem | None) -> Json:
    wanted = _fetch_arguments(seen.template or {})  # pods of an earlier spec may have fetched another model
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
    persists = names.cache_claim(deployment) or seen.template is None
    if known and (known["status"], known["message"]) == ("True", cached) and persists:
        return _condition("ModelCached", True, "Fetched", cached)
    return _condition("ModelCached", None, "NotFetchedYet", "no pod has fetched the model yet")


def _image_up_to_date(turn: ImageTurn) -> Json:
    kind = "ImageUpToDate"
    if not turn.is_behind:
        return _condition(kind, True, "UpToDate", f"the pods have the operator's engine image {turn.image}")
    if turn.may_update:
        return _condition(kind, False, "RollingOut", f"the pods are being updated to {turn.image}")
    names, more = ", ".join(turn.waits_for[:3]), len(turn.waits_for) - 3
    return _condition(
        kind, False, "WaitingForOthers",
        f"{turn.image} is rolled out gradually; before this one: {names}{f' and {more} more' if more > 0 else ''}",
    )  # fmt: skip


def _fetched(deployment: LLMDeployment) -> str:
    model = deployment.spec.model
    return f"{model.uri} ({model.revision})" if model.revision else model.uri


def _fetch_arguments(pod: Json) -> Any:
    """Arguments of the fetch container of a pod or pod template: which model it fetches."""
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
    return _condition("Ready", True, "Ready", f"{count} of {count} replicas serve requests")


def _outdated(live: Json, deployment: LLMDeployment) -> bool:
    """Whether the Deployment does not have the spec's number of replicas yet."""
    return bool(live["spec"].get("replicas") != deployment.replicas)


def _image(live: Json | None) -> str | None:
    containers = ((live or {}).get("spec") or {}).get("template", {}).get("spec", {}).get("containers") or []
    return next((container.get("image") for container in containers if container["name"] == names.ENGINE), None)
