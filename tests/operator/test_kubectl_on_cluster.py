"""What people do with kubectl: list, scale, restart, delete and wait."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from clusterrig import settings
from clusterrig.fixtures import Cluster, eventually
from support.llmd import SESSION, toy

from octavo_operator.api.gateway import KIND

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

IMAGE = settings.TOOLBOX_IMAGE
Json = dict[str, Any]


def gateway(cluster: Cluster, namespace: str, **spec: Any) -> None:
    metadata = {"name": "all", "labels": dict(SESSION)}
    cluster.apply(
        {"apiVersion": "octavo.dev/v1alpha1", "kind": KIND, "metadata": metadata, "spec": spec}, namespace=namespace
    )


def ready(cluster: Cluster, namespace: str) -> None:
    cluster.kubectl("wait", "llmd/toy", "-n", namespace, "--for=condition=Ready", "--timeout=60s", timeout=70)


def test_both_kinds_are_listed_with_all_else_and_with_more_columns(
    cluster: Cluster, namespace: str, operator: Any
) -> None:
    cluster.apply(toy(IMAGE), namespace=namespace)
    gateway(cluster, namespace)
    ready(cluster, namespace)
    eventually(lambda: "toy" in cluster.kubectl("get", "llmg/all", "-n", namespace, "-o", "wide"), 20)
    everything = cluster.kubectl("get", "all", "-n", namespace, "-o", "name").split()
    assert {"llmdeployment.octavo.dev/toy", "llmgateway.octavo.dev/all"} <= set(everything)
    for kind, more in (
        ("llmd", "UPDATED AVAILABLE IMAGE OPERATOR MESSAGE"),
        ("llmg", "ROUTERS DESIRED MODELS MESSAGE"),
    ):
        heads = [
            re.split(r"\s{2,}", cluster.kubectl("get", kind, "-n", namespace, *wide).splitlines()[0].strip())
            for wide in ((), ("-o", "wide"))
        ]
        assert heads[1] == [*heads[0], *more.split()]
    assert IMAGE in cluster.kubectl("get", "llmd", "-n", namespace, "-o", "wide")


def test_a_gateway_is_scaled_by_kubectl(cluster: Cluster, namespace: str, operator: Any) -> None:
    gateway(cluster, namespace)
    eventually(lambda: cluster.get("deployment", "all-router", namespace=namespace), 20)
    cluster.kubectl("scale", "llmg/all", "--replicas=3", "-n", namespace)
    eventually(lambda: cluster.get("deployment", "all-router", namespace=namespace)["spec"]["replicas"] == 3, 10)
    path = f"/apis/octavo.dev/v1alpha1/namespaces/{namespace}/llmgateways/all/scale"

    def scale() -> Json:
        return dict(json.loads(cluster.kubectl("get", "--raw", path)))

    eventually(lambda: scale()["status"]["replicas"] == 3, 20)
    pods = cluster.get("pods", "-l", scale()["status"]["selector"], namespace=namespace)["items"]
    assert len(pods) == 3


def test_an_annotation_restarts_all_pods_one_after_the_other(cluster: Cluster, namespace: str, operator: Any) -> None:
    cluster.apply(toy(IMAGE), namespace=namespace)
    ready(cluster, namespace)
    selector = ("pods", "-l", "octavo.dev/llmdeployment=toy")
    (before,) = [one["metadata"]["uid"] for one in cluster.get(*selector, namespace=namespace)["items"]]
    cluster.kubectl("annotate", "llmd/toy", "-n", namespace, "kubectl.kubernetes.io/restartedAt=2026-01-01T00:00:00Z")

    def replaced() -> bool:
        uids = [one["metadata"]["uid"] for one in cluster.get(*selector, namespace=namespace)["items"]]
        return len(uids) == 1 and uids != [before]

    eventually(replaced, 60)
    ready(cluster, namespace)


def test_a_deletion_in_the_foreground_waits_for_the_pods(cluster: Cluster, namespace: str, operator: Any) -> None:
    cluster.apply(toy(IMAGE), namespace=namespace)
    gateway(cluster, namespace)
    ready(cluster, namespace)
    eventually(lambda: cluster.get("deployment", "all-router", namespace=namespace), 20)
    cluster.kubectl(
        "delete", "llmd/toy", "llmg/all", "-n", namespace, "--cascade=foreground", "--timeout=90s", timeout=100
    )
    kinds = "pods,replicasets,deployments,services,configmaps,networkpolicies,poddisruptionbudgets,serviceaccounts"
    ours = ("-l", "app.kubernetes.io/managed-by=octavo-operator")
    assert cluster.get(kinds, *ours, namespace=namespace)["items"] == []
