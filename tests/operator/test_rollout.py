"""Rollouts in a full cluster: when old pods are stopped first."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.llmd import parsed

from octavo_operator.deployment.rollout import MAKE_ROOM, Room, make_room


def pod(name: str, revision: str, created: str, waiting: str | None = None, ready: bool = True) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": str(ready and not waiting)}]
    if waiting:
        conditions += [
            {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": waiting,
                "lastTransitionTime": created,
            }
        ]
    labels = {"pod-template-hash": revision}
    return {
        "metadata": {"name": name, "creationTimestamp": created, "labels": labels},
        "status": {"conditions": conditions},
    }


def live(wanted: int, available: int, updated: int = 1, **more: Any) -> dict[str, Any]:
    """A Deployment in its third rollout."""
    annotations = {"deployment.kubernetes.io/revision": "3", **more.pop("annotations", {})}
    status = {"observedGeneration": 2, "availableReplicas": available, "updatedReplicas": updated, **more}
    return {"metadata": {"annotations": annotations, "generation": 2}, "spec": {"replicas": wanted}, "status": status}


OLD = pod("old", "a", "2026-01-01T00:00:00Z")
FULL = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
START = "2026-01-01T00:01:00Z"
T0 = 1767225660.0  # of that
ONE = Room("3", 1)


@pytest.mark.parametrize(
    ("new", "now", "decided", "again"),
    [
        (pod("new", "b", START), T0, None, None),
        (pod("new", "b", START, FULL), T0 + 10, None, 50.0),
        (pod("new", "b", START, FULL), T0 + 60, ONE, None),
        (pod("new", "b", START, "1 node(s) didn't match node selector"), T0 + 600, None, None),
        (pod("more", "a", START, FULL), T0 + 600, None, None),
    ],
    ids=["scheduled", "patient", "out-of-patience", "would-not-help", "scale-up"],
)
def test_old_pods_make_room_only_for_new_ones_that_lack_it(
    new: dict[str, Any], now: float, decided: Room | None, again: float | None
) -> None:
    assert make_room(parsed(), live(1, 1), [OLD, new], now) == (decided, again)


@pytest.mark.parametrize("created", ["2026-01-01T00:00:00Z", START], ids=["within-a-second", "an-old-one-made-anew"])
def test_a_new_pod_is_known_by_the_template(created: str) -> None:
    def of(version: str, one: dict[str, Any]) -> dict[str, Any]:
        container = {"name": "engine", "image": "i", "env": [{"name": "VERSION", "value": version}]}
        return {**one, "spec": {"containers": [container, {"name": "injected"}]}}

    old = of("1", pod("old", "z", created))
    new = of("2", pod("new", "b", "2026-01-01T00:00:00Z", FULL))
    deployment = live(1, 1)
    deployment["spec"]["template"] = {"spec": {"containers": new["spec"]["containers"][:1]}}
    for pods in ([old, new], [new, old]):
        assert make_room(parsed(), deployment, pods, T0 + 60) == (ONE, None)


def test_a_decision_holds_until_its_rollout_is_complete() -> None:
    new = pod("new", "b", START)
    decided = {MAKE_ROOM: str(ONE)}
    assert make_room(parsed(), live(1, 0, annotations=decided), [new], T0) == (ONE, None)
    assert make_room(parsed(), live(1, 1, annotations=decided, replicas=1), [new], T0) == (None, None)
    another = {MAKE_ROOM: "2/1"}
    assert make_room(parsed(), live(1, 0, annotations=another), [new], T0) == (None, None)


def test_more_replicas_may_be_missing_with_fewer_gpus_than_replicas() -> None:
    """Or the replica that never had a place would be the one that may be missing, for ever."""
    pods = [pod(f"old{n}", "a", "2026-01-01T00:00:00Z") for n in range(3)] + [pod("new", "b", START, FULL)]
    assert make_room(parsed(), live(4, 3), pods, T0 + 60) == (Room("3", 2), None)
    progressing = {"type": "Progressing", "status": "True", "lastUpdateTime": "2026-01-01T00:02:00Z"}
    stands = live(4, 3, annotations={MAKE_ROOM: "3/1"}, conditions=[progressing])
    assert make_room(parsed(), stands, pods, T0 + 61) == (ONE, 59.0), "it has just come on"
    assert make_room(parsed(), stands, pods, T0 + 121) == (Room("3", 2), None)


def test_nothing_more_goes_while_something_is_leaving() -> None:
    leaving = pod("leaving", "a", "2026-01-01T00:00:00Z")
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:03:00Z"
    pods = [OLD, leaving, pod("new", "b", START, FULL)]
    assert make_room(parsed(), live(2, 1), pods, T0 + 100) == (None, 5.0)
    assert make_room(parsed(), live(2, 1), pods, T0 + 200)[0] == Room("3", 2), "it should have gone long ago"


def test_old_pods_that_do_not_serve_make_room_at_once_and_those_that_serve_stay() -> None:
    broken = pod("broken", "b", "2026-01-01T00:00:30Z", ready=False)
    pods = [OLD, broken, pod("reverted", "a2", START, FULL)]
    assert make_room(parsed(), live(2, 1), pods, T0 + 1) == (ONE, None)
    assert make_room(parsed(), live(2, 2), pods, T0 + 1)[0] is None, "none is missing: somebody would be taken"


def test_a_full_quota_is_no_room_either() -> None:
    refused = {
        "type": "ReplicaFailure",
        "status": "True",
        "message": "exceeded quota: gpus",
        "lastTransitionTime": START,
    }
    assert make_room(parsed(), live(1, 1, 0, conditions=[refused]), [OLD], T0 + 10) == (None, 50.0)
    stands = live(1, 1, 0, conditions=[refused])
    del stands["status"]["updatedReplicas"]  # as the API server leaves out zeros
    assert make_room(parsed(), stands, [OLD], T0 + 60) == (ONE, None)
    assert make_room(parsed(), live(2, 1, 1, conditions=[refused]), [OLD], T0 + 60) == (None, None), "a scale-up"


@given(
    st.integers(1, 6),
    st.integers(0, 6),
    st.integers(0, 6),
    st.lists(st.tuples(st.sampled_from("ab"), st.booleans(), st.booleans())),
)
def test_never_more_than_one_that_serves_is_taken(replicas: int, available: int, young: int, drawn: list[Any]) -> None:
    """`young`: ready, but not for minReadySeconds yet."""
    pods = [pod(f"p{n}", r, START, FULL if w else None, ready) for n, (r, w, ready) in enumerate(drawn)]
    available = min(available, replicas)
    ready = min(available + young, replicas)
    room, again = make_room(parsed(), live(replicas, available, readyReplicas=ready), pods, T0 + 1000)
    if room:
        assert again is None
        assert replicas - room.unavailable >= ready - 1
