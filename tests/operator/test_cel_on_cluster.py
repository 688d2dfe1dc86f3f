"""Every rule of the CRD, both ways, judged by the API server: what is wrong is refused by the field's name, and the
nearest thing that is right is taken."""

from __future__ import annotations

import copy
import json
import subprocess
from typing import Any

import pytest
from clusterrig.fixtures import Cluster, eventually
from support.cel_cases import CASES, HF, PVC, model
from support.llmd import manifest

from octavo_operator.crd import generate as crd

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


UPDATES: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    (
        "storageClassName cannot",
        {"size": "1Gi", "storageClassName": "a"},
        {"size": "1Gi", "storageClassName": "b"},
        {"existingClaim": "x"},
    ),
    ("accessModes cannot", {"size": "1Gi"}, {"size": "1Gi", "accessModes": ["ReadWriteMany"]}, {"size": "1Gi"}),
]


# Of the spec: refused only as changes, or only when they are made.
CHANGES: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    (
        "loadBalancerClass cannot",
        {"service": {"type": "LoadBalancer", "loadBalancerClass": "a.b/c"}},
        {"service": {"type": "LoadBalancer", "loadBalancerClass": "a.b/d"}},
        {"service": {"type": "ClusterIP"}},
    ),
    (
        "replicas must not be above",
        {"replicas": 2, "autoscaling": {"maxReplicas": 4}},
        {"replicas": 3, "autoscaling": {"maxReplicas": 1}},
        {"replicas": 2, "autoscaling": {"maxReplicas": 1}},  # what the autoscaler wrote, under a lower limit
    ),
]


@pytest.fixture(autouse=True)
def _crd(operator_kubeconfig: Any) -> None:
    """The chart has brought it."""


def dry_run(cluster: Cluster, body: dict[str, Any]) -> str:
    """What the API server has against it; empty: nothing."""
    done = cluster.try_kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", input=json.dumps(body))
    return done.stderr if done.returncode else ""


@pytest.mark.parametrize(("message", "wrong", "right"), CASES, ids=[f"{i}-{c[0][:24]}" for i, c in enumerate(CASES)])
def test_rule(cluster: Cluster, message: str, wrong: dict[str, Any], right: dict[str, Any]) -> None:
    assert message in dry_run(cluster, manifest(**wrong))
    assert dry_run(cluster, manifest(**right)) == ""


@pytest.mark.parametrize(
    ("name", "fine"), [("a" * 40, True), ("a" * 41, False), ("1a", False), ("a.b", False), ("a-1", True)]
)
def test_names(cluster: Cluster, name: str, fine: bool) -> None:
    said = dry_run(cluster, manifest(name))
    assert said == "" if fine else "metadata.name: at most 40" in said and "<nil>" not in said


@pytest.mark.parametrize(("message", "before", "wrong", "right"), UPDATES, ids=[case[0] for case in UPDATES])
def test_rule_of_changes(cluster: Cluster, namespace: str, message: str, before: Any, wrong: Any, right: Any) -> None:
    def with_claim(pvc: dict[str, Any]) -> dict[str, Any]:
        return manifest("toy", namespace, replicas=0, model={"uri": HF, "cache": {"mode": "pvc", "pvc": pvc}})

    cluster.apply(with_claim(before), namespace=namespace)
    done = cluster.try_kubectl("replace", "-f", "-", input=json.dumps(with_claim(wrong)))
    assert message in done.stderr
    done = cluster.try_kubectl("replace", "-f", "-", input=json.dumps(with_claim(right)))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("message", "before", "wrong", "right"), CHANGES, ids=[case[0] for case in CHANGES])
def test_changes(cluster: Cluster, namespace: str, message: str, before: Any, wrong: Any, right: Any) -> None:
    suspended = {"suspend": True, **before}
    cluster.apply(manifest("toy", namespace, **suspended), namespace=namespace)
    assert message in _replace(cluster, manifest("toy", namespace, **wrong)).stderr
    done = _replace(cluster, manifest("toy", namespace, **right))
    assert done.returncode == 0, done.stderr


def _replace(cluster: Cluster, body: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """kubectl reads the object, then writes it: an operator's status in between is a conflict, which says nothing."""
    for _ in range(5):
        done = cluster.try_kubectl("replace", "-f", "-", input=json.dumps(body))
        if "(Conflict)" not in done.stderr:
            break
    return done


# Stored before there were rules against them; the third is the autoscaler's to scale.
LEGACY: list[dict[str, Any]] = [
    {"engine": {"gpuMemoryUtilization": 1, "args": ["--seed 1"]}, "accelerator": {"count": 2}},
    {**model(cache=PVC), "rollout": {"type": "RollingUpdate"}},
    {"podDisruptionBudget": {"minAvailable": 1}, "autoscaling": {"maxReplicas": 4}},
    {"replicas": 9, "autoscaling": {"maxReplicas": 4}},
]


def test_an_object_stored_before_a_rule_keeps_its_status_and_its_autoscaler(cluster: Cluster, namespace: str) -> None:
    """The kind under another group, so that no operator looks at it: first without rules, then with those of today."""
    kind = crd.manifest()
    group = f"{namespace}.octavo.dev"
    resource = f"{kind['spec']['names']['plural']}.{group}"
    kind["metadata"]["name"], kind["spec"]["group"] = resource, group
    kind["spec"]["names"] = {**kind["spec"]["names"], "shortNames": [], "categories": []}
    before = copy.deepcopy(kind)
    drop_rules(before["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
    try:
        cluster.kubectl("create", "-f", "-", input=json.dumps(before))
        cluster.kubectl("wait", "--for=condition=Established", f"crd/{resource}", "--timeout=20s")
        for index, spec in enumerate(LEGACY):
            body = {**manifest(f"toy-{index}", namespace, **spec), "apiVersion": f"{group}/v1alpha1"}
            eventually(lambda body=body: cluster.kubectl("create", "-f", "-", input=json.dumps(body)))
        patch = json.dumps({"spec": {"versions": kind["spec"]["versions"]}})
        cluster.kubectl("patch", "crd", resource, "--type=merge", "-p", patch)
        refused = {**manifest("new", namespace, **LEGACY[2]), "apiVersion": f"{group}/v1alpha1"}
        dry = ("create", "--dry-run=server", "-f", "-")
        eventually(lambda: cluster.try_kubectl(*dry, input=json.dumps(refused)).returncode)
        for index in range(len(LEGACY)):
            said = json.dumps({"status": {"replicas": 1, "operator": "a/b"}})
            arguments = ("--subresource=status", "--type=merge", "-n", namespace, "-p", said)
            cluster.kubectl("patch", resource, f"toy-{index}", *arguments)
        for index in (2, 3):
            cluster.kubectl("scale", f"{resource}/toy-{index}", "-n", namespace, "--replicas=3")
    finally:
        cluster.try_kubectl("delete", "crd", resource, "--timeout=30s")


def drop_rules(schema: Any) -> None:
    if isinstance(schema, dict):
        schema.pop("x-kubernetes-validations", None)
        for inner in schema.values():
            drop_rules(inner)
    elif isinstance(schema, list):
        for inner in schema:
            drop_rules(inner)
