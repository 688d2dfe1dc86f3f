"""The status of an LLMDeployment: counts, conditions and what else it shows. Pure."""

from __future__ import annotations

from typing import Any

from octavo_operator.api import InvalidLLMDeployment, LLMDeployment
from octavo_operator.autoscaling.condition import autoscaler_ready
from octavo_operator.autoscaling.decision import rounded_capacity
from octavo_operator.config import OperatorConfig
from octavo_operator.deployment.conditions import (
    available,
    chat_format,
    degraded,
    image_up_to_date,
    kept_found,
    make_condition,
    model_cached,
    progressing,
    ready,
    set_times,
)
from octavo_operator.deployment.decisions import Decisions
from octavo_operator.deployment.problems import find_problem, pool_problem, refused_annotations, router_pods_problem
from octavo_operator.deployment.routing import KIND as ROUTER_READY
from octavo_operator.deployment.routing import router_ready
from octavo_operator.deployment.world import DeploymentWorld
from octavo_operator.lora.summary import KIND as ADAPTERS_READY
from octavo_operator.observed.diagnosis import Problem
from octavo_operator.observed.workload import Workload
from octavo_operator.render import names
from octavo_operator.render.autoscaling import autoscaler_kind

Json = dict[str, Any]


def expected_status(
    deployment: LLMDeployment, world: DeploymentWorld, decisions: Decisions, config: OperatorConfig
) -> Json:
    """Return the whole status. lastTransitionTime of a condition changes only with its status."""
    conditions = _conditions(deployment, world, decisions, config)
    set_times(conditions, deployment, world.now)
    out: Json = {
        **_counts(deployment, decisions.workload),
        "selector": names.selector_text(deployment),
        "url": names.url(deployment, config.cluster_domain),
        "conditions": conditions,
    }
    if image := _image(decisions.workload.template):
        out["image"] = image
    if world.start:
        out["start"] = world.start
    if decisions.adapters:
        out["adapters"] = decisions.adapters.adapters
    capacity = rounded_capacity(deployment.status.get("replicaCapacity"), decisions.scaling.capacity)
    if deployment.spec.autoscaling and capacity:
        out["replicaCapacity"] = capacity
    return out


def _conditions(
    deployment: LLMDeployment, world: DeploymentWorld, decisions: Decisions, config: OperatorConfig
) -> list[Json]:
    problem = decisions.problem or find_problem(deployment, world, decisions) or decisions.prefetch.problem
    harmless = (
        world.field_conflict
        or refused_annotations(deployment, config)
        or router_pods_problem(decisions.routers)
        or pool_problem(deployment, world.apis)
    )
    conditions = [available(deployment, world, decisions, problem), progressing(deployment, world, decisions, problem)]
    if deployment.spec.model.is_fetched:
        conditions.insert(0, model_cached(deployment, world, decisions, problem))
    if router := router_ready(deployment, decisions.routers, decisions.workload.available):
        conditions.append(make_condition(ROUTER_READY, *router))
    autoscaler = world.child(autoscaler_kind(deployment), deployment.name)
    if verdict := autoscaler_ready(deployment, autoscaler, decisions.scaling, world.apis):
        conditions.append(make_condition("AutoscalerReady", *verdict))
    if decisions.adapters:
        conditions.append(make_condition(ADAPTERS_READY, *decisions.adapters.condition))
    if kept := kept_found(deployment):
        conditions.append(kept)
    if form := chat_format(world.start):
        conditions.append(form)
    if world.image_turn:
        conditions.append(image_up_to_date(world.image_turn))
    conditions.append(degraded(problem or harmless))
    return [ready(deployment, conditions, problem), *conditions]


def invalid_status(deployment: InvalidLLMDeployment, workload: Workload, now: float) -> Json:
    """The status with an invalid spec: pods are counted, everything else stays."""
    problem = Problem("InvalidSpec", f"{deployment.error}; correct it. Running pods are unchanged")
    count = workload.available
    conditions = [
        make_condition("Ready", False, problem.reason, problem.message),
        make_condition("Available", True, "Serving", f"{count} replicas serve requests")
        if count
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


def _image(template: Json) -> str | None:
    containers = (template.get("spec") or {}).get("containers") or []
    return next((container.get("image") for container in containers if container["name"] == names.ENGINE), None)
