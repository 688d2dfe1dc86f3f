"""Autoscaling judged by Kubernetes' own HorizontalPodAutoscaler, through the real aggregation layer.

OCTAVO_BURSTS=10 for the full number of bursts (CI makes fewer).
"""

from __future__ import annotations

import base64
import json
import os
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from clusterrig import settings
from clusterrig.api import Api
from clusterrig.fixtures import Cluster, eventually
from support.fleet import Fleet
from support.llmd import manifest, toy

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

BURSTS = int(os.environ.get("OCTAVO_BURSTS", "3"))
SYNC_SECONDS = 2.0  # of the rig's controller manager
API_SERVICE = "v1beta1.external.metrics.k8s.io"
QUICK = {"scaleDown": {"stabilizationWindowSeconds": 4}}


@pytest.fixture(autouse=True)
def _needs_the_rig(cluster: Cluster) -> None:
    if not cluster.is_rig:
        pytest.skip("needs fake nodes, and the only external.metrics.k8s.io of a cluster")


@pytest.fixture
def scaling(operator: Any) -> Iterator[Any]:
    """The operator, serving the metrics API."""
    operator.restart(**operator.with_metrics())
    yield operator
    operator.restart()


@pytest.fixture
def nodes(namespace: str, fake_nodes: Callable[..., None]) -> str:
    fake_nodes()
    return namespace


@pytest.fixture
def api() -> Api:
    return Api(settings.default_places())


@pytest.fixture
def fleet(api: Api, nodes: str) -> Iterator[Fleet]:
    with Fleet(api, nodes) as one:
        yield one


def scaled(fleet: Fleet, **more: Any) -> dict[str, Any]:
    autoscaling = {"maxReplicas": 4, "queueDepth": {"targetPerReplica": 2}, "behavior": QUICK, **more}
    return fleet.manifest(toy("example.com/none:1", autoscaling=autoscaling))


def status(api: Api, namespace: str) -> dict[str, Any]:
    body = api.call("GET", f"/apis/octavo.dev/v1alpha1/namespaces/{namespace}/llmdeployments/toy")
    return body.get("status") or {}


def condition(api: Api, namespace: str, kind: str = "AutoscalerReady") -> dict[str, Any]:
    return next((one for one in status(api, namespace).get("conditions") or [] if one["type"] == kind), {})


def replicas(api: Api, namespace: str) -> int:
    path = f"/apis/octavo.dev/v1alpha1/namespaces/{namespace}/llmdeployments/toy"
    return int(api.call("GET", path)["spec"]["replicas"])


def becomes(api: Api, namespace: str, reason: str, seconds: float = 40) -> str:
    deadline = time.monotonic() + seconds
    while (found := condition(api, namespace)).get("reason") != reason:
        assert time.monotonic() < deadline, f"not {reason} within {seconds:.0f} s, but {found}"
        time.sleep(0.2)
    return str(found["message"])


class Watch:
    """Every number of replicas that an LLMDeployment had, and when."""

    def __init__(self, api: Api, namespace: str) -> None:
        self.seen: list[tuple[float, int]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(api, namespace))

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self, api: Api, namespace: str) -> None:
        while not self._stop.wait(0.05):
            now = replicas(api, namespace)
            if not self.seen or self.seen[-1][1] != now:
                self.seen.append((time.monotonic(), now))


@pytest.mark.alone
def test_bursts_are_taken_at_once_and_without_flapping(
    cluster: Cluster, nodes: str, fleet: Fleet, api: Api, scaling: Any
) -> None:
    cluster.apply(scaled(fleet), namespace=nodes)
    becomes(api, nodes, "Scaling")
    waits = []
    for number in range(BURSTS):
        with Watch(api, nodes) as watch:
            eventually(lambda: watch.seen)
            assert watch.seen == [(watch.seen[0][0], 1)]
            fleet.first_queued = None
            fleet.arrive(15)
            fleet.rate = 6.0  # one replica serves 4 a second
            eventually(lambda: len(watch.seen) > 1, 15, every=0.02)
            assert fleet.first_queued is not None
            waits.append(watch.seen[1][0] - fleet.first_queued)
            time.sleep(6)
            fleet.rate = 0.0
            eventually(lambda: watch.seen[-1][1] == 1, 60)
        numbers = [count for _, count in watch.seen]
        top = numbers.index(max(numbers))
        print(f"burst {number}: {waits[-1]:.1f} s, replicas {numbers}")
        assert numbers[: top + 1] == sorted(numbers[: top + 1]), "down while the load grew"
        assert numbers[top:] == sorted(numbers[top:], reverse=True), "up when the load was gone"
    assert max(waits) <= 2 * SYNC_SECONDS + 2


def test_an_operator_that_dies_in_a_burst_costs_no_replica(
    cluster: Cluster, nodes: str, fleet: Fleet, api: Api, scaling: Any
) -> None:
    cluster.apply(scaled(fleet), namespace=nodes)
    becomes(api, nodes, "Scaling")
    fleet.request_seconds = 3.0
    fleet.rate = 4.0  # 12 in flight, 3 replicas' worth
    eventually(lambda: replicas(api, nodes) >= 3, 30)
    eventually(lambda: status(api, nodes)["replicaCapacity"] == fleet.capacity, 10)
    with Watch(api, nodes) as watch:
        scaling.kill()
        time.sleep(3 * SYNC_SECONDS + 4)
        assert len(watch.seen) == 1, "nobody who can be asked, nothing is changed"
        scaling.start(**scaling.with_metrics())
        becomes(api, nodes, "Scaling")
        time.sleep(2 * SYNC_SECONDS)
        scaling.restart(**scaling.with_metrics())
        becomes(api, nodes, "Scaling")
        assert min(count for _, count in watch.seen) >= watch.seen[0][1], "the load is as it was"
        fleet.rate = 0.0
        eventually(lambda: replicas(api, nodes) == 1, 60)


def test_pods_that_cannot_be_read_take_no_replica_away(
    cluster: Cluster, nodes: str, fleet: Fleet, api: Api, scaling: Any
) -> None:
    cluster.apply(scaled(fleet, minReplicas=1), namespace=nodes)
    becomes(api, nodes, "Scaling")
    fleet.request_seconds = 3.0
    fleet.rate = 4.0
    eventually(lambda: replicas(api, nodes) >= 3 and len(fleet.replicas) >= 3, 40)
    for replica in list(fleet.replicas.values())[:1]:
        replica.answers = "nonsense"
    fleet.rate = 0.0
    message = becomes(api, nodes, "PodMetricsUnavailable", 30)
    assert "'lots', not a number" in message
    before = replicas(api, nodes)
    time.sleep(4 + 3 * SYNC_SECONDS)
    assert replicas(api, nodes) == before >= 3
    for replica in list(fleet.replicas.values()):
        replica.answers = "500"
    eventually(lambda: "HTTP status 500" in condition(api, nodes)["message"], 30)
    assert condition(api, nodes)["status"] == "False"
    time.sleep(4 + 3 * SYNC_SECONDS)
    assert replicas(api, nodes) == before
    for replica in list(fleet.replicas.values()):
        replica.answers = "page"
    eventually(lambda: replicas(api, nodes) == 1, 60)
    becomes(api, nodes, "Scaling")


def test_a_manifest_without_replicas_does_not_reset_a_scaled_fleet(
    cluster: Cluster, nodes: str, fleet: Fleet, api: Api, scaling: Any
) -> None:
    body = scaled(fleet, minReplicas=3)
    assert "replicas" not in body["spec"]
    cluster.apply(body, namespace=nodes)
    eventually(lambda: replicas(api, nodes) == 3, 40)
    with Watch(api, nodes) as watch:
        for number in range(3):
            body["metadata"]["annotations"] = {"round": str(number)}
            cluster.apply(body, namespace=nodes)
            text = json.dumps({**body, "metadata": {**body["metadata"], "namespace": nodes}})
            cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", input=text)
            time.sleep(SYNC_SECONDS)
    assert [count for _, count in watch.seen] == [3]


def test_suspend_and_back_keeps_the_number(cluster: Cluster, nodes: str, fleet: Fleet, api: Api, scaling: Any) -> None:
    cluster.apply(scaled(fleet, minReplicas=1), namespace=nodes)
    becomes(api, nodes, "Scaling")
    fleet.request_seconds, fleet.rate = 3.0, 4.0
    eventually(lambda: replicas(api, nodes) >= 2, 40)
    fleet.rate = 0.0
    cluster.kubectl("patch", "llmd/toy", "-n", nodes, "--type=merge", "-p", '{"spec":{"suspend":true}}')
    becomes(api, nodes, "Suspended")
    eventually(lambda: not cluster.get("pods", namespace=nodes)["items"], 40)
    before = replicas(api, nodes)
    time.sleep(4 + 3 * SYNC_SECONDS)
    assert replicas(api, nodes) == before >= 2
    cluster.kubectl("patch", "llmd/toy", "-n", nodes, "--type=merge", "-p", '{"spec":{"suspend":false}}')
    eventually(lambda: replicas(api, nodes) == 1, 60)


ENGINE_IMAGE = os.environ.get("OCTAVO_SERVER_IMAGE") or "octavo.dev/e2e/server:test"


def is_in_the_rig(image: str) -> bool:
    """Whether the kubelet can pull it from the rig's registry."""
    name, tag = re.split("[:@]", image.partition("/")[2], maxsplit=1)  # a tag, a digest, or both
    tag = tag.rpartition("@")[2]
    kinds = "application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json"
    url = f"http://{settings.REGISTRY}/v2/{name}/manifests/{tag}"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": kinds}), timeout=5) as answer:
            return int(answer.status) == 200
    except OSError:
        return False


def metric(address: str, name: str) -> float:
    with urllib.request.urlopen(f"http://{address}:8001/metrics", timeout=5) as answer:
        line = next(line for line in answer.read().decode().splitlines() if line.startswith(name + "{"))
    return float(line.rpartition(" ")[2])


def test_a_burst_on_real_engines(cluster: Cluster, namespace: str, api: Api, scaling: Any) -> None:
    """Pods of the engine itself, a Service, and clients that want long answers."""
    if not is_in_the_rig(ENGINE_IMAGE):
        pytest.skip(f"the rig has no {ENGINE_IMAGE}; tests/e2e builds it, OCTAVO_SERVER_IMAGE names another")
    engine = {"image": ENGINE_IMAGE, "maxNumSeqs": 2, "env": [{"name": "OMP_NUM_THREADS", "value": "1"}]}
    autoscaling = {"maxReplicas": 2, "queueDepth": {"targetPerReplica": 2}, "behavior": QUICK}
    body = manifest("toy", namespace, engine=engine, autoscaling=autoscaling, lifecycle={"preStopSeconds": 2})
    cluster.apply(body, namespace=namespace)
    becomes(api, namespace, "Scaling", 240)
    eventually(lambda: condition(api, namespace, "Ready").get("status") == "True", 300)
    (pod,) = cluster.get("pods", namespace=namespace)["items"]
    service = cluster.get("service", "toy", namespace=namespace)["spec"]["clusterIP"]
    stop, failures = threading.Event(), []

    def client(number: int) -> None:
        words = {"model": "toy", "prompt": f"{number} Once upon a time", "max_tokens": 60, "ignore_eos": True}
        request = urllib.request.Request(
            f"http://{service}/v1/completions", json.dumps(words).encode(), {"Content-Type": "application/json"}
        )
        while not stop.is_set():
            try:
                with urllib.request.urlopen(request, timeout=120) as answer:
                    assert json.loads(answer.read())["usage"]["completion_tokens"] == 60
            except (OSError, AssertionError) as error:
                failures.append(error)

    clients = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    with Watch(api, namespace) as watch:
        for thread in clients:
            thread.start()
        eventually(lambda: metric(pod["status"]["podIP"], "vllm:num_requests_waiting") > 0, 30, every=0.02)
        queued = time.monotonic()
        eventually(lambda: watch.seen[-1][1] == 2, 30, every=0.02)
        waited = watch.seen[-1][0] - queued
        eventually(lambda: condition(api, namespace, "Ready").get("message", "").startswith("2 of 2"), 300)
        time.sleep(3 * SYNC_SECONDS)
        stop.set()
        for thread in clients:
            thread.join()
        eventually(lambda: watch.seen[-1][1] == 1, 90)
    print(f"real engines: {waited:.1f} s from the first queued request, replicas {[count for _, count in watch.seen]}")
    assert [count for _, count in watch.seen] == [1, 2, 1]
    assert waited <= 2 * SYNC_SECONDS + 2
    assert not failures


# The API itself.


def raw(cluster: Cluster, namespace: str, *flags: str) -> Any:
    path = f"/apis/external.metrics.k8s.io/v1beta1/namespaces/{namespace}/octavo_queue_depth"
    return cluster.try_kubectl("get", "--raw", path, *flags)


def api_service(cluster: Cluster) -> Any:
    done = cluster.try_kubectl("get", "apiservice", API_SERVICE, "-o", "json")
    return json.loads(done.stdout) if done.returncode == 0 else None


def test_only_who_may_sees_the_metric(cluster: Cluster, nodes: str, fleet: Fleet, api: Api, scaling: Any) -> None:
    cluster.apply(scaled(fleet), namespace=nodes)
    becomes(api, nodes, "Scaling")
    body = json.loads(raw(cluster, nodes).stdout)
    (item,) = body["items"]
    assert (item["metricName"], item["metricLabels"]["octavo.dev/llmdeployment"]) == ("octavo_queue_depth", "toy")
    assert "Forbidden" in raw(cluster, nodes, "--as=eve").stderr
    cluster.kubectl("create", "rolebinding", "eve", "-n", nodes, "--clusterrole=view", "--user=eve")
    eventually(lambda: raw(cluster, nodes, "--as=eve").returncode == 0, 15)
    assert raw(cluster, "default", "--as=eve").returncode != 0


def test_the_certificate_is_renewed_under_way_and_the_bundle_kept_in_step(
    cluster: Cluster, nodes: str, fleet: Fleet, api: Api, scaling: Any
) -> None:
    scaling.restart(**scaling.with_metrics(OCTAVO_METRICS_CERTIFICATE_SECONDS="16"))
    cluster.apply(scaled(fleet), namespace=nodes)
    becomes(api, nodes, "Scaling")
    bundles = set()
    deadline = time.monotonic() + 25
    while time.monotonic() < deadline:
        done = raw(cluster, nodes)
        assert done.returncode == 0, done.stderr
        bundles.add(api_service(cluster)["spec"]["caBundle"])
    assert len(bundles) >= 5, "a new authority, and one gone, every eight seconds"
    assert all(b"BEGIN CERTIFICATE" in base64.b64decode(bundle) for bundle in bundles)
    nonsense = [{"op": "replace", "path": "/spec/caBundle", "value": next(iter(bundles))}]
    cluster.kubectl("patch", "apiservice", API_SERVICE, "--type=json", "-p", json.dumps(nonsense))
    eventually(lambda: raw(cluster, nodes).returncode == 0, 15)


def test_an_apiservice_of_somebody_else_is_left_alone(
    cluster: Cluster, nodes: str, fleet: Fleet, api: Api, scaling: Any
) -> None:
    eventually(lambda: api_service(cluster) is None, 60)  # nobody is scaled, so nothing is registered
    theirs = {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": API_SERVICE},
        "spec": {
            "group": "external.metrics.k8s.io",
            "version": "v1beta1",
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
            "insecureSkipTLSVerify": True,
            "service": {"namespace": nodes, "name": "keda-operator-metrics-apiserver", "port": 443},
        },
    }
    cluster.kubectl("create", "-f", "-", input=json.dumps(theirs))
    try:
        cluster.apply(scaled(fleet), namespace=nodes)
        message = becomes(api, nodes, "APIServiceConflict")
        assert f"{nodes}/keda-operator-metrics-apiserver" in message
        assert "provider keda" in message
        time.sleep(6)
        assert api_service(cluster)["spec"]["service"]["name"] == "keda-operator-metrics-apiserver"
    finally:
        cluster.kubectl("delete", "apiservice", API_SERVICE)
    becomes(api, nodes, "Scaling")
    assert api_service(cluster)["spec"]["service"]["name"].endswith("-metrics")


def test_the_api_goes_with_the_last_user_and_with_the_operator(
    cluster: Cluster, nodes: str, fleet: Fleet, api: Api, scaling: Any
) -> None:
    cluster.apply(scaled(fleet), namespace=nodes)
    becomes(api, nodes, "Scaling")
    assert api_service(cluster)["metadata"]["ownerReferences"][0]["kind"] == "ClusterRole"
    assert scaling.stop() == 0
    assert api_service(cluster) is None
    scaling.start(**scaling.with_metrics())
    becomes(api, nodes, "Scaling")
    cluster.kubectl("patch", "llmd/toy", "-n", nodes, "--type=merge", "-p", '{"spec":{"autoscaling":null}}')
    eventually(lambda: api_service(cluster) is None, 15)
    assert condition(api, nodes) == {}
    assert not cluster.get("hpa", namespace=nodes)["items"]


def test_an_operator_that_does_not_serve_the_api_says_so(
    cluster: Cluster, nodes: str, fleet: Fleet, api: Api, operator: Any
) -> None:
    cluster.apply(scaled(fleet), namespace=nodes)
    assert "provider keda" in becomes(api, nodes, "MetricsAPIDisabled")


KEDA = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "scaledobjects.keda.sh"},
    "spec": {
        "group": "keda.sh",
        "scope": "Namespaced",
        "names": {"kind": "ScaledObject", "plural": "scaledobjects"},
        "versions": [
            {
                "name": "v1alpha1",
                "served": True,
                "storage": True,
                "subresources": {"status": {}},
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
            }
        ],
    },
}


def test_keda_gets_a_scaled_object_once_it_is_there(
    cluster: Cluster, nodes: str, fleet: Fleet, api: Api, operator: Any
) -> None:
    if cluster.try_kubectl("get", "crd", "scaledobjects.keda.sh").returncode == 0:
        pytest.skip("the cluster has KEDA, or somebody tests with it")
    cluster.apply(scaled(fleet, provider="keda"), namespace=nodes)
    assert "provider hpa" in becomes(api, nodes, "KEDANotInstalled")
    cluster.kubectl("create", "-f", "-", input=json.dumps(KEDA))
    try:
        eventually(lambda: cluster.get("scaledobject", "toy", namespace=nodes), 40)
        assert not cluster.get("hpa", namespace=nodes)["items"]
        assert condition(api, nodes)["status"] == "Unknown"
        fleet.request_seconds = 60.0
        fleet.arrive(1)
        time.sleep(1.5)
        with urllib.request.urlopen(f"http://127.0.0.1:{operator.port}/queue-depth/{nodes}/toy", timeout=5) as answer:
            assert json.loads(answer.read())["value"] == 2
    finally:
        cluster.kubectl("delete", "crd", "scaledobjects.keda.sh", "--timeout=30s")
