"""Groups of pods on a real control plane: LeaderWorkerSet's controller makes them, kwok's nodes seem to run them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest
from clusterrig import settings
from clusterrig.api import Api
from clusterrig.fixtures import Cluster, eventually
from support.fleet import Fleet
from support.llmd import toy

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.alone]

NONE = "example.com/none:1"
GROUPED: dict[str, Any] = {"parallelism": {"tensor": 2, "nodes": 2}}
LEADERS = "octavo.dev/llmdeployment=toy,app.kubernetes.io/component=engine"
HALF_SECONDS = 60.0  # for which a half group may keep its places


def on_fake_nodes(namespace: str, **spec: Any) -> dict[str, Any]:
    """A group's pod takes a GPU."""
    scheduling = {"nodeSelector": {"nvidia.com/gpu.product": namespace}, "tolerations": [{"operator": "Exists"}]}
    return toy(NONE, accelerator={"count": 1}, scheduling=scheduling, **{**GROUPED, **spec})


def status(cluster: Cluster, namespace: str) -> dict[str, Any]:
    found: dict[str, Any] = cluster.get("llmd", "toy", namespace=namespace).get("status") or {}
    return found


def condition(cluster: Cluster, namespace: str, kind: str) -> dict[str, Any]:
    found = status(cluster, namespace).get("conditions") or []
    return next((one for one in found if one["type"] == kind), {})


def pods(cluster: Cluster, namespace: str, *selector: str) -> list[dict[str, Any]]:
    where = ["-l", *selector] if selector else []
    return list(cluster.get("pods", *where, namespace=namespace)["items"])


def halves(found: list[dict[str, Any]], size: int = 2) -> dict[str, float]:
    """When each group that has some of its places got the first, terminating pods included."""
    placed: dict[str, list[float]] = {}
    for pod in found:
        if pod["spec"].get("nodeName"):
            since = next(one for one in pod["status"]["conditions"] if one["type"] == "PodScheduled")
            stamp = datetime.fromisoformat(since["lastTransitionTime"].replace("Z", "+00:00")).timestamp()
            placed.setdefault(pod["metadata"]["labels"]["leaderworkerset.sigs.k8s.io/group-index"], []).append(stamp)
    return {index: min(stamps) for index, stamps in placed.items() if len(stamps) < size}


def test_three_groups_where_two_have_room(
    cluster: Cluster, namespace: str, operator: Any, group_controller: None, fake_nodes: Callable[..., None]
) -> None:
    """Five GPUs: two groups run, the third gives back what it has, and a condition says why. With more room it runs."""
    fake_nodes(5, gpus=1)
    cluster.apply(on_fake_nodes(namespace, replicas=3), namespace=namespace)
    longest, until = 0.0, time.time() + 110
    while time.time() < until:
        alone = halves(pods(cluster, namespace))
        longest = max([longest, *(time.time() - since for since in alone.values())])
        if not alone and condition(cluster, namespace, "Degraded").get("reason") == "GroupUnschedulable":
            break
        time.sleep(0.5)
    assert condition(cluster, namespace, "Degraded")["reason"] == "GroupUnschedulable"
    assert "1 of 3 groups" in condition(cluster, namespace, "Degraded")["message"]
    eventually(lambda: status(cluster, namespace)["readyReplicas"] == 2, 20)
    print(f"\nthe longest that a half group kept its places: {longest:.0f} s")
    assert longest <= HALF_SECONDS
    assert condition(cluster, namespace, "Available")["status"] == "True"
    running = {pod["metadata"]["uid"] for pod in pods(cluster, namespace)}
    assert len(running) == 4
    fake_nodes(6, gpus=1)
    eventually(lambda: status(cluster, namespace).get("readyReplicas") == 3, 100)
    assert running <= {pod["metadata"]["uid"] for pod in pods(cluster, namespace)}
    eventually(lambda: condition(cluster, namespace, "Ready").get("status") == "True", 20)


def test_the_load_of_leaders_scales_groups(
    cluster: Cluster, namespace: str, operator: Any, group_controller: None, fake_nodes: Callable[..., None]
) -> None:
    fake_nodes()
    operator.restart(**operator.with_metrics())
    api = Api(settings.default_places())
    with Fleet(api, namespace) as fleet:
        scaling = {"maxReplicas": 2, "queueDepth": {"targetPerReplica": 2}}
        cluster.apply(fleet.manifest(toy(NONE, autoscaling=scaling, **GROUPED)), namespace=namespace)
        eventually(lambda: condition(cluster, namespace, "AutoscalerReady").get("reason") == "Scaling", 60)
        fleet.rate = 8.0  # a group serves four a second
        eventually(lambda: status(cluster, namespace).get("readyReplicas") == 2, 60)
        scale = json.loads(cluster.kubectl("get", "--raw", _scale_path(namespace)))
        assert (scale["spec"]["replicas"], scale["status"]["replicas"]) == (2, 2), "groups are counted"
        assert scale["status"]["selector"] == ",".join(sorted(LEADERS.split(",")))
        assert len(pods(cluster, namespace)) == 4
        assert len(pods(cluster, namespace, scale["status"]["selector"])) == 2
        fleet.rate = 0.0
    operator.restart()


@pytest.mark.parametrize("room", [0, 1])
def test_a_quota_that_is_used_up_is_told_of_groups(
    cluster: Cluster, namespace: str, operator: Any, group_controller: None, fake_nodes: Callable[..., None], room: int
) -> None:
    """Leaders are refused, or their workers, which another StatefulSet makes. With a larger quota the group runs."""
    fake_nodes(2, gpus=1)
    quota(cluster, namespace, room)
    cluster.apply(on_fake_nodes(namespace), namespace=namespace)
    eventually(lambda: condition(cluster, namespace, "Degraded").get("reason") == "QuotaExceeded", 60)
    message = condition(cluster, namespace, "Degraded")["message"]
    assert "exceeded quota" in message and "raise it" in message
    assert len(pods(cluster, namespace)) == room
    quota(cluster, namespace, 2)
    eventually(lambda: condition(cluster, namespace, "Ready").get("status") == "True", 180)
    assert condition(cluster, namespace, "Degraded")["status"] == "False"


def quota(cluster: Cluster, namespace: str, room: int) -> None:
    """So many pods."""
    hard = {"pods": str(room)}
    body = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few"}, "spec": {"hard": hard}}
    cluster.apply(body, namespace=namespace)
    eventually(lambda: cluster.get("quota", "few", namespace=namespace)["status"]["hard"] == hard, 20)


def _scale_path(namespace: str) -> str:
    return f"/apis/octavo.dev/v1alpha1/namespaces/{namespace}/llmdeployments/toy/scale"
