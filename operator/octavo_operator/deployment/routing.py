"""The way from the engine's pods to routers and back, one step at a time, and the condition RouterReady. Pure.

Nothing is lost on the way: the Service of clients selects routers only once one of them serves, and routers end only
once the Service selects the engine's pods again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from octavo_operator.api import LLMDeployment
from octavo_operator.deployment.world import DeploymentWorld
from octavo_operator.kube.store import ObjectRef
from octavo_operator.observed.diagnosis import Problem, diagnose, is_finished, most_severe
from octavo_operator.observed.refusals import refused_pods
from octavo_operator.observed.world import World
from octavo_operator.render import names
from octavo_operator.render.network import GATEWAYS, router_peer
from octavo_operator.render.router.objects import Stage
from octavo_operator.times import parse_time

Json = dict[str, Any]

KIND = "RouterReady"
CONFIG_REJECTED = "ConfigRejected"
NOT_READY = "RouterNotReady"  # reason of Ready, Available and Degraded
# Connections to pods that were made before there were routers are used until then; policies may drop them silently.
OPEN_SECONDS = 120.0
_STEP_SECONDS = 1.0  # until the next step after a write of our own, of which no watch tells
# A router listens a second after it has started, unless Envoy rejects its configuration.
_LISTENS_SECONDS = 30.0


@dataclass(frozen=True)
class Routers:
    """The routers of an LLMDeployment as observed, and the stage they are in."""

    stage: Stage = Stage.NONE
    live: Json | None = None  # their Deployment
    pods: list[Json] = field(default_factory=list)
    problem: Problem | None = None  # of a pod of them
    requeue_after: float | None = None
    is_behind: bool = False  # Envoy has rejected an update of its files: `problem` says so, or there is a worse one

    @property
    def available(self) -> int:
        """Number of routers that serve."""
        count: int = ((self.live or {}).get("status") or {}).get("availableReplicas", 0)
        return count


def observe(deployment: LLMDeployment, world: DeploymentWorld) -> Routers:
    """Find the stage and the problem of the routers of an LLMDeployment."""
    live = world.child("Deployment", names.router(deployment.name))
    pods = [pod for pod in world.router_pods if not is_finished(pod)]
    stage, stage_due = _stage(deployment, Routers(live=live, pods=pods), world)
    if not stage.has_routers:
        return Routers(stage, live, pods, requeue_after=stage_due)
    problem, problem_due = router_problem(live, pods, world, "routing.prefix.resources")
    due = min((one for one in (stage_due, problem_due) if one is not None), default=None)
    return Routers(stage, live, pods, problem, due, world.rejected is not None)


def router_problem(
    live: Json | None, pods: list[Json], world: World, resources: str
) -> tuple[Problem | None, float | None]:
    """Return the problem of these routers, and seconds until there may be one. `live`: their Deployment; `resources`:
    the field of the spec that sets theirs."""
    events, rejected = world.pod_events, world.rejected
    status = (live or {}).get("status") or {}
    enough = status.get("availableReplicas", 0) >= ((live or {}).get("spec") or {}).get("replicas", 1)
    counted = [pod for pod in pods if not (enough and "deletionTimestamp" in pod["metadata"])]
    found = [one for pod in counted if (one := diagnose(pod, None, events.get(pod["metadata"].get("uid", ""), [])))]
    problem = most_severe(found)
    if problem and problem.reason == "CrashLoop" and "configuration" in problem.message:
        problem = Problem(CONFIG_REJECTED, problem.message)
    silent, due = _not_listening(pods, world.now)
    refused = refused_pods(status.get("conditions") or [], resources)
    found_first = problem or silent or refused
    if rejected and (found_first is None or found_first.reason == rejected.reason):
        return rejected, due  # it has Envoy's own words
    return found_first, due


def kept_objects(deployment: LLMDeployment, stage: Stage) -> frozenset[ObjectRef]:
    """Objects of routers that are no longer desired, and are not to be deleted yet."""
    router = names.router(deployment.name)
    routes = {("ConfigMap", router), ("NetworkPolicy", router), ("Service", names.pods_service(deployment.name))}
    if stage is Stage.LEAVING:
        return frozenset({*routes, ("Deployment", router), ("PodDisruptionBudget", router), ("PodMonitor", router)})
    return frozenset(routes if stage is Stage.DRAINING else ())


def _stage(deployment: LLMDeployment, routers: Routers, world: DeploymentWorld) -> tuple[Stage, float | None]:
    """Return the stage, and seconds until the next one."""
    service = world.child("Service", deployment.name)
    selected = ((service or {}).get("spec") or {}).get("selector") or {}
    is_routed = selected.get(names.COMPONENT_LABEL) == names.ROUTER
    if deployment.spec.routing.routers is None:
        if is_routed:
            return Stage.LEAVING, _STEP_SECONDS
        if routers.live:
            return Stage.DRAINING, _STEP_SECONDS
        return (Stage.DRAINING if routers.pods else Stage.NONE), None
    if service is None:
        return Stage.CLOSED, None  # nobody has reached the pods yet
    if not is_routed and not routers.available:
        return Stage.STARTING, None
    policy = world.child("NetworkPolicy", deployment.name) or {}
    rules = (policy.get("spec") or {}).get("ingress") or [{}]
    own = router_peer(deployment)
    if rules[0].get("from") in ([own], [own, GATEWAYS]):  # the first by an operator that knew no gateways
        return Stage.CLOSED, None
    conditions = deployment.status.get("conditions") or []
    since = next((c["lastTransitionTime"] for c in conditions if (c["type"], c["status"]) == (KIND, "True")), None)
    if not is_routed or since is None:
        return Stage.ROUTED, OPEN_SECONDS
    remaining = parse_time(since) + OPEN_SECONDS - world.now
    return (Stage.ROUTED, remaining) if remaining > 0 else (Stage.CLOSED, None)


def _not_listening(pods: list[Json], now: float) -> tuple[Problem | None, float | None]:
    """The problem of a router that runs and does not listen, or seconds until it would be one."""
    due = None
    for pod in pods:
        for status in (pod.get("status") or {}).get("containerStatuses") or []:
            started = ((status.get("state") or {}).get("running") or {}).get("startedAt")
            if status["name"] != names.ROUTER or status.get("ready") or not started:
                continue
            if "deletionTimestamp" in pod["metadata"]:
                continue
            remaining = parse_time(started) + _LISTENS_SECONDS - now
            if remaining <= 0:
                name = pod["metadata"]["name"]
                text = f"router {name} runs and does not listen: Envoy rejects its configuration; `kubectl logs` of it"
                return Problem(CONFIG_REJECTED, f"{text} names the reason"), None
            due = min(remaining, due or remaining)
    return None, due


def router_ready(deployment: LLMDeployment, routers: Routers, replicas: int) -> tuple[bool, str, str] | None:
    """Status, reason and message of RouterReady; None: there are no routers. `replicas`: of the engine that serve."""
    prefix = deployment.spec.routing.routers
    if prefix is None:
        return None
    if deployment.spec.suspend:
        return False, "Suspended", "spec.suspend is true: no router runs"
    count = f"{routers.available} of {prefix.replicas} routers serve requests"
    if routers.available < prefix.replicas or routers.stage is Stage.STARTING:
        reason, text = "Starting", count
        if routers.problem:
            reason, text = routers.problem.reason, f"{count}; {routers.problem.message}"
        if routers.stage is Stage.STARTING:
            text += "; until one does, the Service sends requests to the pods directly"
        return False, reason, text
    if routers.is_behind and routers.problem:
        return False, routers.problem.reason, f"{count}; {routers.problem.message}"
    if not replicas and deployment.routers_hold:  # by design; why a replica does not start, Available says
        return True, "HoldingRequests", f"{count}; requests wait in them until a replica has started"
    if not replicas:
        return False, "NoBackend", "no replica serves requests, so the routers answer 503"
    return True, "Ready", count
