"""Carrying plans out against an API server that refuses: the rest is done all the same, and in a safe order."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.llmd import parsed

from octavo_operator.apply import Applier, NotLeading
from octavo_operator.cluster import ApiError
from octavo_operator.config import OperatorConfig
from octavo_operator.diagnosis import CLAIM_PATIENCE, claim_pending
from octavo_operator.reconcile import look, look_at_unreadable, parse
from octavo_operator.store import Store

CONFIG = OperatorConfig()


class Refusing:
    """Answers like an API server that has something against some kinds."""

    def __init__(self, **status: int) -> None:
        self.status, self.applied, self.asked = status, [], 0  # type: ignore[var-annotated]

    async def get(self, kind: str, namespace: str, name: str) -> None:
        return None

    async def apply(self, manifest: dict[str, Any], manager: str, subresource: str | None = None) -> dict[str, Any]:
        self.asked += 1
        kind = manifest["kind"]
        if code := self.status.get(kind):
            raise ApiError(code, {"message": f"no {kind}"})
        self.applied.append(kind)
        meta = {**manifest["metadata"], "uid": kind, "resourceVersion": "1"}
        return {**manifest, "metadata": meta}


def carry_out(cluster: Refusing, times: int = 1, may_write: bool = True) -> list[Any]:
    async def run() -> list[Any]:
        applier = Applier(cluster, Store(), lambda: may_write)  # type: ignore[arg-type]
        deployment = parsed()
        refused: list[Any] = []
        for _ in range(times):
            refused = await applier.execute(deployment, look(deployment, [], CONFIG, frozenset(), 0.0).plan)
        return refused

    return asyncio.run(run())


def test_one_refusal_does_not_stop_the_rest() -> None:
    cluster = Refusing(Service=403)
    (error,) = carry_out(cluster)
    assert "no Service" in error.message
    assert cluster.applied == ["ServiceAccount", "NetworkPolicy", "Deployment", "PodDisruptionBudget"]


def test_no_pods_before_the_policy_that_guards_them() -> None:
    cluster = Refusing(NetworkPolicy=403)
    carry_out(cluster)
    assert "Deployment" not in cluster.applied


def test_what_was_refused_is_not_asked_for_at_every_event() -> None:
    cluster = Refusing(Service=422)
    carry_out(cluster, times=5)
    assert cluster.asked == 1 + 5 * 4


def test_a_server_that_is_overloaded_is_left_alone() -> None:
    cluster = Refusing(ServiceAccount=429)
    with pytest.raises(ApiError):
        carry_out(cluster)
    assert cluster.asked == 1


def test_who_does_not_lead_writes_nothing() -> None:
    cluster = Refusing()
    with pytest.raises(NotLeading):
        carry_out(cluster, may_write=False)
    assert cluster.asked == 0


def test_a_spec_that_cannot_be_read_keeps_what_is_known() -> None:
    body = {
        "metadata": {"name": "toy", "namespace": "n", "uid": "u", "generation": 3},
        "spec": {"model": {"uri": "x"}, "replicas": "two"},
        "status": {"url": "http://x", "selector": "a=b"},
    }
    status = look_at_unreadable(parse(body), [], 0.0).status  # type: ignore[arg-type]
    assert status is not None
    found = {c["type"]: (c["status"], c["reason"], c["observedGeneration"]) for c in status["conditions"]}
    assert found["Ready"] == ("False", "InvalidSpec", 3)
    assert found["Degraded"] == ("True", "InvalidSpec", 3)
    assert "spec.replicas" in status["conditions"][0]["message"]
    assert (status["url"], status["selector"]) == ("http://x", "a=b")


def test_a_volume_may_take_its_time_and_then_it_is_a_problem() -> None:
    claim = {"metadata": {"name": "c"}, "status": {"phase": "Pending"}}
    pod = {"metadata": {"creationTimestamp": "1970-01-01T00:00:00Z"}, "spec": {}, "status": {}}
    assert claim_pending(claim, [pod], 5.0) == (None, CLAIM_PATIENCE - 5)
    problem, again = claim_pending(claim, [pod], CLAIM_PATIENCE)
    assert problem is not None and problem.reason == "PVCPending" and again is None
    assert claim_pending({**claim, "status": {"phase": "Bound"}}, [pod], 60.0) == (None, None)
    placed = {**pod, "spec": {"nodeName": "n"}}
    assert claim_pending(claim, [placed], 60.0) == (None, None)
    assert claim_pending(claim, [], 60.0) == (None, None)
