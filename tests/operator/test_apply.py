"""Carrying plans out against an API server that refuses: the rest is done all the same, and in a safe order."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import jsonpatch
import pytest
from support.llmd import parsed
from support.worlds import world

from octavo_operator.config import OperatorConfig
from octavo_operator.deployment.reconcile import parse, reconcile, reconcile_invalid
from octavo_operator.kube.client import ApiError
from octavo_operator.kube.store import Observed, Store
from octavo_operator.observed.diagnosis import CLAIM_GRACE_SECONDS, claim_pending
from octavo_operator.render import render
from octavo_operator.writes.apply import Applier, NotLeaderError, StaleObjectError
from octavo_operator.writes.field_conflicts import IMMEDIATE_REVERTS
from octavo_operator.writes.plan import compute_plan, with_digest

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
            refused = await applier.execute(deployment, reconcile(deployment, world(), CONFIG).plan)
        return refused

    return asyncio.run(run())


def test_one_refusal_does_not_stop_the_rest() -> None:
    cluster = Refusing(Service=403)
    (error,) = carry_out(cluster)
    assert "no Service" in error.message
    assert cluster.applied == ["ServiceAccount", "NetworkPolicy", "Deployment", "PodDisruptionBudget"]


@pytest.mark.parametrize("kind", ["NetworkPolicy", "ServiceAccount"])
def test_no_pods_before_the_policy_that_guards_them_and_the_account_that_is_theirs(kind: str) -> None:
    cluster = Refusing(**{kind: 403})
    carry_out(cluster)
    assert "Deployment" not in cluster.applied


def test_nobody_gets_pods_with_the_account_of_somebody_else_by_its_name() -> None:
    """An LLMDeployment that is named as an account with rights."""
    cluster = Refusing()

    async def get(kind: str, namespace: str, name: str) -> Any:
        return {"metadata": {"name": name, "uid": "x"}} if kind == "ServiceAccount" else None

    cluster.get = get  # type: ignore[method-assign]
    (error,) = carry_out(cluster)
    assert "ServiceAccount toy" in str(error)
    assert "Deployment" not in cluster.applied


class OneService:
    """An API server with a Service that somebody has edited; what it was after each write is kept."""

    def __init__(self, live: dict[str, Any]) -> None:
        self.live, self.seen = live, [copy.deepcopy(live["spec"])]
        self.conflict = False

    def _changed(self) -> dict[str, Any]:
        meta = self.live["metadata"]
        meta["resourceVersion"] = str(int(meta["resourceVersion"]) + 1)
        self.seen.append(copy.deepcopy(self.live["spec"]))
        return copy.deepcopy(self.live)

    async def json_patch(self, kind: str, namespace: str, name: str, operations: Any, manager: str) -> dict[str, Any]:
        patched = jsonpatch.apply_patch(self.live, operations)
        if patched["metadata"]["resourceVersion"] != self.live["metadata"]["resourceVersion"] or self.conflict:
            raise ApiError(409, {"message": "the object has been modified"})
        self.live = patched
        return self._changed()

    async def apply(self, manifest: dict[str, Any], manager: str, subresource: str | None = None) -> dict[str, Any]:
        self.live["spec"] = {**self.live["spec"], **manifest["spec"]}
        return self._changed()


def edited_service() -> tuple[OneService, Observed, dict[str, Any]]:
    """By `kubectl edit`, that adds a key to the selector: it then owns all of it, since a selector is one value."""
    deployment = parsed()
    wanted = next(one for one in render(deployment, CONFIG) if one["kind"] == "Service")
    live = copy.deepcopy(with_digest(wanted))
    live["spec"] |= {"clusterIP": "10.0.0.1", "selector": {**live["spec"]["selector"], "version": "2"}}
    fields = {
        "f:type": {},
        "f:sessionAffinity": {},
        "f:ports": {'k:{"port":80,"protocol":"TCP"}': {".": {}, "f:port": {}}},
    }
    live["metadata"] |= {
        "uid": "s",
        "resourceVersion": "7",
        "managedFields": [
            {"manager": "octavo-operator", "operation": "Apply", "fieldsV1": {"f:spec": fields}},
            {"manager": "kubectl-edit", "operation": "Update", "fieldsV1": {"f:spec": {"f:selector": {}}}},
        ],
    }
    return OneService(live), Observed.of("Service", "v1", live), wanted


@pytest.mark.parametrize("conflict", [False, True])
def test_a_selector_that_was_edited_is_never_empty_while_it_is_put_back(conflict: bool) -> None:
    """A Service without a selector has no endpoints: requests would time out."""
    cluster, live, wanted = edited_service()
    cluster.conflict = conflict
    assert live.foreign == ("/spec/selector",) and live.managers == ("kubectl-edit",)
    deployment = parsed()
    todo = compute_plan(deployment, [wanted], [live])
    applier = Applier(cluster, Store(), lambda: True)  # type: ignore[arg-type]
    refused = asyncio.run(applier.execute(deployment, todo))
    assert [type(one) for one in refused] == [StaleObjectError] * conflict
    assert applier.rejected_writes.error_to_report(("default", "toy")) is None, (
        "one that has changed meanwhile is no refusal"
    )
    assert all(wanted["spec"]["selector"].items() <= spec["selector"].items() for spec in cluster.seen)
    assert (cluster.seen[-1]["selector"] == wanted["spec"]["selector"]) is not conflict
    assert cluster.seen[-1]["clusterIP"] == "10.0.0.1", "what the API server chose stays"


class Stubborn(Refusing):
    """Takes everything, and a webhook makes something else of NetworkPolicies."""

    def __init__(self) -> None:
        super().__init__()
        self.version = 0

    async def apply(self, manifest: dict[str, Any], manager: str, subresource: str | None = None) -> dict[str, Any]:
        out = await super().apply(manifest, manager, subresource)
        self.version += 1
        out["metadata"] |= {"resourceVersion": str(self.version)}
        if manifest["kind"] == "NetworkPolicy":
            out = {**out, "spec": {**out["spec"], "policyTypes": ["Egress"]}}
        return out


def test_a_write_that_comes_back_changed_is_repeated_a_few_times_and_then_later_and_later() -> None:
    cluster, store, now = Stubborn(), Store(), [0.0]
    applier = Applier(cluster, store, lambda: True)  # type: ignore[arg-type]
    applier.field_conflicts._clock = lambda: now[0]
    deployment, key = parsed(), ("default", "toy")
    said: list[float] = []
    written: list[float] = []

    def step() -> None:
        before = cluster.applied.count("NetworkPolicy")
        field_conflict = applier.field_conflicts.problem(key)
        outcome = reconcile(deployment, world(store.children(key), field_conflict=field_conflict), CONFIG)
        asyncio.run(applier.execute(deployment, outcome.plan))
        written.extend([now[0]] * (cluster.applied.count("NetworkPolicy") - before))
        if field_conflict:
            said.append(now[0])
            assert "NetworkPolicy toy: /spec/policyTypes/0 was changed" in field_conflict.message
            found = {one["type"]: one["reason"] for one in (outcome.status or {})["conditions"]}
            assert found["Degraded"] == "FieldConflict" != found["Ready"], "it may serve all the same"

    for tenth in range(36000):  # events come all the time, for an hour
        now[0] = tenth / 10
        if tenth < 100 or tenth % 50 == 0:
            step()
    assert len([at for at in written if at < 4]) == IMMEDIATE_REVERTS + 1
    assert said[0] < 5
    assert len(written) < 25
    assert cluster.applied.count("Service") == 1, "the others have nothing to do with it"
    assert set(range(60, 3600, 5)) <= set(said), "and it is said all the time"
    now[0] += 10000
    assert applier.field_conflicts.problem(key) is None


def test_a_refused_write_is_not_repeated_at_every_event() -> None:
    cluster = Refusing(Service=422)
    carry_out(cluster, times=5)
    assert cluster.asked == 1 + 5 * 4


def test_a_server_that_is_overloaded_is_left_alone() -> None:
    cluster = Refusing(ServiceAccount=429)
    with pytest.raises(ApiError):
        carry_out(cluster)
    assert cluster.asked == 1


def test_an_operator_that_does_not_lead_writes_nothing() -> None:
    cluster = Refusing()
    with pytest.raises(NotLeaderError):
        carry_out(cluster, may_write=False)
    assert cluster.asked == 0


def test_a_spec_that_cannot_be_read_keeps_what_is_known() -> None:
    body = {
        "metadata": {"name": "toy", "namespace": "n", "uid": "u", "generation": 3},
        "spec": {"model": {"uri": "x"}, "replicas": "two"},
        "status": {"url": "http://x", "selector": "a=b"},
    }
    status = reconcile_invalid(parse(body), [], 0.0).status  # type: ignore[arg-type]
    assert status is not None
    found = {c["type"]: (c["status"], c["reason"], c["observedGeneration"]) for c in status["conditions"]}
    assert found["Ready"] == ("False", "InvalidSpec", 3)
    assert found["Degraded"] == ("True", "InvalidSpec", 3)
    assert "spec.replicas" in status["conditions"][0]["message"]
    assert (status["url"], status["selector"]) == ("http://x", "a=b")


def test_a_volume_may_take_its_time_and_then_it_is_a_problem() -> None:
    claim = {"metadata": {"name": "c"}, "status": {"phase": "Pending"}}
    pod = {"metadata": {"creationTimestamp": "1970-01-01T00:00:00Z"}, "spec": {}, "status": {}}
    assert claim_pending(claim, [pod], 5.0) == (None, CLAIM_GRACE_SECONDS - 5)
    problem, again = claim_pending(claim, [pod], CLAIM_GRACE_SECONDS)
    assert problem is not None and problem.reason == "PVCPending" and again is None
    assert claim_pending({**claim, "status": {"phase": "Bound"}}, [pod], 60.0) == (None, None)
    placed = {**pod, "spec": {"nodeName": "n"}}
    assert claim_pending(claim, [placed], 60.0) == (None, None)
    assert claim_pending(claim, [], 60.0) == (None, None)
