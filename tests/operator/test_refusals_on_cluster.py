"""What keeps pods from being made or from starting, made to happen for real: routers say it as engines do."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from clusterrig import cluster as rig
from clusterrig import settings
from clusterrig.fixtures import Cluster, eventually
from support.llmd import SESSION, toy

from octavo_operator.api.gateway import KIND

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

IMAGE = settings.TOOLBOX_IMAGE
Json = dict[str, Any]


@pytest.fixture(autouse=True)
def _operator_runs(operator: Any) -> None:
    """Every test needs it."""


def gateway(cluster: Cluster, namespace: str, **spec: Any) -> None:
    metadata = {"name": "all", "labels": dict(SESSION)}
    body = {"apiVersion": "octavo.dev/v1alpha1", "kind": KIND, "metadata": metadata, "spec": spec}
    cluster.apply(body, namespace=namespace)


def condition(cluster: Cluster, namespace: str, which: str, kind: str = "Degraded") -> Json:
    found = (cluster.get(*which.split("/"), namespace=namespace).get("status") or {}).get("conditions") or []
    return next((one for one in found if one["type"] == kind), {})


def told(cluster: Cluster, namespace: str, which: str, reason: str, seconds: float, kind: str = "Degraded") -> str:
    """Waits for the reason; its message."""
    eventually(lambda: condition(cluster, namespace, which, kind).get("reason") == reason, seconds)
    return str(condition(cluster, namespace, which, kind)["message"])


def quota(cluster: Cluster, namespace: str, **hard: str) -> None:
    body = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few"}, "spec": {"hard": hard}}
    cluster.apply(body, namespace=namespace)
    eventually(lambda: cluster.get("quota", "few", namespace=namespace)["status"]["hard"], 20)


def test_a_quota_that_is_used_up_is_told_of_routers(cluster: Cluster, namespace: str) -> None:
    quota(cluster, namespace, pods="0")
    cluster.apply(toy(IMAGE, routing={"strategy": "prefix"}), namespace=namespace)
    gateway(cluster, namespace)
    assert "exceeded quota" in told(cluster, namespace, "llmg/all", "QuotaExceeded", 15)
    assert "routing.resources" in told(cluster, namespace, "llmg/all", "QuotaExceeded", 1, "Ready")
    assert "routing.prefix.resources" in told(cluster, namespace, "llmd/toy", "QuotaExceeded", 15, "RouterReady")


def test_a_quota_that_wants_limits_is_met_by_those_of_both_containers(cluster: Cluster, namespace: str) -> None:
    quota(cluster, namespace, **{"limits.cpu": "4"})
    gateway(cluster, namespace, replicas=1)
    assert "limits.cpu" in told(cluster, namespace, "llmg/all", "QuotaExceeded", 15)
    limits = {"limits": {"cpu": "200m"}}
    patch = {"spec": {"routing": {"resources": limits, "pickerResources": limits}}}
    cluster.kubectl("patch", "llmg/all", "-n", namespace, "--type=merge", "-p", json.dumps(patch))
    pods = ("pods", "-l", "octavo.dev/llmgateway=all")
    eventually(lambda: cluster.get(*pods, namespace=namespace)["items"], 20)


def test_a_limit_range_is_told_of_routers_and_engines(cluster: Cluster, namespace: str) -> None:
    limit = {"type": "Container", "max": {"memory": "64Mi"}}
    body = {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "all"}, "spec": {"limits": [limit]}}
    cluster.apply(body, namespace=namespace)
    cluster.apply(toy(IMAGE, resources={"limits": {"memory": "1Gi"}}), namespace=namespace)
    gateway(cluster, namespace)
    for which in ("llmg/all", "llmd/toy"):
        assert "maximum memory usage per Container is 64Mi" in told(cluster, namespace, which, "LimitRangeViolated", 15)


def test_a_policy_that_denies_pods_is_told_of_routers_and_engines(
    cluster: Cluster, namespace: str, request: pytest.FixtureRequest
) -> None:
    group = {"apiVersion": "admissionregistration.k8s.io/v1"}
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    here = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    spec = {
        "failurePolicy": "Fail",
        "matchConstraints": {"resourceRules": [rule], "namespaceSelector": here},
        "validations": [{"expression": "false", "message": "no pods on Sundays"}],
    }
    binding = {"policyName": namespace, "validationActions": ["Deny"]}
    for kind, body in (("ValidatingAdmissionPolicy", spec), ("ValidatingAdmissionPolicyBinding", binding)):
        cluster.apply({**group, "kind": kind, "metadata": {"name": namespace}, "spec": body}, namespace=namespace)
        delete = ("delete", kind.lower(), namespace)
        request.addfinalizer(lambda delete=delete: cluster.kubectl(*delete))
    cluster.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce-")  # for the probe
    probe = ("run", "probe", "--image=x", "--restart=Never", "-n", namespace, "--dry-run=server")
    eventually(lambda: "Sundays" in cluster.try_kubectl(*probe).stderr, 30)
    cluster.apply(toy(IMAGE), namespace=namespace)
    gateway(cluster, namespace)
    for which in ("llmg/all", "llmd/toy"):
        assert "no pods on Sundays" in told(cluster, namespace, which, "Forbidden", 15)


def test_a_pod_whose_scheduler_does_not_run_is_told(cluster: Cluster, namespace: str) -> None:
    patch = {"op": "add", "path": "/spec/schedulerName", "value": "none-such"}
    cluster.apply(toy(IMAGE, podPatches=[patch]), namespace=namespace)
    assert "check that none-such runs" in told(cluster, namespace, "llmd/toy", "PodNotStarted", 60)


@pytest.fixture
def kubelet_stands(cluster: Cluster, alone: None) -> Iterator[Callable[[], None]]:
    pid = rig.daemon_pid("kubelet")
    yield lambda: os.kill(pid, signal.SIGSTOP)
    os.kill(pid, signal.SIGCONT)
    cluster.kubectl("wait", "node", settings.NODE_NAME, "--for=condition=Ready", "--timeout=60s", timeout=70)


@pytest.mark.alone
def test_a_node_that_dies_is_named(cluster: Cluster, namespace: str, kubelet_stands: Callable[[], None]) -> None:
    cluster.apply(toy(IMAGE), namespace=namespace)
    eventually(lambda: condition(cluster, namespace, "llmd/toy", "Ready").get("status") == "True", 60)
    kubelet_stands()
    message = told(cluster, namespace, "llmd/toy", "NodeNotReady", 40)  # the cluster itself takes 12 s to notice
    assert settings.NODE_NAME in message and "Kubelet stopped posting node status" in message
    assert condition(cluster, namespace, "llmd/toy", "Available")["reason"] == "NodeNotReady"


@pytest.mark.alone
def test_a_missing_cni_plugin_is_told_within_a_minute(cluster: Cluster, namespace: str, alone: None) -> None:
    (file,) = (settings.default_places().run / "containerd/net.d").glob("*.conflist")
    content = file.read_text()
    file.write_text(content.replace('"bridge"', '"no-such-plugin"', 1))
    try:
        cluster.apply(toy(IMAGE), namespace=namespace)
        assert "no-such-plugin" in told(cluster, namespace, "llmd/toy", "SandboxNotCreated", 60)
    finally:
        file.write_text(content)
