"""LLMGateways on a real API server: both sides of every rule of their CRD, and what the operator makes of them."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest
from clusterrig import settings
from clusterrig.fixtures import Cluster, eventually
from support.llmd import SESSION, toy

from octavo_operator.api.gateway import KIND

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

RED = {"name": "red", "apiKeySecretRef": {"name": "keys", "key": "red"}}
BLUE = {"name": "blue", "apiKeySecretRef": {"name": "keys", "key": "blue"}}
# What the message must say, a spec that is wrong, and one beside it that is right.
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("two of them have the same apiKeySecretRef", {"tenants": [RED, {**RED, "name": "x"}]}, {"tenants": [RED, BLUE]}),
    ("Duplicate value", {"tenants": [RED, {**BLUE, "name": "red"}]}, {"tenants": []}),
    (
        "name and model must differ",
        {"aliases": [{"name": "a", "model": "a"}]},
        {"aliases": [{"name": "a", "model": "b"}]},
    ),
    (
        "every weight is 0",
        {"splits": [{"name": "a", "backends": [{"llmdeployment": "b", "weight": 0}]}]},
        {"splits": [{"name": "a", "backends": [{"llmdeployment": "b", "weight": 1}]}]},
    ),
    (
        "httpRoute",
        {"httpRoute": {"hostnames": ["a"]}},
        {"httpRoute": {"hostnames": ["a"], "parentRefs": [{"name": "b"}]}},
    ),
    ("ingress.host", {"ingress": {}}, {"ingress": {"host": "a.example.org"}}),
    ("replicas", {"replicas": 17}, {"replicas": 16}),
    ("routing.loadFactor", {"routing": {"loadFactor": 100}}, {"routing": {"loadFactor": 110}}),
    ("tenants[0].name", {"tenants": [{**RED, "name": "Red"}]}, {"tenants": [{**RED, "requestsPerMinute": 1}]}),
    ("tls.secretRef", {"tls": {}}, {"tls": {"secretRef": {"name": "cert"}}}),
    ("service.loadBalancerClass needs", {"service": {"loadBalancerClass": "x"}}, {"service": {"port": 443}}),
    ("selector", {"selector": {"matchLabels": 3}}, {"selector": {"matchLabels": {"a": "b"}}}),
]


def create(cluster: Cluster, namespace: str, name: str, spec: Any) -> subprocess.CompletedProcess[str]:
    body = {"apiVersion": "octavo.dev/v1alpha1", "kind": KIND, "metadata": {"name": name}, "spec": spec}
    return cluster.try_kubectl("create", "-n", namespace, "--dry-run=server", "-f", "-", input=json.dumps(body))


def test_rules(cluster: Cluster, namespace: str, crd: Callable[[], None]) -> None:
    for message, wrong, right in CASES:
        refused = create(cluster, namespace, "gateway", wrong)
        assert refused.returncode and message in refused.stderr, refused.stderr
        taken = create(cluster, namespace, "gateway", right)
        assert taken.returncode == 0, taken.stderr
    assert "metadata.name" in create(cluster, namespace, "1st", {}).stderr
    assert create(cluster, namespace, "first", {}).returncode == 0


IMAGE = settings.TOOLBOX_IMAGE
OBJECTS = "deployments,configmaps,services,networkpolicies,poddisruptionbudgets"


def made(cluster: Cluster, namespace: str, name: str = "all", **spec: Any) -> None:
    metadata = {"name": name, "labels": dict(SESSION)}
    body = {"apiVersion": "octavo.dev/v1alpha1", "kind": KIND, "metadata": metadata, "spec": spec}
    cluster.apply(body, namespace=namespace)


def status(cluster: Cluster, namespace: str, name: str = "all") -> dict[str, Any]:
    return dict(cluster.get("llmg", name, namespace=namespace).get("status") or {})


def reason(cluster: Cluster, namespace: str, kind: str, name: str = "all") -> str:
    found = {one["type"]: one["reason"] for one in status(cluster, namespace, name).get("conditions") or []}
    return str(found.get(kind))


def objects(cluster: Cluster, namespace: str, name: str = "all") -> dict[str, str]:
    """Uids by kind and name."""
    items = cluster.get(OBJECTS, "-l", f"octavo.dev/llmgateway={name}", namespace=namespace)["items"]
    return {f"{one['kind']} {one['metadata']['name']}": one["metadata"]["uid"] for one in items}


def test_twenty_models_are_listed_and_nothing_is_written_when_nothing_changes(
    cluster: Cluster, namespace: str, operator: Any
) -> None:
    made(cluster, namespace)
    names = [f"m{number:02}" for number in range(20)]
    cluster.apply(*(toy(IMAGE, name=name, replicas=0) for name in names), namespace=namespace)
    eventually(lambda: [one["name"] for one in status(cluster, namespace)["models"]] == names, 60)
    eventually(lambda: len(objects(cluster, namespace)) == 5, 20)

    def clusters() -> str:
        return str(cluster.get("configmap", "all-router", namespace=namespace)["data"]["cds.yaml"])

    eventually(lambda: all(f"{name}-pods.{namespace}.svc" in clusters() for name in names), 10)
    eventually(lambda: all(cluster.get("service", f"{name}-pods", namespace=namespace) for name in names), 30)
    deployment = cluster.get("deployment", "m00", namespace=namespace)
    assert deployment["metadata"]["generation"] == 1, "its pods stay as they are"
    cluster.kubectl("delete", "service", "all", "-n", namespace)
    eventually(lambda: "Service all" in objects(cluster, namespace), 10)
    if not cluster.is_rig:
        pytest.skip("needs the audit log of the rig")
    time.sleep(3)
    since = cluster.audit_log.stat().st_size
    operator.restart(OCTAVO_RESYNC_SECONDS="1")
    time.sleep(5)
    written = []
    with cluster.audit_log.open() as log:
        log.seek(since)
        for line in log:
            one = json.loads(line)
            if one["user"]["username"] == operator.user and one["objectRef"].get("namespace") == namespace:
                written.append(f"{one['verb']} {one['requestURI']}")
    # Its routers have no image that could be pulled: what a kubelet says of them may change.
    assert [one for one in written if "/status" not in one and "/events" not in one] == []
    operator.restart()


def test_models_come_and_go_and_with_the_gateway_go_its_own_objects(
    cluster: Cluster, namespace: str, operator: Any
) -> None:
    made(cluster, namespace, selector={"matchLabels": {"team": "red"}})
    red, blue = toy(IMAGE, name="red"), toy(IMAGE, name="blue")
    red["metadata"]["labels"]["team"] = "red"
    cluster.apply(red, blue, namespace=namespace)

    def listed() -> dict[str, bool]:
        return {one["name"]: one["ready"] for one in status(cluster, namespace)["models"]}

    eventually(lambda: listed() == {"red": True}, 60)
    cluster.kubectl("label", "llmd/blue", "team=red", "-n", namespace)
    eventually(lambda: listed() == {"red": True, "blue": True}, 10)
    cluster.kubectl("delete", "llmd/red", "-n", namespace, "--timeout=30s")
    eventually(lambda: listed() == {"blue": True}, 10)
    assert cluster.get("service", "blue-pods", namespace=namespace)["spec"]["clusterIP"] == "None"
    uid = cluster.get("deployment", "blue", namespace=namespace)["metadata"]["uid"]
    cluster.kubectl("delete", "llmg/all", "-n", namespace, "--timeout=30s")
    eventually(lambda: not objects(cluster, namespace), 30)
    eventually(lambda: cluster.try_kubectl("get", "service", "blue-pods", "-n", namespace).returncode != 0, 10)
    assert cluster.get("deployment", "blue", namespace=namespace)["metadata"]["uid"] == uid


def test_the_later_of_a_model_and_a_gateway_of_one_name_is_degraded(
    cluster: Cluster, namespace: str, operator: Any
) -> None:
    cluster.apply(toy(IMAGE, name="first"), namespace=namespace)
    eventually(lambda: cluster.get("service", "first", namespace=namespace), 20)
    uid = cluster.get("service", "first", namespace=namespace)["metadata"]["uid"]
    made(cluster, namespace, name="first")
    eventually(lambda: reason(cluster, namespace, "Degraded", "first") == "NameConflict", 20)
    assert objects(cluster, namespace, "first") == {}
    assert cluster.get("service", "first", namespace=namespace)["metadata"]["uid"] == uid
    made(cluster, namespace, name="second")
    eventually(lambda: len(objects(cluster, namespace, "second")) == 5, 20)
    before = objects(cluster, namespace, "second")
    cluster.apply(toy(IMAGE, name="second"), namespace=namespace)
    eventually(lambda: reason(cluster, namespace, "Degraded", "second") == "NameConflict", 20)
    assert objects(cluster, namespace, "second") == before
    cluster.kubectl("delete", "llmd/second", "llmg/first", "-n", namespace, "--timeout=30s")
    eventually(lambda: reason(cluster, namespace, "Degraded", "second") != "NameConflict", 20)


@pytest.mark.alone
def test_the_operator_serves_models_without_the_kind_of_gateways(
    cluster: Cluster, namespace: str, operator: Any, alone: None, crd: Callable[[], None]
) -> None:
    cluster.kubectl("delete", "crd", "llmgateways.octavo.dev", "--timeout=30s")
    try:
        operator.restart()
        cluster.apply(toy(IMAGE), namespace=namespace)
        cluster.kubectl("wait", "--for=condition=Ready", "llmd/toy", "-n", namespace, "--timeout=60s", timeout=70)
        assert operator.log().count("the CRD of LLMGateway is not installed") == 1
    finally:
        crd()
    made(cluster, namespace)
    eventually(lambda: [one["name"] for one in status(cluster, namespace)["models"]] == ["toy"], 40)
