"""The conditions of an LLMDeployment's status: their reasons and words. Pure.

Available        at least one replica serves requests
Ready            all replicas serve, all of the latest spec, and there is no problem
Progressing      a rollout is in progress (False: complete, or stuck)
ModelCached      the model has been fetched (absent where nothing is fetched)
RouterReady      all routers serve, and have a replica to ask (absent unless routing.strategy is prefix)
ChatFormat       the format of the model's tool calls is known (absent until an engine has told it)
ImageUpToDate    the pods have the operator's engine image (absent unless they follow it)
AdaptersReady    all pods serve all LoRA adapters (absent without spec.adapters)
AutoscalerReady  the number of replicas follows the load (absent without spec.autoscaling)
Degraded         there is a problem, with its cause

deployment/routing.py has the words of RouterReady, lora/summary.py of AdaptersReady, autoscaling/condition.py of
AutoscalerReady, observed/diagnosis.py of the problems of pods.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from octavo_operator.api import LLMDeployment, Owner
from octavo_operator.deployment.decisions import Decisions
from octavo_operator.deployment.image_rollout import ImageTurn
from octavo_operator.deployment.problems import events_of
from octavo_operator.deployment.rollout import revision
from octavo_operator.deployment.routing import KIND as ROUTER_READY
from octavo_operator.deployment.routing import NOT_READY
from octavo_operator.deployment.world import DeploymentWorld
from octavo_operator.observed.diagnosis import DOWNLOAD, Problem, image_pull_progress, is_finished
from octavo_operator.render import names

Json = dict[str, Any]


def make_condition(kind: str, status: bool | None, reason: str, message: str) -> Json:
    """Return a condition without its times. `status`: None means unknown."""
    text = {True: "True", False: "False", None: "Unknown"}[status]
    return {"type": kind, "status": text, "reason": reason, "message": message[:1024]}


def set_times(conditions: list[Json], owner: Owner, now: float) -> None:
    """Complete the conditions. lastTransitionTime of one changes only with its status."""
    before = {condition["type"]: condition for condition in owner.status.get("conditions") or []}
    timestamp = datetime.fromtimestamp(int(now), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    for condition in conditions:
        known = before.get(condition["type"])
        same = known is not None and known.get("status") == condition["status"]
        condition["lastTransitionTime"] = known["lastTransitionTime"] if same and known else timestamp
        condition["observedGeneration"] = owner.generation


def degraded(problem: Problem | None) -> Json:
    """Return the condition Degraded."""
    if problem:
        return make_condition("Degraded", True, problem.reason, problem.message)
    return make_condition("Degraded", False, "AsExpected", "no problem")


def available(deployment: LLMDeployment, world: DeploymentWorld, decisions: Decisions, problem: Problem | None) -> Json:
    """Return the condition Available. `problem`: the one that the status reports."""
    kind, count, routers = "Available", decisions.workload.available, decisions.routers
    if count and routers.stage.is_routed and not routers.available:
        cause = f": {routers.problem.message}" if routers.problem else ""
        text = f"{count} of {deployment.replicas} replicas serve, and no router{cause}"
        return make_condition(kind, False, NOT_READY, text)
    if count:
        return make_condition(kind, True, "Serving", f"{count} of {deployment.replicas} replicas serve requests")
    if deployment.replicas == 0:
        if deployment.spec.suspend:
            return make_condition(kind, False, "Suspended", "spec.suspend is true: set it to false to serve again")
        return make_condition(kind, False, "ScaledToZero", _why_zero(deployment))
    if problem:
        return make_condition(kind, False, problem.reason, problem.message)
    if progress := _image_pull_progress(world):
        return make_condition(kind, False, "PullingImage", progress)
    return make_condition(kind, False, "Starting", "no replica serves requests yet")


def _why_zero(deployment: LLMDeployment) -> str:
    if deployment.is_woken_by_requests:
        return "no replica runs, because no request came: the next request starts one, and waits for it"
    return "spec.replicas is 0: raise it to serve again"


def progressing(
    deployment: LLMDeployment, world: DeploymentWorld, decisions: Decisions, problem: Problem | None
) -> Json:
    """Return the condition Progressing. `problem`: the one that the status reports."""
    workload = decisions.workload
    if (
        decisions.live is None
        or decisions.pending
        or workload.wanted != deployment.replicas - decisions.schedule.num_held
    ):
        if decisions.problem:
            return make_condition("Progressing", False, decisions.problem.reason, decisions.problem.message)
        if decisions.prefetch.holds:
            what = f"{_fetched(deployment)} is being fetched; then the pods are replaced"
            return make_condition("Progressing", True, "Prefetching", what)
        return make_condition("Progressing", True, "Applying", "the spec is being applied")
    if workload.is_complete:
        return make_condition("Progressing", False, "Complete", "all pods are of the latest spec")
    if decisions.problem:
        return make_condition("Progressing", False, decisions.problem.reason, decisions.problem.message)
    done = (
        f"{workload.updated} of {deployment.replicas} replicas are of the latest spec, {workload.available} available"
    )
    if text := _image_pull_progress(world):
        done += f"; {text}"
    if decisions.room:
        return make_condition(
            "Progressing",
            True,
            "StoppingOldPods",
            f"no room for an additional pod, so old pods are stopped first; {done}",
        )
    if problem and problem.reason == "ProgressDeadlineExceeded":
        return make_condition("Progressing", False, problem.reason, problem.message)
    old = len({revision(pod) for pod in world.pods if not is_finished(pod)}) > 1
    return make_condition("Progressing", True, "RollingOut" if old else "Starting", done)


def model_cached(
    deployment: LLMDeployment, world: DeploymentWorld, decisions: Decisions, problem: Problem | None
) -> Json:
    """Return the condition ModelCached. `problem`: the one that the status reports."""
    wanted = _fetch_arguments(
        decisions.template.current or {}
    )  # pods of an earlier spec may have fetched another model
    states = [
        status.get("state") or {}
        for pod in world.pods
        if "deletionTimestamp" not in pod["metadata"] and _fetch_arguments(pod) == wanted
        for status in (pod.get("status") or {}).get("initContainerStatuses") or []
        if status["name"] == names.FETCH
    ]
    cached = f"{_fetched(deployment)} is in the cache"
    if any((state.get("terminated") or {}).get("exitCode") == 0 for state in states):
        return make_condition("ModelCached", True, "Fetched", cached)
    if decisions.prefetch.is_done:
        return make_condition("ModelCached", True, "Fetched", cached)
    if problem and problem.reason in DOWNLOAD:
        return make_condition("ModelCached", False, problem.reason, problem.message)
    if decisions.prefetch.holds or any("running" in state for state in states):
        return make_condition("ModelCached", False, "Fetching", f"{_fetched(deployment)} is being fetched")
    known = next((c for c in deployment.status.get("conditions") or [] if c["type"] == "ModelCached"), None)
    persists = names.cache_claim(deployment) or decisions.template.current is None
    if known and (known["status"], known["message"]) == ("True", cached) and persists:
        return make_condition("ModelCached", True, "Fetched", cached)
    return make_condition("ModelCached", None, "NotFetchedYet", "no pod has fetched the model yet")


def kept_found(deployment: LLMDeployment) -> Json | None:
    """The `KeptFound` condition: True if requests reach the replica that keeps what they name. None: there is one
    replica."""
    kind, strategy = "KeptFound", deployment.spec.routing.strategy
    if deployment.replicas < 2:
        return None
    responses, kept = deployment.spec.responses, "stored response, file and batch"
    is_shared = responses is not None and responses.store == "Postgres"
    if is_shared:
        kept = "file and batch"
    what = f"each {kept} is kept by one of {deployment.replicas} replicas"
    if strategy == "prefix":
        return make_condition(kind, True, "Routed", f"{what}; routers find it by their ids")
    if is_shared:
        found = f"responses and conversations are in PostgreSQL, which all {deployment.replicas} replicas have"
        remedy = "clients that use files and batches need routing.strategy: prefix"
        return make_condition(kind, True, "Shared", f"{found}; {what}: {remedy}")
    whose = "requests of one client address to one of them" if strategy == "clientIP" else "each request to any of them"
    remedy = (
        "for previous_response_id, files and batches set routing.strategy: prefix, or one replica; for the former "
        "alone responses.store: Postgres"
    )
    return make_condition(kind, False, "NotRouted", f"{what}, and the Service sends {whose}: {remedy}")


def chat_format(start: Json | None) -> Json | None:
    """The `ChatFormat` condition, by what the engine of the pod that became ready last has told; None: nothing yet."""
    kind, found = "ChatFormat", (start or {}).get("toolFormat")
    if found is None:
        return None
    if found != "generic":
        return make_condition(kind, True, "Known", f"the model's tool calls are read in the format {found}")
    why = "the chat template shows no format of tool calls that is known, so a prompt of the engine's own asks for some"
    remedy = "a model that was not trained on it calls tools less well; --tool-call-parser in engine.args names another"
    return make_condition(kind, False, "Generic", f"{why}: {remedy}")


def image_up_to_date(turn: ImageTurn) -> Json:
    """Return the condition ImageUpToDate."""
    kind = "ImageUpToDate"
    if not turn.is_behind:
        return make_condition(kind, True, "UpToDate", f"the pods have the operator's engine image {turn.image}")
    if turn.may_update:
        return make_condition(kind, False, "RollingOut", f"the pods are being updated to {turn.image}")
    names, more = ", ".join(turn.waits_for[:3]), len(turn.waits_for) - 3
    return make_condition(
        kind,
        False,
        "RolloutQueued",
        f"{turn.image} is rolled out gradually; before this one: {names}{f' and {more} more' if more > 0 else ''}",
    )


def _fetched(deployment: LLMDeployment) -> str:
    model = deployment.spec.model
    return f"{model.uri} ({model.revision})" if model.revision else model.uri


def _fetch_arguments(pod: Json) -> Any:
    """Arguments of the fetch container of a pod or pod template: which model it fetches."""
    containers = (pod.get("spec") or {}).get("initContainers") or []
    return next((container.get("args") for container in containers if container["name"] == names.FETCH), None)


def ready(deployment: LLMDeployment, conditions: list[Json], problem: Problem | None) -> Json:
    """Return the condition Ready. `conditions`: the others."""
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


def _image_pull_progress(world: DeploymentWorld) -> str | None:
    pods = [*world.pods, *world.workers]
    return next((text for pod in pods if (text := image_pull_progress(events_of(world, pod)))), None)
