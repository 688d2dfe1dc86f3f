"""Causes that the status reports for errors of writes."""

from __future__ import annotations

import pytest

from octavo_operator.kube.client import ApiError
from octavo_operator.writes.rejections import NameConflictError, is_transient, rejection

CLAIM = {"kind": "persistentvolumeclaims"}


@pytest.mark.parametrize(
    ("error", "reason", "words", "passes"),
    [
        (
            ApiError(500, {"message": 'Internal error: failed calling webhook "a.b.c": no endpoints'}),
            "WebhookUnavailable",
            "webhook a.b.c does not respond",
            True,
        ),
        (ApiError(429, {"message": "slow down"}), "TooManyRequests", "overloaded", True),
        (ApiError(409, {"message": "modified"}), "Conflict", "retries", True),
        (ApiError(500, {"message": "etcd"}), "APIServerError", "etcd", True),
        (ApiError(401, {"message": "Unauthorized"}), "APIServerError", "Unauthorized", True),
        (TimeoutError(), "APIServerUnreachable", "TimeoutError", True),
        (
            ApiError(403, {"details": CLAIM, "message": "only dynamically provisioned pvc can be resized and ..."}),
            "PVCCannotGrow",
            "allowVolumeExpansion",
            False,
        ),
        (
            ApiError(422, {"details": CLAIM, "message": "field can not be less than status.capacity"}),
            "PVCCannotShrink",
            "cannot shrink",
            False,
        ),
        (ApiError(400, {"message": 'admission webhook "x" denied the request: no'}), "Forbidden", "policy", False),
        (ApiError(422, {"message": "ValidatingAdmissionPolicy 'x' denied request: no"}), "Forbidden", "policy", False),
        (NameConflictError("Service toy"), "NameConflict", "Service toy", False),
    ],
)
def test_a_rejected_write_is_reported_with_its_cause_and_way_out(
    error: Exception, reason: str, words: str, passes: bool
) -> None:
    assert is_transient(error) is passes
    assert rejection(error).reason == reason
    assert words in rejection(error).message


def test_refusals_have_their_reasons() -> None:
    quota = ApiError(403, {"message": "exceeded quota: x", "reason": "Forbidden"})
    assert rejection(quota).reason == "QuotaExceeded"
    assert rejection(ApiError(403, {"message": "no"})).reason == "Forbidden"
    assert rejection(ApiError(422, {"message": "bad"})).reason == "ObjectRejected"
    assert ApiError(409, {}).is_transient and ApiError(503, "down").is_transient and not ApiError(422, {}).is_transient
    assert not ApiError(500, {"message": "failed to create typed patch object (n/m; v1): unknown"}).is_transient
    wrong = "failed to convert new object (n/m; apps/v1, Kind=Deployment) to proper version: quantities must match"
    assert not ApiError(500, {"message": wrong}).is_transient
