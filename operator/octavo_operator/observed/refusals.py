"""Explain why the cluster creates no pods of a workload: quotas, limits, policies, webhooks. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from octavo_operator.observed.diagnosis import Problem, event_time

Json = dict[str, Any]

# Words of the API server, a reason, and the way out. {resources}: the fields of the spec that set them.
_REFUSALS = (
    (r"exceeded quota", "QuotaExceeded", "the namespace's quota is exhausted; raise it or lower {resources}"),
    (r"failed quota", "QuotaExceeded", "the namespace's quota counts what the pods do not say; set {resources}"),
    (
        r"violates PodSecurity",
        "PodSecurityViolation",
        "the namespace's Pod Security level rejects the pods; see spec.podPatches and model.cache.mode",
    ),
    (
        r"(minimum|maximum) \S+ usage per|max limit to request ratio per",
        "LimitRangeViolated",
        "a LimitRange of the namespace forbids the pods; change it or {resources}",
    ),
    (
        r"failed calling webhook",
        "WebhookUnavailable",
        "an admission webhook does not respond, which blocks all pods; repair it",
    ),
    (
        r"denied (the )?request",
        "Forbidden",
        "an admission policy of the cluster denies the pods; change the policy or the spec",
    ),
    (
        r"error looking up service account",
        "ServiceAccountNotFound",
        "the pods' ServiceAccount is missing; the operator creates its own, and one of podPatches is yours to create",
    ),
    (r"no PriorityClass with name", "PriorityClassNotFound", "create the PriorityClass or correct spec.scheduling"),
    (r"RuntimeClass .*not found", "RuntimeClassNotFound", "create the RuntimeClass or correct spec.scheduling"),
)


def refusal(message: str, resources: str) -> Problem:
    """The cause of a pod that could not be made. `message`: of the API server; `resources`: the fields that set the
    pods' resources."""
    for pattern, reason, way_out in _REFUSALS:
        if re.search(pattern, message):
            return Problem(reason, f"{way_out.format(resources=resources)}. {message}")
    return Problem("PodsNotCreated", f"creating pods fails: {message}")


def refused_pods(conditions: Iterable[Json], resources: str) -> Problem | None:
    """The problem of a Deployment with these conditions whose pods are not made; None: they are."""
    for one in conditions:
        if (one["type"], one["status"]) == ("ReplicaFailure", "True"):
            return refusal(one.get("message", ""), resources)
    return None


def refused_in_events(events: Iterable[Json], resources: str) -> Problem | None:
    """The refusal of a controller that reports only by events, a StatefulSet or a Job: its last attempt counts."""
    attempts = [one for one in events if one.get("reason") in ("FailedCreate", "SuccessfulCreate")]
    last = max(attempts, key=lambda one: (event_time(one), one["reason"] == "FailedCreate"), default=None)
    return refusal(last.get("message", ""), resources) if last and last["reason"] == "FailedCreate" else None
