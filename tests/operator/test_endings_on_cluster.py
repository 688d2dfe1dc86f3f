"""Whatever is deleted first, object, namespace, kind or operator: nothing hangs, and nothing is left."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from clusterrig import settings
from clusterrig.fixtures import Cluster, eventually
from support.llmd import toy

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

IMAGE = settings.TOOLBOX_IMAGE
KINDS = "serviceaccount,networkpolicy,service,deployment,replicaset,poddisruptionbudget,pod"


def is_ready(cluster: Cluster, namespace: str) -> None:
    cluster.kubectl("wait", "--for=condition=Ready", "llmd/toy", "-n", namespace, "--timeout=60s", timeout=70)


def left(cluster: Cluster, namespace: str) -> list[str]:
    items = cluster.get(KINDS, "-l", "octavo.dev/llmdeployment", namespace=namespace)["items"]
    return [f"{item['kind']} {item['metadata']['name']}" for item in items]


@pytest.mark.parametrize("order", list(itertools.permutations(("object", "namespace", "operator"))), ids="-".join)
def test_any_order(
    cluster: Cluster, namespace: str, operator: Any, order: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    own = f"{namespace}-own"
    cluster.kubectl("create", "namespace", own)
    request.addfinalizer(lambda: cluster.kubectl("delete", "namespace", own, "--ignore-not-found", "--wait=false"))
    cluster.apply(toy(IMAGE, replicas=0), namespace=own)  # pods need seconds to end, whoever deletes what
    eventually(lambda: cluster.get("poddisruptionbudget", "toy", namespace=own), 20)
    for what in order:
        if what == "object":
            cluster.kubectl("delete", "llmd", "toy", "-n", own, "--ignore-not-found", "--timeout=10s", timeout=15)
        elif what == "namespace":
            cluster.kubectl("delete", "namespace", own, "--timeout=60s", timeout=65)
        else:
            operator.kill()
    assert cluster.try_kubectl("get", "namespace", own).returncode != 0


@pytest.mark.parametrize("how", ["background", "foreground"])
def test_all_children_go_with_their_owner(cluster: Cluster, namespace: str, operator: Any, how: str) -> None:
    cluster.apply(toy(IMAGE), namespace=namespace)
    is_ready(cluster, namespace)
    cluster.kubectl("delete", "llmd", "toy", "-n", namespace, f"--cascade={how}", "--timeout=40s", timeout=45)
    eventually(lambda: not left(cluster, namespace), 40)
    cluster.apply(toy(IMAGE), namespace=namespace)
    is_ready(cluster, namespace)


def test_orphaned_objects_are_taken_back(cluster: Cluster, namespace: str, operator: Any) -> None:
    cluster.apply(toy(IMAGE), namespace=namespace)
    is_ready(cluster, namespace)
    pods = cluster.kubectl("get", "pods", "-n", namespace, "-o", "name")
    cluster.kubectl("delete", "llmd", "toy", "-n", namespace, "--cascade=orphan", "--timeout=10s")
    assert cluster.kubectl("get", "pods", "-n", namespace, "-o", "name") == pods
    cluster.apply(toy(IMAGE), namespace=namespace)
    is_ready(cluster, namespace)
    assert cluster.kubectl("get", "pods", "-n", namespace, "-o", "name") == pods, "what ran goes on running"
    owner = cluster.get("llmd", "toy", namespace=namespace)["metadata"]["uid"]

    def adopted() -> bool:
        found = cluster.get("service,deployment,networkpolicy", "-l", "octavo.dev/llmdeployment", namespace=namespace)
        return {item["metadata"]["ownerReferences"][0]["uid"] for item in found["items"]} == {owner}

    eventually(adopted, 10)


@pytest.mark.alone
def test_the_kind_goes_and_comes_back(cluster: Cluster, namespace: str, operator: Any, alone: None, crd: Any) -> None:
    cluster.apply(toy(IMAGE), namespace=namespace)
    is_ready(cluster, namespace)
    cluster.kubectl("delete", "crd", "llmdeployments.octavo.dev", "--timeout=30s", timeout=35)
    eventually(lambda: not left(cluster, namespace), 60)
    crd()
    cluster.apply(toy(IMAGE), namespace=namespace)
    is_ready(cluster, namespace)
    operator.kill()
    cluster.kubectl("delete", "crd", "llmdeployments.octavo.dev", "--timeout=30s", timeout=35)
    crd()


def test_a_spec_that_makes_no_sense_any_more_is_a_condition_and_what_runs_goes_on(
    cluster: Cluster, namespace: str, operator: Any
) -> None:
    """As when the kind has become stricter than it was when the object was written."""
    name = "llmdeployments.octavo.dev"
    where = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/suspend"
    cluster.apply(toy(IMAGE), namespace=namespace)
    is_ready(cluster, namespace)
    before = cluster.get("crd", name)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    strict = before["properties"]["spec"]["properties"]["suspend"]
    loose = {"x-kubernetes-int-or-string": True, "description": "for a moment"}

    def set_kind(schema: dict[str, Any]) -> None:
        patch = json.dumps([{"op": "replace", "path": where, "value": schema}])
        cluster.kubectl("patch", "crd", name, "--type=json", "-p", patch)

    set_kind(loose)
    try:
        change = json.dumps({"spec": {"suspend": "perhaps", "replicas": 3}})

        def written() -> bool:
            done = cluster.try_kubectl("patch", "llmd/toy", "-n", namespace, "--type=merge", "-p", change)
            return done.returncode == 0

        eventually(written, 20)
    finally:
        set_kind(strict)
    wait = ("wait", "--for=jsonpath={.status.conditions[?(@.type=='Degraded')].reason}=InvalidSpec", "llmd/toy")
    cluster.kubectl(*wait, "-n", namespace, "--timeout=20s", timeout=25)
    found = {c["type"]: c for c in cluster.get("llmd", "toy", namespace=namespace)["status"]["conditions"]}
    assert "spec.suspend" in found["Ready"]["message"] and found["Ready"]["status"] == "False"
    assert found["Available"]["status"] == "True"
    assert cluster.get("deployment", "toy", namespace=namespace)["spec"]["replicas"] == 1
    change = json.dumps({"spec": {"suspend": False}})
    eventually(
        lambda: cluster.try_kubectl("patch", "llmd/toy", "-n", namespace, "--type=merge", "-p", change).returncode == 0,
        20,
    )
    eventually(lambda: cluster.get("deployment", "toy", namespace=namespace)["status"].get("readyReplicas") == 3, 30)
