"""Pods that hang: nodes that do not answer, waits that nothing explains. What is said is true, and said in time."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest

from octavo_operator.kube.client import ApiError
from octavo_operator.observed.diagnosis import Problem, diagnose
from octavo_operator.observed.pod_events import PodEvents

Json = dict[str, Any]
PULLING = 'Pulling image "example.com/engine:1"'


def at(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def event(reason: str, message: str, at: str = "1970-01-01T00:01:45Z", kind: str = "Warning") -> Json:
    return {"type": kind, "reason": reason, "message": message, "lastTimestamp": at, "firstTimestamp": at}


def waiting(started: str, **more: Any) -> Json:
    """A pod that has a node, and no container yet."""
    creating = {"name": "engine", "state": {"waiting": {"reason": "ContainerCreating"}}, "restartCount": 0}
    status = {
        "phase": "Pending",
        "conditions": [{"type": "PodScheduled", "status": "True", "lastTransitionTime": started}],
        "containerStatuses": [creating],
    }
    return {"metadata": {"name": "p", "uid": "p", "creationTimestamp": started}, "status": {**status, **more}}


def lost(**more: Any) -> Json:
    """A pod as the node's controller leaves it when the node falls silent: its containers are said to be ready."""
    kinds = {"Ready": "False", "ContainersReady": "True", "PodScheduled": "True"}
    conditions = [{"type": kind, "status": is_so, "lastTransitionTime": at(100)} for kind, is_so in kinds.items()]
    status = {"phase": "Running", "conditions": conditions, "containerStatuses": [{"name": "engine", "ready": True}]}
    meta = {"name": "p", "uid": "p", "creationTimestamp": at(0)}
    return {"metadata": meta, "spec": {"nodeName": "one"}, "status": {**status, **more}}


SILENT = {"type": "Ready", "status": "Unknown", "lastTransitionTime": at(99), "message": "Kubelet stopped posting"}


def said(pod: Json, now: float, node: Json | int = 404, *events: Json) -> tuple[Problem | None, float | None]:
    """What is said of a pod, and when it is to be looked at again. `node`: or the status of the refusal."""

    class Answers:
        async def call(self, *_: Any, **__: Any) -> Json:
            return {"items": list(events)}

        async def get(self, kind: str, _: str, name: str) -> Json | None:
            assert (kind, name) == ("Node", "one")
            if node == 404:
                return None
            if isinstance(node, int):
                raise ApiError(node, {"message": "no"})
            return {"status": {"conditions": [node]}}

    found, due = asyncio.run(PodEvents(Answers()).read(("n", "toy"), [pod], now))  # type: ignore[arg-type]
    return diagnose(pod, None, found.get("p", ())), due


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (SILENT, "node one is not ready since 1970-01-01T00:01:39Z: Kubelet stopped posting"),
        (404, "node one is gone"),
        (403, "`kubectl describe node one`"),
    ],
)
def test_a_pod_of_a_dead_node_names_the_node(node: Any, words: str) -> None:
    ending = lost()
    ending["metadata"]["deletionTimestamp"] = at(90)
    unseen = {**waiting(at(80)), "spec": {"nodeName": "one"}}
    for pod in (lost(), ending, unseen):
        problem, _ = said(pod, 101.0 if pod is not ending else 111.0, node)
        if pod is unseen and node == 403:
            continue
        assert problem is not None and problem.reason == "NodeNotReady" and words in problem.message


def test_a_pod_that_is_ending_in_time_or_whose_node_answers_is_no_fault_of_a_node() -> None:
    well = {"type": "Ready", "status": "True"}
    ending = lost()
    ending["metadata"]["deletionTimestamp"] = at(200)
    assert said(ending, 210.0, SILENT)[0] is None, "its grace period may just be over"
    assert said(ending, 230.0, well)[0] is None
    assert said(waiting(at(100)), 130.0, well)[0] is None
    stale = event("NodeNotReady", "Node is not ready", at(90))
    assert said(lost(), 130.0, well, stale)[0] is None, "that was before"


@pytest.mark.parametrize(
    ("pod", "events", "reason", "words"),
    [
        ({**waiting(at(100)), "spec": {"nodeName": "one"}}, [], "PodNotStarted", "1970-01-01T00:01:40Z"),
        (
            {**waiting(at(100)), "spec": {"nodeName": "one"}},
            [event("Pulled", "there", kind="Normal")],
            "PodNotStarted",
            "Pulled: there",
        ),
        (waiting(at(100), conditions=[]), [], "PodNotStarted", "check that default-scheduler runs"),
        ({**waiting(at(100), conditions=[]), "spec": {"schedulerName": "mine"}}, [], "PodNotStarted", "that mine runs"),
        (
            lost(
                conditions=[
                    {
                        "type": "Ready",
                        "status": "False",
                        "reason": "ReadinessGatesNotReady",
                        "message": "of gate example.com/a",
                        "lastTransitionTime": at(100),
                    },
                    {"type": "ContainersReady", "status": "True"},
                ]
            ),
            [],
            "ReadinessGatesNotReady",
            "of gate example.com/a",
        ),
        (
            {**waiting(at(100)), "spec": {"nodeName": "one"}},
            [event("FailedCreatePodSandBox", "no plugin", at(120)), event("SandboxChanged", "x", at(121), "Normal")],
            "SandboxNotCreated",
            "no plugin",
        ),
        (
            {**waiting(at(100)), "spec": {"nodeName": "one"}},
            [event("Odd", "a riddle", at(120))],
            "PodNotStarted",
            "Odd: a riddle",
        ),
        ({**waiting(at(100)), "spec": {"nodeName": "one"}}, [event("Pulling", PULLING, at(120), "Normal")], None, ""),
    ],
)
def test_a_hanging_pod_without_events_is_reported_within_a_minute(
    pod: Json, events: list[Json], reason: str | None, words: str
) -> None:
    well = {"type": "Ready", "status": "True"}
    assert said(pod, 110.0, well)[0] is None or reason != "PodNotStarted"
    now, due = 110.0, said(pod, 110.0, well, *events)[1]
    while due is not None and now + due < 160.0:
        now += due
        problem, due = said(pod, now, well, *events)
    assert now > 145.0, "it is looked at in time"
    assert (problem and problem.reason) == reason
    assert problem is None or words in problem.message


@pytest.mark.parametrize("reason", ["PreStartHookError", "SomethingNew"])
def test_a_container_that_waits_for_something_unknown_says_what(reason: str) -> None:
    pod = waiting(at(100))
    wait = {"waiting": {"reason": reason, "message": "of a kind"}}
    pod["status"]["containerStatuses"] = [{"name": "engine", "ready": False, "restartCount": 0, "state": wait}]
    problem = diagnose(pod)
    assert problem is not None and problem.reason == "PodNotStarted"
    assert f"{reason}: of a kind" in problem.message


def test_scheduling_gates_are_named() -> None:
    gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "gates: example.com/q"}
    problem = diagnose(waiting(at(100), conditions=[gated]))
    assert problem is not None and problem.reason == "SchedulingGated" and "example.com/q" in problem.message
