"""Kinds that not every cluster has are used where they are, and soon after somebody installs them; with rights in one
namespace alone as with rights everywhere."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from clusterrig import settings
from clusterrig.fixtures import Cluster, eventually
from support import foreign_crds
from support.llmd import SESSION, toy

from octavo_operator.api import API_VERSION

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

IMAGE = settings.TOOLBOX_IMAGE
NAMES = [manifest["metadata"]["name"] for manifest in foreign_crds.monitoring()]


@pytest.fixture
def _without(cluster: Cluster) -> Iterator[None]:
    """A cluster that does not know PodMonitors."""
    if cluster.try_kubectl("get", "crd", *NAMES).returncode == 0:
        pytest.skip("this cluster has the Prometheus operator's kinds already")
    yield
    cluster.kubectl("delete", "crd", *NAMES, "--ignore-not-found", "--timeout=60s")


def install_monitoring(cluster: Cluster) -> None:
    cluster.apply(*foreign_crds.monitoring(), namespace="default")
    cluster.kubectl("wait", "--for=condition=Established", "--timeout=20s", *(f"crd/{name}" for name in NAMES))


def monitors_follow(cluster: Cluster, namespace: str) -> None:
    """They appear, come back, change kind with the spec, and go with it."""
    cluster.apply(toy(IMAGE, replicas=0), namespace=namespace)
    eventually(lambda: cluster.get("service", "toy", namespace=namespace), 20)
    install_monitoring(cluster)
    monitor = eventually(lambda: cluster.get("podmonitor", "toy", namespace=namespace), 40)
    assert monitor["spec"]["podMetricsEndpoints"][0]["port"] == "management"
    assert monitor["spec"]["podMetricsEndpoints"][0]["relabelings"], "no field of ours is unknown to the kind"
    uid = monitor["metadata"]["uid"]

    def is_back() -> bool:
        return bool(cluster.get("podmonitor", "toy", namespace=namespace)["metadata"]["uid"] != uid)

    cluster.kubectl("delete", "podmonitor", "toy", "-n", namespace)
    eventually(is_back, 20)
    change = json.dumps({"spec": {"monitoring": {"kind": "ServiceMonitor"}}})
    cluster.kubectl("patch", "llmd/toy", "-n", namespace, "--type=merge", "-p", change)
    eventually(lambda: cluster.get("servicemonitor", "toy", namespace=namespace), 20)
    eventually(lambda: not cluster.get("podmonitors", namespace=namespace)["items"], 20)
    ports = cluster.get("service", "toy", namespace=namespace)["spec"]["ports"]
    assert [port["name"] for port in ports] == ["http", "management"]
    cluster.kubectl("delete", "crd", *NAMES, "--timeout=60s")
    change = json.dumps({"spec": {"service": {"port": 82}}})
    cluster.kubectl("patch", "llmd/toy", "-n", namespace, "--type=merge", "-p", change)
    eventually(lambda: cluster.get("service", "toy", namespace=namespace)["spec"]["ports"][0]["port"] == 82, 20)
    told = [event["reason"] for event in cluster.get("events", namespace=namespace)["items"]]
    assert "ObjectRejected" not in told, "nothing is wrong with the spec when a kind goes"


def test_monitors_with_rights_everywhere(cluster: Cluster, namespace: str, operator: Any, _without: None) -> None:
    monitors_follow(cluster, namespace)


def test_monitors_with_rights_in_one_namespace(
    cluster: Cluster, namespace: str, namespaced: Any, _without: None
) -> None:
    monitors_follow(cluster, namespace)
    time.sleep(7)  # the watches of kinds that are gone have broken off, and what went with them would be missed by now
    patch = json.dumps({"spec": {"service": {"port": 83}}})
    cluster.kubectl("patch", "llmd/toy", "-n", namespace, "--type=merge", "-p", patch)
    eventually(lambda: cluster.get("service", "toy", namespace=namespace)["spec"]["ports"][0]["port"] == 83, 20)
    assert namespaced.process.poll() is None, namespaced.log()
    assert "is forbidden: User" not in namespaced.log()  # a kind that is just going forbids to make more of it, too


def condition(cluster: Cluster, namespace: str, kind: str) -> dict[str, Any]:
    status = cluster.get("llmd", "toy", namespace=namespace).get("status") or {}
    return next((one for one in status.get("conditions") or [] if one["type"] == kind), {})


def test_an_inference_pool_follows_the_spec_where_the_kind_is(cluster: Cluster, namespace: str, operator: Any) -> None:
    crd = foreign_crds.inference_pool()
    name = crd["metadata"]["name"]
    if cluster.try_kubectl("get", "crd", name).returncode == 0:
        pytest.skip("this cluster has InferencePools already")
    cluster.apply(toy(IMAGE, inferencePool={"endpointPickerRef": {"name": "epp"}}), namespace=namespace)
    without = "InferencePoolNotInstalled"
    eventually(lambda: condition(cluster, namespace, "Degraded").get("reason") == without, 20)
    wait = ("wait", "--for=condition=Ready", "llmd/toy", "-n", namespace, "--timeout=60s")
    cluster.kubectl(*wait, timeout=70)  # it serves all the same
    try:
        cluster.apply(crd, namespace="default")
        pool = eventually(lambda: cluster.get("inferencepool", "toy", namespace=namespace), 40)["spec"]
        assert pool["targetPorts"] == [{"number": 8000}]
        assert pool["endpointPickerRef"] == {
            "group": "",
            "kind": "Service",
            "name": "epp",
            "port": {"number": 9002},
            "failureMode": "FailOpen",
        }
        eventually(lambda: condition(cluster, namespace, "Degraded").get("status") == "False", 20)
        labels = ",".join(f"{key}={value}" for key, value in pool["selector"]["matchLabels"].items())
        pods = cluster.kubectl("get", "pods", "-n", namespace, "-l", labels, "-o", "name").split()
        assert len(pods) == 1
        patch = json.dumps({"spec": {"inferencePool": None}})
        cluster.kubectl("patch", "llmd/toy", "-n", namespace, "--type=merge", "-p", patch)
        eventually(lambda: not cluster.get("inferencepools", namespace=namespace)["items"], 20)
        assert cluster.kubectl("get", "pods", "-n", namespace, "-l", labels, "-o", "name").split() == pods
    finally:
        cluster.kubectl("delete", "crd", name, "--ignore-not-found", "--timeout=60s")


def test_groups_start_when_their_kind_comes_and_what_runs_stays_until_then(
    cluster: Cluster, namespace: str, operator: Any
) -> None:
    crd = foreign_crds.leader_worker_set()
    name = crd["metadata"]["name"]
    if cluster.try_kubectl("get", "crd", name).returncode == 0:
        pytest.skip("this cluster has LeaderWorkerSets already")

    def pods() -> list[str]:
        return [pod["metadata"]["uid"] for pod in cluster.get("pods", namespace=namespace)["items"]]

    cluster.apply(toy(IMAGE), namespace=namespace)
    cluster.kubectl("wait", "--for=condition=Ready", "llmd/toy", "-n", namespace, "--timeout=60s", timeout=70)
    before = pods()
    patch = json.dumps({"spec": {"parallelism": {"tensor": 2, "nodes": 2}}})
    cluster.kubectl("patch", "llmd/toy", "-n", namespace, "--type=merge", "-p", patch)
    without = "LeaderWorkerSetNotInstalled"
    eventually(lambda: condition(cluster, namespace, "Degraded").get("reason") == without, 20)
    assert (pods(), condition(cluster, namespace, "Available")["status"]) == (before, "True")
    assert not cluster.get("statefulsets", namespace=namespace)["items"]
    try:
        cluster.apply(crd, namespace="default")
        made = eventually(lambda: cluster.get("leaderworkerset", "toy-group", namespace=namespace), 40)
        assert made["spec"]["leaderWorkerTemplate"]["size"] == 2
        eventually(lambda: not cluster.get("deployments", namespace=namespace)["items"], 20)
        token = cluster.get("secret", "toy-cluster-token", namespace=namespace)
        assert token["metadata"]["ownerReferences"][0]["kind"] == "LLMDeployment"
        assert len(token["data"]["token"]) > 40
        assert token["data"]["token"] not in operator.log()
        for verb in ("get", "list", "watch", "patch", "update", "delete"):
            answer = cluster.try_kubectl("auth", "can-i", verb, "secrets", "-A", f"--as={operator.user}")
            assert answer.stdout.strip() == "no", verb
    finally:
        cluster.kubectl("delete", "crd", name, "--ignore-not-found", "--timeout=60s")


def test_a_gateway_is_reached_from_outside_by_ingress_and_route(
    cluster: Cluster, namespace: str, operator: Any
) -> None:
    crd = foreign_crds.http_route()
    name = crd["metadata"]["name"]
    if cluster.try_kubectl("get", "crd", name).returncode == 0:
        pytest.skip("this cluster has the Gateway API already")
    route = {"parentRefs": [{"name": "edge"}], "hostnames": ["llm.example.org"]}
    spec = {"replicas": 1, "httpRoute": route, "ingress": {"host": "in.example.org", "className": "nginx"}}
    labels = {"labels": dict(SESSION)}
    gateway = {"apiVersion": API_VERSION, "kind": "LLMGateway", "metadata": {"name": "all", **labels}, "spec": spec}
    cluster.apply(gateway, namespace=namespace)

    def status() -> dict[str, Any]:
        found: dict[str, Any] = cluster.get("llmg", "all", namespace=namespace).get("status") or {}
        return found

    ingress = eventually(lambda: cluster.get("ingress", "all", namespace=namespace), 20)
    assert ingress["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]["name"] == "all"
    eventually(lambda: status().get("url") == "http://in.example.org/v1", 20)
    patch = json.dumps({"spec": {"ingress": None}})
    cluster.kubectl("patch", "llmg/all", "-n", namespace, "--type=merge", "-p", patch)
    eventually(lambda: not cluster.get("ingresses", namespace=namespace)["items"], 20)
    try:
        cluster.apply(crd, namespace="default")
        found = eventually(lambda: cluster.get("httproute", "all", namespace=namespace), 40)["spec"]
        assert found["rules"][0]["backendRefs"][0]["port"] == 80
        eventually(lambda: status()["url"] == "https://llm.example.org/v1", 20)
        no = {"type": "Accepted", "status": "False", "reason": "NoMatchingParent", "message": "no such Gateway"}
        refused = json.dumps({"status": {"parents": [{"parentRef": {"name": "edge"}, "conditions": [no]}]}})
        options = ("--subresource=status", "--type=merge", "-p", refused)
        cluster.kubectl("patch", "httproute/all", "-n", namespace, *options)
        eventually(lambda: f"all.{namespace}.svc" in status()["url"], 20)  # it leads nowhere
        uid = cluster.get("httproute", "all", namespace=namespace)["metadata"]["uid"]
        cluster.kubectl("delete", "httproute", "all", "-n", namespace)
        eventually(lambda: cluster.get("httproute", "all", namespace=namespace)["metadata"]["uid"] != uid, 20)
        eventually(lambda: status()["url"] == "https://llm.example.org/v1", 20)
    finally:
        cluster.kubectl("delete", "crd", name, "--ignore-not-found", "--timeout=60s")
    cluster.kubectl("delete", "llmg", "all", "-n", namespace)


def test_an_operator_of_one_namespace_serves_it_and_no_other(
    cluster: Cluster, namespace: str, namespaced: Any, request: pytest.FixtureRequest
) -> None:
    other = f"{namespace}-other"
    cluster.kubectl("create", "namespace", other)
    request.addfinalizer(lambda: cluster.kubectl("delete", "namespace", other, "--wait=false"))
    cluster.apply(toy(IMAGE), namespace=other)
    cluster.apply(toy(IMAGE), namespace=namespace)
    wait = ("wait", "--for=condition=Ready", "llmd/toy", "-n", namespace, "--timeout=60s")
    cluster.kubectl(*wait, timeout=70)
    before = cluster.get("networkpolicy", "toy", namespace=namespace)["metadata"]["uid"]
    cluster.kubectl("delete", "networkpolicy", "toy", "-n", namespace)
    eventually(lambda: cluster.get("networkpolicy", "toy", namespace=namespace)["metadata"]["uid"] != before, 10)
    assert not cluster.get("deployments", namespace=other)["items"]
    assert "is forbidden" not in namespaced.log()
    account = namespaced.environment["OCTAVO_LEASE_NAME"]
    user = f"system:serviceaccount:{namespaced.environment['POD_NAMESPACE']}:{account}"
    for what in ("list pods -A", f"list services -n {other}", f"create deployments -n {other}", "list secrets -A"):
        verb, kind, *where = what.split()
        assert cluster.try_kubectl("auth", "can-i", verb, kind, *where, f"--as={user}").stdout.strip() == "no"
