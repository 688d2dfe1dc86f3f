"""The status of an LLMDeployment: counts, conditions and events, from observed objects. Pure; the time is an argument.

Available        at least one replica serves requests
Ready            all replicas serve, all of the latest spec, and there is no problem
Progressing      a rollout is in progress (False: complete, or stuck)
ModelCached      the model has been fetched (absent where nothing is fetched)
RouterReady      all routers serve, and have a replica to ask (absent unless routing.strategy is prefix)
ImageUpToDate    the pods have the operator's engine image (absent unless they follow it)
AdaptersReady    all pods serve all LoRA adapters (absent without spec.adapters)
AutoscalerReady  the number of replicas follows the load (absent without spec.autoscaling)
Degraded         there is a problem, with its cause
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from octavo_operator.api import InvalidLLMDeployment, LLMDeployment, Owner
from octavo_operator.autoscaling.condition import Scaling, autoscaler_ready
from octavo_operator.autoscaling.decision import rounded_capacity
from octavo_operator.deployment.image_rollout import ImageTurn
from octavo_operator.deployment.prefetch import Prefetch
from octavo_operator.deployment.rollout import revision
from octavo_operator.deployment.routing import KIND as ROUTER_READY
from octavo_operator.deployment.routing import NOT_READY, Routers, router_ready
from octavo_operator.groups.endings import ending
from octavo_operator.groups.places import Places
from octavo_operator.lora.summary import KIND as ADAPTERS_READY
from octavo_operator.lora.summary import LOADING, AdapterSummary
from octavo_operator.observed.diagnosis import (
    DOWNLOAD,
    NO_PLACE,
    Event,
    Events,
    Problem,
    diagnose,
    eviction_problem,
    image_pull_progress,
    is_finished,
    most_severe,
)
from octavo_operator.observed.hanging import said_by
from octavo_operator.observed.refusals import refused_in_events, refused_pods
from octavo_operator.observed.workload import Workload
from octavo_operator.render import names
from octavo_operator.render.workload import KIND as GROUPS

Json = dict[str, Any]


@dataclass(frozen=True)
class Observation:
    """The input of a status. `problem`: of the operator's own work (invalid patch, rejected object)."""

    live: Json | None  # the Deployment or LeaderWorkerSet
    pods: list[Json]  # those that serve
    claim: Json | None = None
    problem: Problem | None = None
    made_room: bool = False
    autoscaler: Json | None = None  # the HorizontalPodAutoscaler or ScaledObject
    scaling: Scaling = field(default_factory=Scaling)
    apis: frozenset[str] = frozenset()  # optional kinds that the cluster has
    pending: bool = False  # `live` is not yet updated to the current spec
    template: Json | None = None  # pod template of the current spec; None: it yields none (an invalid patch)
    image_turn: ImageTurn | None = None  # of one that follows the operator's engine image
    contested: Problem | None = None  # an object that is not as the spec wants it: pods may serve all the same
    pod_events: Events = field(default_factory=dict)  # of hanging pods
    routers: Routers = field(default_factory=Routers)
    prefetch: Prefetch = field(default_factory=Prefetch)
    start: Json | None = None  # of the last pod that became ready
    workers: list[Json] = field(default_factory=list)  # the other pods of groups
    places: Places = field(default_factory=Places)  # of groups
    adapters: AdapterSummary | None = None  # None: LoRA is off

    @cached_property
    def workload(self) -> Workload:
        """Numbers of replicas."""
        return Workload.of(self.live, self.pods, self.workers)


def expected_status(deployment: LLMDeployment, seen: Observation, cluster_domain: str, now: float) -> Json:
    """The whole status. lastTransitionTime of a condition changes only with its status."""
    problem = seen.problem or _find_problem(deployment, seen) or seen.prefetch.problem
    conditions = [_available(deployment, seen, problem), _progressing(deployment, seen, problem)]
    conditions.append(
        degraded(problem or seen.contested or _router_problem(seen) or _pool_problem(deployment, seen.apis))
    )
    if router := router_ready(deployment, seen.routers, seen.workload.available):
        conditions.insert(-1, make_condition(ROUTER_READY, *router))
    if deployment.spec.model.is_fetched:
        conditions.insert(0, _model_cached(deployment, seen, problem))
    if verdict := autoscaler_ready(deployment, seen.autoscaler, seen.scaling, seen.apis):
        conditions.insert(-1, make_condition("AutoscalerReady", *verdict))
    if seen.adapters:
        conditions.insert(-1, make_condition(ADAPTERS_READY, *seen.adapters.condition))
    if seen.image_turn:
        conditions.insert(-1, _image_up_to_date(seen.image_turn))
    conditions.insert(0, _ready(deployment, seen, conditions, problem))
    set_times(conditions, deployment, now)
    out: Json = {
        **_counts(deployment, seen.workload),
        "selector": names.selector_text(deployment),
        "url": names.url(deployment, cluster_domain),
        "conditions": conditions,
    }
    if image := _image(seen.workload.template):
        out["image"] = image
    if seen.start:
        out["start"] = seen.start
    if seen.adapters:
        out["adapters"] = seen.adapters.adapters
    if deployment.spec.autoscaling and (
        capacity := rounded_capacity(deployment.status.get("replicaCapacity"), seen.scaling.capacity)
    ):
        out["replicaCapacity"] = capacity
    return out


def invalid_status(deployment: InvalidLLMDeployment, workload: Workload, now: float) -> Json:
    """The status with an invalid spec: pods are counted, everything else stays."""
    problem = Problem("InvalidSpec", f"{deployment.error}; correct it. Running pods are unchanged")
    available = workload.available
    conditions = [
        make_condition("Ready", False, problem.reason, problem.message),
        make_condition("Available", True, "Serving", f"{available} replicas serve requests")
        if available
        else make_condition("Available", False, problem.reason, problem.message),
        make_condition("Progressing", False, problem.reason, problem.message),
        degraded(problem),
    ]
    set_times(conditions, deployment, now)
    fields = ("selector", "url", "image", "replicaCapacity", "start", "adapters")
    kept = {name: value for name, value in deployment.status.items() if name in fields}
    return {**_counts(deployment, workload), **kept, "conditions": conditions}


def _counts(deployment: LLMDeployment | InvalidLLMDeployment, workload: Workload) -> Json:
    return {"observedGeneration": deployment.generation, **workload.counts}


def set_times(conditions: list[Json], owner: Owner, now: float) -> None:
    """Completes the conditions. lastTransitionTime of one changes only with its status."""
    before = {condition["type"]: condition for condition in owner.status.get("conditions") or []}
    timestamp = datetime.fromtimestamp(int(now), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    for condition in conditions:
        known = before.get(condition["type"])
        same = known is not None and known.get("status") == condition["status"]
        condition["lastTransitionTime"] = known["lastTransitionTime"] if same and known else timestamp
        condition["observedGeneration"] = owner.generation


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
            by_design = name == "ScaledToZero"
            out.append(Event("Normal", name, condition["message"]) if by_design else _unavailable(condition))
        elif kind == "ModelCached" and status == "True":
            out.append(Event("Normal", "ModelCached", condition["message"]))
        elif kind == ROUTER_READY and status == "False" and old and old["status"] == "True":
            out.append(Event("Warning", NOT_READY, condition["message"]))
        elif kind in ("AutoscalerReady", ADAPTERS_READY) and status == "False" and name != LOADING:
            out.append(Event("Warning", name, condition["message"]))
        elif kind in ("AutoscalerReady", ADAPTERS_READY) and status == "True" and old and old["status"] == "False":
            out.append(Event("Normal", kind, condition["message"]))
        elif kind == "Progressing" and name in ("MakingRoom", "Prefetching"):
            out.append(Event("Normal" if name == "Prefetching" else "Warning", name, condition["message"]))
    return out


def _unavailable(condition: Json) -> Event:
    return Event("Warning", "Unavailable", condition["message"])


def make_condition(kind: str, status: bool | None, reason: str, message: str) -> Json:
    """A condition, without its times. `status`: None: unknown."""
    text = {True: "True", False: "False", None: "Unknown"}[status]
    return {"type": kind, "status": text, "reason": reason, "message": message[:1024]}


def _find_problem(deployment: LLMDeployment, seen: Observation) -> Problem | None:
    gpu = deployment.spec.accelerator.resource if deployment.spec.accelerator else None
    pods = [*seen.pods, *seen.workers]
    enough = seen.workload.available >= deployment.replicas  # those that cannot end do no harm then
    counted = [pod for pod in pods if not (enough and "deletionTimestamp" in pod["metadata"])]
    found = [(pod, problem) for pod in counted if (problem := diagnose(pod, gpu, _events(seen, pod)))]
    one = most_severe([problem for _, problem in found])
    if seen.places.problem and (one is None or one.reason in NO_PLACE):
        return seen.places.problem
    if one:
        count = sum(problem.reason == one.reason for _, problem in found)
        total = sum(not is_finished(pod) for pod in pods)
        where = f"{count} of {total} pods: " if total > 1 else ""
        return Problem(one.reason, where + one.message)
    is_grouped = (seen.live or {}).get("kind") == GROUPS
    if is_grouped and (one := ending(deployment, pods, seen.workload.ready >= deployment.replicas)):
        return one
    if seen.workload.available < deployment.replicas and (one := eviction_problem(pods)):
        return one
    if one := refused_pods(seen.workload.conditions, "resources"):
        return one
    if is_grouped and (one := refused_in_events(said_by("StatefulSet", seen.pod_events), "resources")):
        return one
    for condition in seen.workload.conditions:
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
    pods = [*seen.pods, *seen.workers]
    return next((text for pod in pods if (text := image_pull_progress(_events(seen, pod)))), None)


def _available(deployment: LLMDeployment, seen: Observation, problem: Problem | None) -> Json:
    available = seen.workload.available
    if available and seen.routers.stage.is_routed and not seen.routers.available:
        cause = f": {seen.routers.problem.message}" if seen.routers.problem else ""
        count = f"{available} of {deployment.replicas} replicas serve, and no router{cause}"
        return make_condition("Available", False, NOT_READY, count)
    if available:
        return make_condition(
            "Available", True, "Serving", f"{available} of {deployment.replicas} replicas serve requests"
        )
    if deployment.replicas == 0:
        if deployment.spec.suspend:
            return make_condition(
                "Available", False, "Suspended", "spec.suspend is true: set it to false to serve again"
            )
        reason = "spec.replicas is 0: raise it to serve again"
        if deployment.is_woken_by_requests:
            reason = "no replica runs, since nobody asked for anything: the next request starts one, and waits for it"
        return make_condition("Available", False, "ScaledToZero", reason)
    if problem:
        return make_condition("Available", False, problem.reason, problem.message)
    if text := _image_pull_progress(seen):
        return make_condition("Available", False, "PullingImage", text)
    return make_condition("Available", False, "Starting", "no replica serves requests yet")


def _progressing(deployment: LLMDeployment, seen: Observation, problem: Problem | None) -> Json:
    workload = seen.workload
    if seen.live is None or seen.pending or workload.wanted != deployment.replicas - seen.places.num_held:
        if seen.problem:
            return make_condition("Progressing", False, seen.problem.reason, seen.problem.message)
        if seen.prefetch.holds:
            what = f"{_fetched(deployment)} is being fetched; then the pods are replaced"
            return make_condition("Progressing", True, "Prefetching", what)
        return make_condition("Progressing", True, "Applying", "the spec is being applied")
    if workload.is_complete:
        return make_condition("Progressing", False, "Complete", "all pods are of the latest spec")
    if seen.problem:
        return make_condition("Progressing", False, seen.problem.reason, seen.problem.message)
    done = (
        f"{workload.updated} of {deployment.replicas} replicas are of the latest spec, {workload.available} available"
    )
    if text := _image_pull_progress(seen):
        done += f"; {text}"
    if seen.made_room:
        return make_condition(
            "Progressing",
            True,
            "MakingRoom",
            f"no room for an additional pod, so old pods are stopped first; {done}",
        )
    if problem and problem.reason == "ProgressDeadlineExceeded":
        return make_condition("Progressing", False, problem.reason, problem.message)
    old = len({revision(pod) for pod in seen.pods if not is_finished(pod)}) > 1
    return make_condition("Progressing", True, "RollingOut" if old else "Starting", done)


def _router_problem(seen: Observation) -> Problem | None:
    """Under one reason, whatever it is: the engine's pods have their own."""
    one = seen.routers.problem
    return Problem(NOT_READY, f"routers: {one.reason}: {one.message}") if one else None


def _pool_problem(deployment: LLMDeployment, apis: frozenset[str]) -> Problem | None:
    if deployment.spec.inference_pool is None or "InferencePool" in apis:
        return None
    return Problem(
        "InferencePoolNotInstalled",
        "this cluster has no InferencePools (inference.networking.k8s.io/v1); install the Gateway API Inference "
        "Extension, or remove spec.inferencePool. The Service serves all the same",
    )


def degraded(problem: Problem | None) -> Json:
    """The condition Degraded."""
    if problem:
        return make_condition("Degraded", True, problem.reason, problem.message)
    return make_condition("Degraded", False, "AsExpected", "no problem")


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
        return make_condition("ModelCached", True, "Fetched", cached)
    if seen.prefetch.is_done:
        return make_condition("ModelCached", True, "Fetched", cached)
    if problem and problem.reason in DOWNLOAD:
        return make_condition("ModelCached", False, problem.reason, problem.message)
    if seen.prefetch.holds or any("running" in state for state in states):
        return make_condition("ModelCached", False, "Fetching", f"{_fetched(deployment)} is being fetched")
    known = next((c for c in deployment.status.get("conditions") or [] if c["type"] == "ModelCached"), None)
    persists = names.cache_claim(deployment) or seen.template is None
    if known and (known["status"], known["message"]) == ("True", cached) and persists:
        return make_condition("ModelCached", True, "Fetched", cached)
    return make_condition("ModelCached", None, "NotFetchedYet", "no pod has fetched the model yet")


def _image_up_to_date(turn: ImageTurn) -> Json:
    kind = "ImageUpToDate"
    if not turn.is_behind:
        return make_condition(kind, True, "UpToDate", f"the pods have the operator's engine image {turn.image}")
    if turn.may_update:
        return make_condition(kind, False, "RollingOut", f"the pods are being updated to {turn.image}")
    names, more = ", ".join(turn.waits_for[:3]), len(turn.waits_for) - 3
    return make_condition(
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
        return make_condition("Ready", False, problem.reason, problem.message)
    if by_kind["Available"]["status"] != "True":
        return make_condition("Ready", False, by_kind["Available"]["reason"], by_kind["Available"]["message"])
    if by_kind["Progressing"]["reason"] != "Complete":
        return make_condition("Ready", False, by_kind["Progressing"]["reason"], by_kind["Progressing"]["message"])
    if (router := by_kind.get(ROUTER_READY)) and router["status"] != "True":
        return make_condition("Ready", False, NOT_READY, router["message"])
    count = deployment.replicas
    return make_condition("Ready", True, "Ready", f"{count} of {count} replicas serve requests")


def _image(template: Json) -> str | None:
    containers = (template.get("spec") or {}).get("containers") or []
    return next((container.get("image") for container in containers if container["name"] == names.ENGINE), None)
