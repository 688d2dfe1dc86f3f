"""AutoscalerReady: does the number of replicas follow the load, and if not, why not. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo_operator.api import LLMDeployment
from octavo_operator.diagnosis import Problem

Json = dict[str, Any]


@dataclass(frozen=True)
class Scaling:
    """What autoscaling tells of one LLMDeployment: what keeps it from being scaled, how many requests a replica has
    been seen to hold, and how many replicas the present load needs (None: not known)."""

    problem: Problem | None = None
    capacity: float | None = None
    needed: int | None = None


Verdict = tuple[bool | None, str, str]  # status, reason, message


def autoscaler_ready(
    deployment: LLMDeployment, autoscaler: Json | None, scaling: Scaling, apis: frozenset[str]
) -> Verdict | None:
    """None without spec.autoscaling. `autoscaler`: the HorizontalPodAutoscaler or ScaledObject; `scaling`: ours."""
    problem = scaling.problem
    autoscaling = deployment.spec.autoscaling
    if autoscaling is None:
        return None
    if autoscaling.provider == "keda" and "ScaledObject" not in apis:
        return (
            False, "KEDANotInstalled",
            "this cluster has no ScaledObjects (keda.sh/v1alpha1); install KEDA, or use autoscaling.provider hpa",
        )  # fmt: skip
    if deployment.spec.suspend:
        return False, "Suspended", "spec.suspend is true: the number of replicas stays as it is"
    if deployment.spec.replicas == 0:
        return False, "ScaledToZero", "spec.replicas is 0: autoscaling begins when it is raised to 1 or more"
    said = {c["type"]: c for c in ((autoscaler or {}).get("status") or {}).get("conditions") or []}
    if problem and not (problem.reason == "APIServiceTaken" and _holds(said, "ScalingActive")):
        return False, problem.reason, problem.message
    if autoscaler is None:
        return _starting("the autoscaler is being made")
    if autoscaling.provider == "keda":
        return _keda(said)
    for kind in ("AbleToScale", "ScalingActive"):
        if kind in said and said[kind]["status"] == "False":
            return False, said[kind].get("reason") or kind, f"the autoscaler says: {said[kind].get('message', '')}"
    if not _holds(said, "ScalingActive"):
        return _starting("the autoscaler has not looked at the load yet")
    span = f"{autoscaling.min_replicas} to {autoscaling.max_replicas} replicas"
    limit = said.get("ScalingLimited") or {}
    # A HorizontalPodAutoscaler says so, too, of a load that is over, or of a number that somebody wrote by hand.
    more = scaling.needed is None or scaling.needed > autoscaling.max_replicas
    if more and limit.get("status") == "True" and limit.get("reason") == "TooManyReplicas":
        return True, "AtMaxReplicas", f"the load needs more than autoscaling.maxReplicas allows ({span})"
    return True, "Scaling", f"the queue decides over {span}"


def _starting(message: str) -> Verdict:
    return None, "Starting", message


def _keda(said: dict[str, Json]) -> Verdict:
    ready = said.get("Ready")
    if ready is None or ready["status"] == "Unknown":
        return _starting("KEDA has not looked at the ScaledObject yet")
    if ready["status"] == "False":
        return False, ready.get("reason") or "NotReady", f"KEDA says: {ready.get('message', '')}"
    return True, "Scaling", "KEDA scales by the queue"


def _holds(said: dict[str, Json], kind: str) -> bool:
    return (said.get(kind) or {}).get("status") == "True"
