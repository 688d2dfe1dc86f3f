"""Pods that carry an LLMDeployment's label and are none of its engine's: whatever becomes of them, the engine's status,
metrics, load and rollouts do not see them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.llmd import parsed, store_of
from support.worlds import world

from octavo_operator.autoscaling.load_reader import LoadReader
from octavo_operator.config import OperatorConfig
from octavo_operator.deployment.reconcile import Outcome, reconcile
from octavo_operator.deployment.rollout import MAKE_ROOM
from octavo_operator.kube.store import Observed
from octavo_operator.observed.children import child, pods_of
from octavo_operator.writes.plan import Apply

Json = dict[str, Any]
LONG_AGO = "2026-01-01T00:00:00Z"
NOW = 1.9e9
READY = [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "True"}]
CRASHING = {
    "name": "c",
    "restartCount": 9,
    "state": {"waiting": {"reason": "CrashLoopBackOff"}},
    "lastState": {"terminated": {"exitCode": 1}},
}
UNSCHEDULABLE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/1 nodes: Insufficient cpu",
    "lastTransitionTime": LONG_AGO,
}


def pod(name: str, component: str, **status: Any) -> Observed:
    labels = {"octavo.dev/llmdeployment": "toy", "app.kubernetes.io/component": component, "pod-template-hash": name}
    meta = {
        "name": name,
        "namespace": "default",
        "uid": name,
        "resourceVersion": "1",
        "labels": labels,
        "creationTimestamp": LONG_AGO,
    }
    status = {"phase": "Running", "conditions": READY, "podIP": "127.0.0.1", **status}
    body = {"metadata": meta, "spec": {"containers": [{"name": "c"}]}, "status": status}
    return Observed.of("Pod", "v1", body)


def serving(*pods: Observed) -> Outcome:
    """What is said and done of one whose engine serves, beside `pods`."""
    first = reconcile(parsed(), world(now=NOW), OperatorConfig())
    children = []
    for action in first.plan.actions:
        assert isinstance(action, Apply)
        one = action.manifest
        counts = dict.fromkeys(("replicas", "updatedReplicas", "readyReplicas", "availableReplicas"), 1)
        status = {"status": {"observedGeneration": 1, **counts}} if one["kind"] == "Deployment" else {}
        meta = {**one["metadata"], "uid": one["kind"], "generation": 1, "resourceVersion": "1"}
        children.append(Observed.of(one["kind"], one["apiVersion"], {**one, **status, "metadata": meta}))
    return reconcile(parsed(), world([*children, pod("engine", "engine"), *pods], now=NOW), OperatorConfig())


@pytest.mark.parametrize(
    ("component", "status"),
    [
        ("router", {"conditions": [], "containerStatuses": [CRASHING]}),
        ("router", {"phase": "Pending", "conditions": [UNSCHEDULABLE]}),
    ],
    ids=["crashing", "unschedulable"],
)
def test_a_pod_of_another_component_is_no_engine(component: str, status: Json) -> None:
    outcome = serving(pod("other", component, **status))
    assert outcome.status is not None
    said = {one["type"]: (one["status"], one["reason"]) for one in outcome.status["conditions"]}
    assert said["Ready"] == ("True", "Ready")
    assert said["Degraded"] == ("False", "AsExpected")
    assert outcome.plan.actions == [], "nor is room made for it"
    assert outcome.requeue_after is None
    assert MAKE_ROOM not in str(outcome.plan)
    assert serving(pod("engine-2", "engine", **status)).status != outcome.status, "the same pod of the engine counts"


def test_scale_selects_pods_of_the_engine_alone() -> None:
    """An autoscaler divides the load by the pods that this selects."""
    outcome = serving()
    assert outcome.status is not None
    assert outcome.status["selector"] == "app.kubernetes.io/component=engine,octavo.dev/llmdeployment=toy"


def test_only_the_engine_is_asked_for_its_load_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(pod("engine", "engine").body, pod("other", "router").body, replicas=1)
    asked = []

    async def fetch(self: LoadReader, url: str) -> bytes:
        asked.append(url)
        return b"vllm:num_requests_running 1\nvllm:num_requests_waiting 0\n"

    monkeypatch.setattr(LoadReader, "_fetch", fetch)
    decision = asyncio.run(LoadReader(store, lambda _: None).read(("default", "toy")))
    assert len(asked) == 1
    assert decision.running == 1


def test_children_are_found_by_component_and_by_name() -> None:
    children = [pod("a", "router"), pod("b", "engine")]
    assert [one["metadata"]["name"] for one in pods_of(children)] == ["b"]
    assert [one["metadata"]["name"] for one in pods_of(children, "router")] == ["a"]
    assert child(children, "Pod", "c") is None
