"""The Deployment, and how its pods are replaced."""

from __future__ import annotations

from typing import Any

from octavo_operator.api import LLMDeployment
from octavo_operator.render import names

Json = dict[str, Any]

SURGE = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}


def expected_deployment(deployment: LLMDeployment, template: Json, unavailable: int | None = None) -> Json:
    """`unavailable`: with rollout Auto, maxUnavailable while an additional pod cannot be scheduled."""
    rollout = deployment.spec.rollout
    body = {
        "replicas": deployment.replicas,
        "selector": {"matchLabels": names.selector(deployment)},
        "strategy": _strategy(deployment, unavailable),
        "minReadySeconds": rollout.min_ready_seconds,
        "progressDeadlineSeconds": progress_deadline(deployment),
        "revisionHistoryLimit": 3,
        "template": template,
    }
    return names.manifest(deployment, "apps/v1", "Deployment", {"spec": body})


def progress_deadline(deployment: LLMDeployment) -> int:
    """progressDeadlineSeconds: that of the spec, or what startup, fetching and ten minutes take."""
    if (seconds := deployment.spec.rollout.progress_deadline_seconds) is not None:
        return seconds
    fetching = 3600 if deployment.spec.model.is_fetched else 0
    rollout = deployment.spec.rollout
    return deployment.spec.probes.startup.budget_seconds + rollout.min_ready_seconds + fetching + 600


def has_exclusive_volume(deployment: LLMDeployment) -> bool:
    """True if only one pod at a time can mount the cache, or the responses, so that the old one must end before the new
    one starts."""
    pvc, responses = deployment.spec.model.cache.pvc, deployment.spec.responses
    if responses is not None and responses.existing_claim is not None:
        return True
    return pvc is not None and "ReadWriteMany" not in pvc.access_modes


def _strategy(deployment: LLMDeployment, unavailable: int | None) -> Json:
    rollout = deployment.spec.rollout
    if rollout.type == "Recreate" or has_exclusive_volume(deployment):
        return {"type": "Recreate"}
    if rollout.type == "Auto":
        if unavailable is None and rollout.surge_patience_seconds > 0:
            return SURGE
        return {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": unavailable or 1}}
    surge, missing = rollout.max_surge, rollout.max_unavailable
    if surge is None:
        surge = 1  # a default that lets the rollout proceed
    if missing is None:
        missing = 1 if str(surge) in ("0", "0%") else 0
    return {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": surge, "maxUnavailable": missing}}
