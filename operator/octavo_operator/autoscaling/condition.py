"""The condition AutoscalerReady: whether the number of replicas follows the load, and if not, why. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo_operator.api import LLMDeployment
from octavo_operator.observed.diagnosis import Problem

Json = dict[str, Any]

SCALE_TO_ZERO_UNAVAILABLE = (
    "autoscaling.minReplicas 0 counts as 1: set routing.strategy prefix, or let an LLMGateway select this "
    "LLMDeployment, so that requests are held until a replica has started"
)


@dataclass(frozen=True)
class Scaling:
    """Facts about scaling an LLMDeployment: what prevents it, how many requests a replica handles at once, how many
    replicas the load needs (None: unknown), and whether routers hold requests while there is no replica."""

    problem: Problem | None = None
    capacity: float | None = None
    needed: int | None = None
    holds: bool = True


_AT_ZERO = "ScalingDisabled"  # of a HorizontalPodAutoscaler that has seen 0 replicas, and has not looked since
Verdict = tuple[bool | None, str, str]  # status, reason, message


def autoscaler_ready(
    deployment: LLMDeployment, autoscaler: Json | None, scaling: Scaling, apis: frozenset[str]
) -> Verdict | None:
    """None without spec.autoscaling. `autoscaler`: the HorizontalPodAutoscaler or ScaledObject."""
    problem = scaling.problem
    autoscaling = deployment.spec.autoscaling
    if autoscaling is None:
        return None
    if autoscaling.provider == "keda" and "ScaledObject" not in apis:
        return (
            False,
            "KEDANotInstalled",
            "this cluster has no ScaledObjects (keda.sh/v1alpha1); install KEDA, or use autoscaling.provider hpa",
        )
    if deployment.scales_to_zero and not scaling.holds and not deployment.spec.suspend:
        return False, "ScaleToZeroUnavailable", SCALE_TO_ZERO_UNAVAILABLE
    if deployment.replicas == 0:
        return _at_zero(deployment)
    found = {c["type"]: c for c in ((autoscaler or {}).get("status") or {}).get("conditions") or []}
    if problem and not (problem.reason == "APIServiceConflict" and _is_true(found, "ScalingActive")):
        return False, problem.reason, problem.message
    if autoscaler is None:
        return _starting("the autoscaler is being created")
    if autoscaling.provider == "keda":
        return _keda(found)
    for kind in ("AbleToScale", "ScalingActive"):
        if kind in found and found[kind]["status"] == "False" and found[kind].get("reason") != _AT_ZERO:
            return False, found[kind].get("reason") or kind, f"the autoscaler reports: {found[kind].get('message', '')}"
    if not _is_true(found, "ScalingActive"):
        return _starting("the autoscaler has not read the metric yet")
    span = f"{autoscaling.min_replicas} to {autoscaling.max_replicas} replicas"
    limit = found.get("ScalingLimited") or {}
    # A HorizontalPodAutoscaler reports that also for a load that is over, or for replicas set by hand.
    more = scaling.needed is None or scaling.needed > autoscaling.max_replicas
    if more and limit.get("status") == "True" and limit.get("reason") == "TooManyReplicas":
        return True, "AtMaxReplicas", f"the load needs more than autoscaling.maxReplicas ({span})"
    return True, "Scaling", f"scaling on queue depth, {span}"


def _at_zero(deployment: LLMDeployment) -> Verdict:
    if deployment.spec.suspend:
        return False, "Suspended", "spec.suspend is true: the number of replicas is not scaled"
    if deployment.is_woken_by_requests:
        return True, "Idle", "no replica runs until a request comes (autoscaling.minReplicas is 0)"
    return False, "ScaledToZero", "spec.replicas is 0: autoscaling starts when it is raised to 1 or more"


def _starting(message: str) -> Verdict:
    return None, "Starting", message


def _keda(found: dict[str, Json]) -> Verdict:
    ready = found.get("Ready")
    if ready is None or ready["status"] == "Unknown":
        return _starting("KEDA has not processed the ScaledObject yet")
    if ready["status"] == "False":
        return False, ready.get("reason") or "NotReady", f"KEDA reports: {ready.get('message', '')}"
    return True, "Scaling", "KEDA scales on queue depth"


def _is_true(found: dict[str, Json], kind: str) -> bool:
    return (found.get(kind) or {}).get("status") == "True"
