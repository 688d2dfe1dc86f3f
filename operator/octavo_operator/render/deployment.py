"""The Deployment, and how its pods are replaced."""

from __future__ import annotations

from typing import Any

from octavo_operator.api import LLMDeployment
from octavo_operator.render import names

Json = dict[str, Any]

SURGE = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
MAKE_ROOM = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}


def expected_deployment(deployment: LLMDeployment, template: Json, make_room: bool = False) -> Json:
    """`make_room`: with rollout Auto, this rollout's additional pod found no place."""
    rollout = deployment.spec.rollout
    body = {
        "replicas": deployment.replicas,
        "selector": {"matchLabels": names.selector(deployment)},
        "strategy": _strategy(deployment, make_room),
        "minReadySeconds": rollout.min_ready_seconds,
        "progressDeadlineSeconds": progress_deadline(deployment),
        "revisionHistoryLimit": 3,
        "template": template,
    }
    return names.manifest(deployment, "apps/v1", "Deployment", {"spec": body})


def progress_deadline(deployment: LLMDeployment) -> int:
    if (seconds := deployment.spec.rollout.progress_deadline_seconds) is not None:
        return seconds
    fetching = 3600 if deployment.spec.model.is_fetched else 0
    rollout = deployment.spec.rollout
    return deployment.spec.probes.startup.budget_seconds + rollout.min_ready_seconds + fetching + 600


def shares_nothing(deployment: LLMDeployment) -> bool:
    """Whether the cache can be mounted by one pod only, so that the old one must go before the new one comes."""
    pvc = deployment.spec.model.cache.pvc
    return pvc is not None and "ReadWriteMany" not in pvc.access_modes


def _strategy(deployment: LLMDeployment, make_room: bool) -> Json:
    rollout = deployment.spec.rollout
    if rollout.type == "Recreate" or shares_nothing(deployment):
        return {"type": "Recreate"}
    if rollout.type == "Auto":
        return MAKE_ROOM if make_room or rollout.surge_patience_seconds == 0 else SURGE
    surge, unavailable = rollout.max_surge, rollout.max_unavailable
    if surge is None:
        surge = 1  # what is not said must let the rollout go on
    if unavailable is None:
        unavailable = 1 if str(surge) in ("0", "0%") else 0
    return {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable}}
