"""Conditions of the status."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.llmd import parsed
from support.worlds import status_of

from octavo_operator.autoscaling.condition import Scaling, autoscaler_ready
from octavo_operator.deployment.events import events


def test_times_of_conditions_change_with_their_status_alone() -> None:
    deployment = parsed()
    first = status_of(deployment)
    deployment.status.update(first)
    assert status_of(deployment, now=100.0) == first
    assert events(first, first) == []


def test_a_replica_s_capacity_is_reported_while_it_is_scaled() -> None:
    deployment = parsed(autoscaling={"maxReplicas": 4})
    learnt = Scaling(capacity=8.2)
    assert "replicaCapacity" not in status_of(deployment)
    deployment.status.update(status_of(deployment, scaling=learnt))
    assert deployment.status["replicaCapacity"] == 8
    assert status_of(deployment)["replicaCapacity"] == 8
    assert "replicaCapacity" not in status_of(parsed(), scaling=learnt)


def test_an_inference_pool_that_cannot_be_is_told_while_all_serves() -> None:
    deployment = parsed(inferencePool={"endpointPickerRef": {"name": "epp"}})
    told = {}
    for apis in (frozenset[str](), frozenset({"InferencePool"})):
        status = status_of(deployment, apis=apis)
        told[bool(apis)] = {one["type"]: one["reason"] for one in status["conditions"]}
    assert (told[False].pop("Degraded"), told[True].pop("Degraded")) == ("InferencePoolNotInstalled", "AsExpected")
    assert told[False] == told[True]


@pytest.mark.parametrize(
    ("replicas", "strategy", "said"),
    [
        (1, "none", None),
        (0, "none", None),
        (1, "prefix", None),
        (2, "none", ("False", "NotRouted", "each request to any of them")),
        (3, "clientIP", ("False", "NotRouted", "requests of one client address to one of them")),
        (2, "prefix", ("True", "Routed", "routers find it by their ids")),
    ],
)
def test_several_replicas_behind_a_plain_service_are_told(
    replicas: int, strategy: str, said: tuple[str, str, str] | None
) -> None:
    deployment = parsed(replicas=replicas, routing={"strategy": strategy})
    status = status_of(deployment)
    found = next((one for one in status["conditions"] if one["type"] == "KeptFound"), None)
    assert (found is None) == (said is None)
    if found and said:
        assert (found["status"], found["reason"]) == said[:2]
        assert said[2] in found["message"]
        assert f"one of {replicas} replicas" in found["message"]
        assert ("routing.strategy: prefix" in found["message"]) == (said[0] == "False")
    other = {one["type"]: one["status"] for one in status["conditions"]}
    assert other["Degraded"] == "False", "it serves all the same"


@pytest.mark.parametrize("strategy", ["none", "prefix"])
def test_responses_in_a_database_are_found_by_every_replica(strategy: str) -> None:
    responses = {"store": "Postgres", "secretRef": {"name": "db"}}
    status = status_of(parsed(replicas=3, routing={"strategy": strategy}, responses=responses))
    found = next(one for one in status["conditions"] if one["type"] == "KeptFound")
    assert found["status"] == "True" and "each file and batch is kept by one of 3 replicas" in found["message"]
    assert ("PostgreSQL" in found["message"]) == (strategy == "none")


@pytest.mark.parametrize(("wanted", "least", "most", "pods"), [(9, 1, 2, 2), (1, 3, 4, 3), (3, 1, 4, 3), (0, 1, 2, 0)])
def test_pods_stay_within_the_limits_of_autoscaling(wanted: int, least: int, most: int, pods: int) -> None:
    """Whatever was written into replicas: an autoscaler would take them away again a moment later. 0 turns it off."""
    autoscaling = {"minReplicas": least, "maxReplicas": most}
    assert parsed(replicas=wanted, autoscaling=autoscaling).replicas == pods
    assert parsed(replicas=wanted, autoscaling=autoscaling, suspend=True).replicas == 0
    assert parsed(replicas=wanted).replicas == wanted


@pytest.mark.parametrize(
    ("needed", "reason"), [(None, "AtMaxReplicas"), (3, "AtMaxReplicas"), (2, "Scaling"), (0, "Scaling")]
)
def test_the_maximum_is_blamed_only_when_the_load_needs_more(needed: int | None, reason: str) -> None:
    """A HorizontalPodAutoscaler says TooManyReplicas of a number that was written by hand, too."""
    said = [
        {"type": "ScalingActive", "status": "True"},
        {"type": "ScalingLimited", "status": "True", "reason": "TooManyReplicas"},
    ]
    deployment = parsed(autoscaling={"maxReplicas": 2})
    verdict = autoscaler_ready(deployment, {"status": {"conditions": said}}, Scaling(needed=needed), frozenset())
    assert verdict is not None
    assert verdict[:2] == (True, reason)


@given(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3))
def test_ready_never_lies(replicas: int, updated: int, available: int) -> None:
    deployment = parsed(replicas=replicas)
    counts = {
        "observedGeneration": 1,
        "replicas": max(updated, available),
        "updatedReplicas": updated,
        "availableReplicas": available,
    }
    live = {"metadata": {"generation": 1}, "spec": {"replicas": replicas}, "status": counts}
    status = status_of(deployment, live)
    found = {condition["type"]: condition["status"] == "True" for condition in status["conditions"]}
    assert found["Available"] is (available > 0)
    assert found["Ready"] is (0 < replicas == updated == available)
