"""Rollouts where no GPU is free, judged by Kubernetes' own Deployment controller and scheduler, on fake nodes.

OCTAVO_ROLLOUTS=50 for the full number (CI makes fewer).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
from clusterrig import settings
from clusterrig.api import Api
from clusterrig.fixtures import Cluster, eventually
from support.llmd import toy
from support.timeline import timeline

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ROLLOUTS = int(os.environ.get("OCTAVO_ROLLOUTS", "10"))
Gpus = Callable[[int], None]


@pytest.fixture(autouse=True)
def _running(operator: Any) -> None:
    """Every test needs the operator, with a Lease that outlives the load that many rollouts are."""
    if operator.environment["OCTAVO_LEASE_SECONDS"] != "15":
        operator.environment["OCTAVO_LEASE_SECONDS"] = "15"
        operator.restart()


@pytest.fixture
def api() -> Api:
    return Api(settings.default_places())


@pytest.fixture
def gpus(namespace: str, fake_nodes: Callable[..., None]) -> Gpus:
    """Gives the namespace a node with so many GPUs."""
    return lambda count: fake_nodes(gpus=count, product=namespace)


def model(namespace: str, name: str = "toy", version: str = "1", patience: int = 1, **spec: Any) -> dict[str, Any]:
    scheduling = {"nodeSelector": {"nvidia.com/gpu.product": namespace}, "tolerations": [{"operator": "Exists"}]}
    return toy(
        "example.com/none:1",
        name=name,
        **{
            "accelerator": {"count": 1},
            "scheduling": scheduling,
            "rollout": {"surgePatienceSeconds": patience},
            "engine": {"env": [{"name": "VERSION", "value": version}]},
            **spec,
        },
    )


def pods(api: Api, namespace: str, name: str = "") -> list[dict[str, Any]]:
    label = f"?labelSelector=octavo.dev/llmdeployment={name}" if name else ""
    found = api.call("GET", f"/api/v1/namespaces/{namespace}/pods{label}")["items"]
    return [pod for pod in found if not is_going(pod)]


def is_going(pod: dict[str, Any]) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def version(pod: dict[str, Any]) -> str:
    env = pod["spec"]["containers"][0]["env"]
    return str(next(variable["value"] for variable in env if variable["name"] == "VERSION"))


def is_placed(pod: dict[str, Any]) -> bool:
    return bool(pod["spec"].get("nodeName"))


def is_ready(pod: dict[str, Any]) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions") or [])


def serving(api: Api, namespace: str, wanted: str, count: int) -> bool:
    """Whether just so many pods run, all of them of one version."""
    found = pods(api, namespace)
    return all(version(pod) == wanted for pod in found) and sum(map(is_ready, found)) == count


@pytest.mark.parametrize("missing", [0, 3], ids=["every-gpu-is-taken", "fewer-gpus-than-replicas"])
def test_many_rollouts_at_once_all_come_to_their_end(
    cluster: Cluster, namespace: str, gpus: Gpus, api: Api, operator: Any, missing: int
) -> None:
    replicas = {f"m{number}": 1 + number % 3 for number in range(ROLLOUTS)}
    total = sum(replicas.values())
    gpus(total - missing)

    def apply(wanted: str) -> None:
        manifests = [model(namespace, name, wanted, 2, replicas=count) for name, count in replicas.items()]
        cluster.apply(*manifests, namespace=namespace)

    def all_serve(wanted: str) -> bool:
        if operator.process.poll() is not None:  # on a starved machine it may lose its Lease; a kubelet starts it anew
            operator.start()
        return len(pods(api, namespace)) == total and serving(api, namespace, wanted, total - missing)

    apply("1")
    eventually(lambda: all_serve("1"), 60 + 3 * ROLLOUTS, every=0.5)
    start = time.monotonic()
    apply("2")
    eventually(lambda: all_serve("2"), 120 + 5 * ROLLOUTS, every=0.5)
    print(f"{ROLLOUTS} rollouts of {total} pods on {total - missing} GPUs: {time.monotonic() - start:.0f} s")


def test_patience_first_then_one_after_the_other(cluster: Cluster, namespace: str, gpus: Gpus, api: Api) -> None:
    gpus(3)
    cluster.apply(model(namespace, patience=6, replicas=3), namespace=namespace)
    eventually(lambda: serving(api, namespace, "1", 3), 60)
    with timeline([cluster.program, f"--kubeconfig={cluster.kubeconfig}"], namespace) as record:
        eventually(lambda: next(record.states("Pod"), None), 20)
        cluster.apply(model(namespace, version="2", patience=6, replicas=3), namespace=namespace)
        eventually(lambda: serving(api, namespace, "2", 3), 90)
    under_way = [(when, there) for when, there in record.states("Pod") if any(version(pod) == "2" for pod in there)]
    ready = [(when, sum(is_ready(pod) for pod in there if not is_going(pod))) for when, there in under_way]
    fewest = min(count for _, count in ready)
    first = next(when for when, count in ready if count < 3) - ready[0][0]
    assert first > 5, "patience was not kept"
    assert fewest == 2, "never more than one replica is missing"
    told = [event["reason"] for event in cluster.get("events", namespace=namespace)["items"]]
    assert told.count("StoppingOldPods") == 1


def test_a_rollout_whose_pods_fit_nowhere_takes_nobody_and_is_reverted(
    cluster: Cluster, namespace: str, gpus: Gpus, api: Api
) -> None:
    gpus(2)
    cluster.apply(model(namespace, replicas=2), namespace=namespace)
    eventually(lambda: serving(api, namespace, "1", 2), 60)
    before = {pod["metadata"]["uid"] for pod in pods(api, namespace)}
    misspelt = {"scheduling": {"nodeSelector": {"no": "such"}, "tolerations": [{"operator": "Exists"}]}}
    cluster.apply(model(namespace, version="2", replicas=2, **misspelt), namespace=namespace)
    eventually(lambda: len(pods(api, namespace)) == 3, 20)
    time.sleep(4)
    assert sum(map(is_ready, pods(api, namespace))) == 2
    cluster.apply(model(namespace, replicas=2), namespace=namespace)
    eventually(lambda: {pod["metadata"]["uid"] for pod in pods(api, namespace)} == before, 30)


def test_a_broken_version_that_holds_gpus_is_reverted_at_once(
    cluster: Cluster, namespace: str, gpus: Gpus, api: Api
) -> None:
    gpus(2)
    careful = {"surgePatienceSeconds": 1, "minReadySeconds": 5}
    cluster.apply(model(namespace, replicas=2, rollout=careful), namespace=namespace)
    eventually(lambda: serving(api, namespace, "1", 2), 60)
    cluster.apply(model(namespace, version="2", replicas=2, rollout=careful), namespace=namespace)

    def of_the_new() -> Any:
        return next((pod for pod in pods(api, namespace) if version(pod) == "2" and is_ready(pod)), None)

    break_it(api, namespace, eventually(of_the_new, 60, every=0.02)["metadata"]["name"])  # soon after its start
    time.sleep(3)
    (survivor,) = [pod["metadata"]["uid"] for pod in pods(api, namespace) if version(pod) == "1" and is_ready(pod)]
    patient = {**careful, "surgePatienceSeconds": 3600}
    cluster.apply(model(namespace, version="1", replicas=2, rollout=patient), namespace=namespace)
    start = time.monotonic()
    eventually(lambda: serving(api, namespace, "1", 2), 60)
    assert survivor in {pod["metadata"]["uid"] for pod in pods(api, namespace)}, "one that served was taken"
    print(f"reverted after {time.monotonic() - start:.1f} s")


def break_it(api: Api, namespace: str, name: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/pods/{name}"
    conditions = [
        {**one, "status": "False"} if one["type"] in ("Ready", "ContainersReady") else one
        for one in api.call("GET", path)["status"]["conditions"]
    ]
    body = {"status": {"conditions": conditions}}
    api.call("PATCH", f"{path}/status", body, "application/merge-patch+json")


def test_a_full_quota_does_not_stop_a_rollout(cluster: Cluster, namespace: str, gpus: Gpus, api: Api) -> None:
    gpus(8)
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "gpus"},
        "spec": {"hard": {"requests.nvidia.com/gpu": "2"}},
    }
    cluster.apply(quota, namespace=namespace)
    cluster.apply(model(namespace, replicas=2), namespace=namespace)
    eventually(lambda: serving(api, namespace, "1", 2), 60)
    cluster.apply(model(namespace, version="2", replicas=2), namespace=namespace)
    eventually(lambda: serving(api, namespace, "2", 2) and len(pods(api, namespace)) == 2, 120)


def test_suspend_to_nothing_and_back(cluster: Cluster, namespace: str, gpus: Gpus, api: Api) -> None:
    names = {f"m{number}": 1 + number % 3 for number in range(ROLLOUTS)}
    total = sum(names.values())
    gpus(total)
    cluster.apply(*(model(namespace, name, replicas=count) for name, count in names.items()), namespace=namespace)
    eventually(lambda: serving(api, namespace, "1", total), 90)
    path = f"/apis/octavo.dev/v1alpha1/namespaces/{namespace}/llmdeployments"

    def suspend(value: bool) -> None:
        for name in names:
            api.call("PATCH", f"{path}/{name}", {"spec": {"suspend": value}}, "application/merge-patch+json")

    suspend(True)
    eventually(lambda: not pods(api, namespace), 60)
    services = cluster.get("services", namespace=namespace)["items"]
    assert len(services) == ROLLOUTS, "all else stays"
    eventually(
        lambda: all(
            any(c["type"] == "Available" and c["reason"] == "Suspended" for c in item["status"]["conditions"])
            for item in api.call("GET", path)["items"]
        ),
        30,
    )
    suspend(False)
    eventually(lambda: serving(api, namespace, "1", total) and len(pods(api, namespace)) == total, 90)
    assert json.loads(cluster.kubectl("get", "--raw", path))["items"][0]["spec"]["replicas"] == names["m0"]
