"""Turn errors of writes into the cause and way out that the status shows. Pure."""

from __future__ import annotations

import re

from octavo_operator.api import KIND
from octavo_operator.kube.client import ApiError
from octavo_operator.observed.diagnosis import Problem


class NameConflictError(Exception):
    """An object of one of our names is not ours."""


def is_transient(error: Exception) -> bool:
    """True if it may go away by itself: a webhook that is down, an API server that is overloaded or unreachable, an
    object that was changed at the same time."""
    if isinstance(error, ApiError):
        return error.is_transient
    return not isinstance(error, NameConflictError)


def rejection(error: Exception, kind: str = KIND) -> Problem:
    """The cause to report for an ApiError, a NameConflictError or one of TRANSPORT_ERRORS. `kind`: of the owner."""
    if isinstance(error, NameConflictError):
        return Problem(
            "NameConflict", f"{error} exists and is not managed by this {kind}; delete it or choose another name"
        )
    if not isinstance(error, ApiError):
        return Problem(
            "APIServerUnreachable",
            f"no response from the API server; the operator retries. {str(error) or type(error).__name__}",
        )
    if error.is_transient:
        return _transient_problem(error)
    if found := _claim_problem(error):
        return found
    if "exceeded quota" in error.message:
        return Problem("QuotaExceeded", f"the namespace's quota is exhausted: {error.message}")
    if re.search(r"denied (the )?request", error.message):
        return Problem(
            "Forbidden",
            f"an admission policy of the cluster denies an object of this spec; change the policy or the "
            f"spec: {error.message}",
        )
    if error.status == 403:
        return Problem(
            "Forbidden",
            f"the operator lacks a permission (see the chart's RBAC), or a policy denies it: {error.message}",
        )
    return Problem(
        "ObjectRejected", f"the API server rejects an object of this spec; correct the spec: {error.message}"
    )


def _transient_problem(error: ApiError) -> Problem:
    if match := re.search(r'failed calling webhook "([^"]+)"', error.message):
        return Problem(
            "WebhookUnavailable",
            f"the admission webhook {match[1]} does not respond, which blocks all writes; repair it. The operator "
            f"retries. {error.message}",
        )
    if error.status == 429:
        return Problem("TooManyRequests", f"the API server is overloaded; the operator retries. {error.message}")
    if error.status == 409:
        return Problem("Conflict", f"the API server reports a conflict; the operator retries. {error.message}")
    return Problem("APIServerError", f"internal error of the API server; the operator retries. {error.message}")


def _claim_problem(error: ApiError) -> Problem | None:
    if error.details.get("kind") != "persistentvolumeclaims" and "persistentvolumeclaims" not in error.message:
        return None
    if "can be resized" in error.message or "must support resize" in error.message:
        return Problem(
            "PVCCannotGrow",
            "the cache's PersistentVolumeClaim cannot grow: its StorageClass lacks allowVolumeExpansion, or its volume "
            "was not provisioned dynamically; restore model.cache.pvc.size, or delete the claim to get a new one. "
            f"{error.message}",
        )
    if "can not be less than" in error.message:
        return Problem(
            "PVCCannotShrink",
            "a PersistentVolumeClaim cannot shrink; restore model.cache.pvc.size, or delete the claim to get a new "
            f"one. {error.message}",
        )
    return None
