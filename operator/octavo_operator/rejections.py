"""What users are told when an object cannot be written: cause and way out. Pure."""

from __future__ import annotations

import re

from octavo_operator.api import KIND
from octavo_operator.diagnosis import Problem
from octavo_operator.kube.client import ApiError


class NameTaken(Exception):
    """An object of one of our names belongs to somebody else."""


def is_passing(error: Exception) -> bool:
    """Whether it may go away by itself: a webhook that is down, an API server that is overloaded or out of reach, an
    object that was changed at the same time."""
    if isinstance(error, ApiError):
        return error.is_transient
    return not isinstance(error, NameTaken)


def rejection(error: Exception) -> Problem:
    """`error`: ApiError, NameTaken, or one of TRANSPORT_ERRORS."""
    if isinstance(error, NameTaken):
        return Problem(
            "NameConflict", f"{error} belongs to somebody else; delete it or choose another name for the {KIND}"
        )
    if not isinstance(error, ApiError):
        return Problem(
            "APIServerUnreachable",
            f"the API server does not answer; it is tried again. {str(error) or type(error).__name__}",
        )
    if error.is_transient:
        return _passing(error)
    if found := _of_claim(error):
        return found
    if "exceeded quota" in error.message:
        return Problem("QuotaExceeded", f"the namespace's quota leaves no room: {error.message}")
    if re.search(r"denied (the )?request", error.message):
        return Problem(
            "Forbidden",
            f"an admission policy of the cluster forbids an object made of this spec; change either: {error.message}",
        )
    if error.status == 403:
        return Problem(
            "Forbidden", f"the operator lacks a right (see the chart's RBAC), or a policy forbids it: {error.message}"
        )
    return Problem("Refused", f"the API server refuses an object made of this spec; correct the spec: {error.message}")


def _passing(error: ApiError) -> Problem:
    if match := re.search(r'failed calling webhook "([^"]+)"', error.message):
        return Problem(
            "WebhookUnavailable",
            f"the admission webhook {match[1]} does not answer, so nothing can be written; mend it. It is tried again. "
            f"{error.message}",
        )
    if error.status == 429:
        return Problem("TooManyRequests", f"the API server is overloaded; it is tried again. {error.message}")
    if error.status == 409:
        return Problem("Conflict", f"the API server reports a conflict; it is tried again. {error.message}")
    return Problem("APIServerError", f"the API server fails; it is tried again. {error.message}")


def _of_claim(error: ApiError) -> Problem | None:
    if error.details.get("kind") != "persistentvolumeclaims" and "persistentvolumeclaims" not in error.message:
        return None
    if "can be resized" in error.message or "must support resize" in error.message:
        return Problem(
            "PVCCannotGrow",
            "the cache's PersistentVolumeClaim cannot grow: its StorageClass lacks allowVolumeExpansion, or its volume "
            "is not made by a provisioner; put model.cache.pvc.size back, or delete the claim to have it made anew. "
            f"{error.message}",
        )
    if "can not be less than" in error.message:
        return Problem(
            "PVCCannotShrink",
            "a PersistentVolumeClaim never becomes smaller than its volume is; put model.cache.pvc.size back, or "
            f"delete the claim to have it made anew. {error.message}",
        )
    return None
