"""The decision how many replicas are needed, against what Kubernetes' autoscaler makes of it, and what is rendered."""

from __future__ import annotations

from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st
from support.llmd import parsed

from octavo_operator.autoscaling.decision import decide, estimate_capacity, rounded_capacity, update_capacity
from octavo_operator.autoscaling.metrics_page import Load
from octavo_operator.config import OperatorConfig
from octavo_operator.render import render

# What an autoscaler does with the metric, as Kubernetes' replica calculator does it.


def horizontal(replicas: int, metric: int, target: int, least: int = 1, most: int = 1000) -> int:
    if replicas and abs(metric / (target * replicas) - 1) <= 0.1:
        return replicas
    return min(max(-(-metric // target), least), most)


def fleet(replicas: int, demand: int, capacity: int) -> list[Load]:
    """Demand spread evenly over replicas that hold `capacity` each."""
    shares = [demand // replicas + (number < demand % replicas) for number in range(replicas)]
    return [Load(min(share, capacity), max(0, share - capacity), max_running=capacity) for share in shares]


def settled(replicas: int, demand: int, capacity: int, target: int) -> list[int]:
    """The numbers of replicas that follow each other while the same demand stays."""
    known: float | None = None
    out = [replicas]
    for _ in range(6):
        loads = fleet(replicas, demand, capacity)
        one = update_capacity(known, loads) or estimate_capacity(loads)
        replicas = horizontal(replicas, decide(replicas, target, loads, one).metric, target)
        known = update_capacity(known, loads)
        out.append(replicas)
    return out


@given(st.integers(1, 9), st.integers(0, 120), st.integers(1, 24), st.integers(1, 32))
def test_one_step_reaches_a_number_that_the_same_demand_leaves_alone(
    replicas: int, demand: int, capacity: int, target: int
) -> None:
    assume(demand / capacity <= 9)  # from there on, one replica is within an autoscaler's tolerance
    before, after, *later = settled(replicas, demand, capacity, target)
    assert set(later) == {after}, "it flaps"
    waiting = max(0, demand - after * capacity)
    assert waiting <= after * target, "more wait for each replica than the target"
    if after < before:
        assert waiting == 0, "a queue was made by taking replicas away"
    if after > before:
        assert max(0, demand - (after - 1) * capacity) > (after - 1) * target, "one replica too many was added"
    assert after == 1 or (after - 1) * capacity < demand, "a replica has nothing to do and stays"


@given(st.integers(1, 10), st.integers(1, 100))
def test_an_idle_fleet_shrinks_to_the_least(replicas: int, target: int) -> None:
    decision = decide(replicas, target, [Load(0, 0)] * replicas, None)
    assert decision.metric == 0
    assert horizontal(replicas, decision.metric, target, least=1) == 1


def test_the_queue_counts_and_not_how_busy_replicas_are() -> None:
    assert decide(1, 4, [Load(16, 0, max_running=16)], 16).needed == 1, "full, but nobody waits"
    assert decide(1, 4, [Load(16, 4, max_running=16)], 16).needed == 1, "the target is what may wait"
    assert decide(1, 4, [Load(16, 5, max_running=16)], 16).needed == 2
    assert decide(1, 4, [Load(16, 100, max_running=16)], 16).needed == 6, "each one added takes a batch away, not 4"
    assert decide(2, 4, fleet(2, 32, 16), 16).needed == 2, "the queue is gone because there are two"
    assert decide(2, 4, fleet(2, 16, 16), 16).needed == 1


def test_one_waiting_request_too_many_is_seen_through_the_tolerance() -> None:
    """A ratio of requests would be within a tenth: 261 / 260."""
    decision = decide(1, 4, [Load(256, 5)], 256)
    assert horizontal(1, decision.metric, 4) == 2


@given(
    st.integers(1, 10),
    st.integers(1, 32),
    st.lists(st.builds(Load, st.integers(0, 64), st.integers(0, 64)), max_size=10),
    st.one_of(st.none(), st.integers(1, 64)),
)
def test_unknown_loads_take_no_replica_away(
    replicas: int, target: int, loads: list[Load], capacity: int | None
) -> None:
    decision = decide(replicas, target, loads, capacity, unsure=True)
    assert horizontal(replicas, decision.metric, target) >= replicas
    sure = decide(replicas, target, loads, capacity)
    assert decision.needed == max(sure.needed, replicas), "and keeps none from being added"


def test_a_replica_s_capacity_is_learnt() -> None:
    assert update_capacity(None, [Load(3, 0, max_running=64)]) is None
    assert update_capacity(None, [Load(7, 2), Load(9, 1), Load(1, 0)]) == 8, "those that are full tell"
    assert update_capacity(8, [Load(5, 0)]) == 8, (
        "remembered when the queue is gone, or the fleet would shrink and grow again"
    )
    assert update_capacity(8, [Load(12, 0)]) == 12, "requests have become smaller"
    assert estimate_capacity([Load(5, 0, kv_usage=0.5, max_running=64)]) == 10, "KV memory is the narrower limit"
    assert estimate_capacity([Load(5, 0, kv_usage=0.01, max_running=64)]) == 64
    assert estimate_capacity([Load(0, 0)], 16) == 16
    assert estimate_capacity([Load(5, 0)]) is None


@given(st.one_of(st.none(), st.integers(1, 500)), st.floats(1, 500))
def test_a_status_tells_of_what_is_learnt_and_does_not_chatter(before: int | None, capacity: float) -> None:
    said = rounded_capacity(before, capacity)
    assert said is not None
    assert abs(said - capacity) <= max(0.75, said / 10, (before or 0) / 10)
    assert rounded_capacity(said, capacity) == said
    assert rounded_capacity(before, None) == before, "an operator that has just begun has nothing to add"


# What is rendered.


def rendered(kind: str, **spec: Any) -> Any:
    deployment = parsed(**spec)
    objects = render(deployment, OperatorConfig(), apis=frozenset({"ScaledObject"}))
    return next((one for one in objects if one["kind"] == kind), None)


def test_an_autoscaler_writes_the_llmdeployment_and_reads_our_metric() -> None:
    behavior = {"scaleDown": {"stabilizationWindowSeconds": 5}}
    spec = {"minReplicas": 2, "maxReplicas": 5, "queueDepth": {"targetPerReplica": 3}, "behavior": behavior}
    body = rendered("HorizontalPodAutoscaler", autoscaling=spec)["spec"]
    assert body["scaleTargetRef"] == {"apiVersion": "octavo.dev/v1alpha1", "kind": "LLMDeployment", "name": "toy"}
    assert (body["minReplicas"], body["maxReplicas"], body["behavior"]) == (2, 5, behavior)
    external = body["metrics"][0]["external"]
    assert external["metric"]["name"] == "octavo_queue_depth"
    assert external["target"] == {"type": "AverageValue", "averageValue": "3"}
    assert rendered("HorizontalPodAutoscaler") is None


def test_keda_asks_the_operator() -> None:
    spec = {"maxReplicas": 5, "provider": "keda"}
    assert rendered("HorizontalPodAutoscaler", autoscaling=spec) is None
    body = rendered("ScaledObject", autoscaling=spec)["spec"]
    assert body["scaleTargetRef"]["kind"] == "LLMDeployment"
    (trigger,) = body["triggers"]
    assert trigger["metadata"]["url"].endswith("/queue-depth/default/toy")
    assert trigger["metricType"] == "AverageValue"
