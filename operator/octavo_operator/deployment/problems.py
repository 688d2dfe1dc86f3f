"""The problem of an LLMDeployment's pods, from what is observed of them. Pure."""

from __future__ import annotations

from typing import Any

from octavo_operator.api import LLMDeployment
from octavo_operator.config import OperatorConfig
from octavo_operator.deployment.decisions import Decisions
from octavo_operator.deployment.routing import NOT_READY, Routers
from octavo_operator.deployment.world import DeploymentWorld
from octavo_operator.groups.endings import ending
from octavo_operator.observed.diagnosis import NO_PLACE, Problem, diagnose, eviction_problem, is_finished, most_severe
from octavo_operator.observed.hanging import events_of_controllers
from octavo_operator.observed.refusals import refused_in_events, refused_pods
from octavo_operator.observed.workload import Workload
from octavo_operator.render.snippets import SNIPPET, refused_service
from octavo_operator.render.workload import KIND as GROUPS

Json = dict[str, Any]


def find_problem(deployment: LLMDeployment, world: DeploymentWorld, decisions: Decisions) -> Problem | None:
    """Return the problem to report for the engine's pods, their workload and their volume."""
    workload, pods = decisions.workload, [*world.pods, *world.workers]
    found = _pod_problem(deployment, world, workload.available >= deployment.replicas)
    if decisions.schedule.problem and (found is None or found.reason in NO_PLACE):
        return decisions.schedule.problem
    if found:
        return found
    is_grouped = (decisions.live or {}).get("kind") == GROUPS
    if is_grouped and (one := ending(deployment, pods, workload.ready >= deployment.replicas)):
        return one
    if workload.available < deployment.replicas and (one := eviction_problem(pods)):
        return one
    if one := refused_pods(workload.conditions, "resources"):
        return one
    if is_grouped and (one := refused_in_events(events_of_controllers("StatefulSet", world.pod_events), "resources")):
        return one
    return _stuck_rollout(workload) or _lost_claim(world)


def _pod_problem(deployment: LLMDeployment, world: DeploymentWorld, are_enough: bool) -> Problem | None:
    """`are_enough`: all replicas are available, so that pods which cannot end do no harm."""
    gpu = deployment.spec.accelerator.resource if deployment.spec.accelerator else None
    pods = [*world.pods, *world.workers]
    counted = [pod for pod in pods if not (are_enough and "deletionTimestamp" in pod["metadata"])]
    problems = [one for pod in counted if (one := diagnose(pod, gpu, events_of(world, pod)))]
    worst = most_severe(problems)
    if worst is None:
        return None
    count = sum(problem.reason == worst.reason for problem in problems)
    total = sum(not is_finished(pod) for pod in pods)
    where = f"{count} of {total} pods: " if total > 1 else ""
    return Problem(worst.reason, where + worst.message)


def events_of(world: DeploymentWorld, pod: Json) -> list[Json]:
    """Return the events of a pod that hangs; none of another."""
    return world.pod_events.get(pod["metadata"].get("uid", ""), [])


def _stuck_rollout(workload: Workload) -> Problem | None:
    for condition in workload.conditions:
        if condition["type"] == "Progressing" and condition.get("reason") == "ProgressDeadlineExceeded":
            return Problem(
                "ProgressDeadlineExceeded",
                "the rollout makes no progress: pods run but do not become ready in time; see their logs, or raise "
                "probes.startup.budgetSeconds and rollout.progressDeadlineSeconds",
            )
    return None


def _lost_claim(world: DeploymentWorld) -> Problem | None:
    if ((world.claim or {}).get("status") or {}).get("phase") != "Lost":
        return None
    return Problem(
        "PVCLost", "the volume of the cache's PersistentVolumeClaim is lost; delete the claim to get a new one"
    )


def pool_problem(deployment: LLMDeployment, apis: frozenset[str]) -> Problem | None:
    """Return a problem if the cluster lacks the InferencePools that the spec asks for."""
    if deployment.spec.inference_pool is None or "InferencePool" in apis:
        return None
    return Problem(
        "InferencePoolNotInstalled",
        "this cluster has no InferencePools (inference.networking.k8s.io/v1); install the Gateway API Inference "
        "Extension, or remove spec.inferencePool. The Service keeps serving",
    )


def router_pods_problem(routers: Routers) -> Problem | None:
    """Return the routers' problem under one reason, whatever it is: the engine's pods have their own."""
    one = routers.problem
    return Problem(NOT_READY, f"routers: {one.reason}: {one.message}") if one else None


def refused_annotations(deployment: LLMDeployment, config: OperatorConfig) -> Problem | None:
    """Return a problem if the Service's annotations would inject configuration into an ingress controller."""
    why = refused_service(deployment.spec.service.annotations, config)
    return Problem(SNIPPET, why) if why else None
