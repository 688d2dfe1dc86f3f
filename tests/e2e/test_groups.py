"""Groups of pods with the real engine and LeaderWorkerSet's own controller: they serve, heal and are replaced."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from clusterrig import cluster as rig
from clusterrig.fixtures import Cluster, eventually
from support.token_clients import TokenClients

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.alone]

NAME = "grouped"
NODES = 2
PATIENCE = 600
HEALED_SECONDS = 20.0


@pytest.fixture(scope="module")
def deployed(cluster: Cluster, group_controller: None, installed: str) -> Iterator[str]:
    """A group of the embedded model, of which each pod has half of the layers."""
    manifest: dict[str, Any] = {
        "apiVersion": "octavo.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": NAME},
        "spec": {
            "model": {"uri": "smollm2-135m-instruct"},
            "replicas": 1,
            "parallelism": {"pipeline": NODES, "nodes": NODES},
            "engine": {"maxModelLen": 512, "maxNumSeqs": 8, "env": [{"name": "OMP_NUM_THREADS", "value": "1"}]},
            "lifecycle": {"drainSeconds": 60, "preStopSeconds": 5},
            # What is judged is the group, not how fast a busy machine answers probes.
            "probes": {
                "readiness": {"timeoutSeconds": 10, "failureThreshold": 10},
                "liveness": {"timeoutSeconds": 30, "periodSeconds": 30, "failureThreshold": 10},
            },
        },
    }
    cluster.apply(manifest, namespace=installed)
    eventually(lambda: settled(cluster, installed, 1), PATIENCE)
    yield installed
    cluster.kubectl("delete", "llmd", NAME, "-n", installed, "--timeout=120s", timeout=150)


def pods(cluster: Cluster, namespace: str, component: str = "") -> list[dict[str, Any]]:
    selector = f"octavo.dev/llmdeployment={NAME}" + (f",app.kubernetes.io/component={component}" if component else "")
    return list(cluster.get("pods", "-l", selector, namespace=namespace)["items"])


def settled(cluster: Cluster, namespace: str, count: int) -> bool:
    """So many groups, all ready, of the latest spec, and no pod that is still going."""
    found = cluster.get("llmd", NAME, namespace=namespace)
    ready = next(c for c in found["status"]["conditions"] if c["type"] == "Ready")
    return (
        ready["status"] == "True"
        and ready["observedGeneration"] == found["metadata"]["generation"]
        and found["status"]["replicas"] == count
        and len(pods(cluster, namespace)) == count * NODES
    )


def endpoints(cluster: Cluster, namespace: str) -> set[str]:
    """uids of the pods that the Service sends requests to."""
    slices = cluster.get("endpointslices", "-l", f"kubernetes.io/service-name={NAME}", namespace=namespace)["items"]
    found = [one for each in slices for one in each.get("endpoints") or []]
    return {one["targetRef"]["uid"] for one in found if one["conditions"].get("ready")}


def address(cluster: Cluster, namespace: str) -> str:
    return f"http://{cluster.get('service', NAME, namespace=namespace)['spec']['clusterIP']}"


def answers(url: str) -> bool:
    question = [{"role": "user", "content": "Name the capital of France."}]
    body = {"model": NAME, "messages": question, "temperature": 0, "max_tokens": 16}
    try:
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    except httpx.TransportError:
        return False
    return answer.status_code == 200 and "Paris" in answer.json()["choices"][0]["message"]["content"]


def kill_container(pod: dict[str, Any]) -> None:
    """SIGKILL, from outside of the pod: nobody inside can end the first process of its container."""
    identity = next(one for one in pod["status"]["containerStatuses"] if one["name"] == "engine")["containerID"]
    command = ["ctr", "-n", "k8s.io", "tasks", "kill", "-s", "SIGKILL", identity.rpartition("/")[2]]
    subprocess.run(rig.enter(command), check=True)


def test_a_group_serves_through_its_leader(cluster: Cluster, deployed: str) -> None:
    assert answers(address(cluster, deployed))
    (leader,) = pods(cluster, deployed, "engine")
    assert endpoints(cluster, deployed) == {leader["metadata"]["uid"]}
    assert len(pods(cluster, deployed, "worker")) == NODES - 1


def test_a_group_is_made_anew_when_one_of_its_pods_dies(cluster: Cluster, deployed: str) -> None:
    before = {pod["metadata"]["uid"] for pod in pods(cluster, deployed)}
    url = address(cluster, deployed)
    kill_container(pods(cluster, deployed, "worker")[0])
    began, gone_at = time.monotonic(), None
    while True:
        seen = endpoints(cluster, deployed)
        if gone_at is None:
            gone_at = time.monotonic() if not seen else None
        else:
            assert not seen & before, "nothing is sent to a group that has lost a pod"
            if seen:
                break
        assert time.monotonic() < began + PATIENCE
        time.sleep(0.1)
    took = time.monotonic() - began
    print(f"\nout of the Service after {gone_at - began:.1f} s, a new group after {took:.1f} s")
    assert answers(url)
    assert not before & {pod["metadata"]["uid"] for pod in pods(cluster, deployed)}
    assert took <= HEALED_SECONDS
    eventually(lambda: settled(cluster, deployed, 1), 60)


def test_a_rollout_of_two_groups_loses_no_request(cluster: Cluster, deployed: str) -> None:
    cluster.kubectl("scale", "llmd", NAME, "-n", deployed, "--replicas=2")
    eventually(lambda: settled(cluster, deployed, 2), PATIENCE)
    before = {pod["metadata"]["uid"] for pod in pods(cluster, deployed)}
    with TokenClients(address(cluster, deployed), NAME) as everybody:
        eventually(lambda: sum(everybody.finished.values()) >= 20, PATIENCE)
        added = '[{"op": "add", "path": "/spec/engine/env/-", "value": {"name": "ROUND", "value": "1"}}]'
        cluster.kubectl("patch", "llmd", NAME, "-n", deployed, "--type=json", "-p", added)
        eventually(lambda: settled(cluster, deployed, 2), PATIENCE)
        assert not before & {pod["metadata"]["uid"] for pod in pods(cluster, deployed)}
    print(f"\n{dict(everybody.finished)}, {everybody.tokens} tokens")
    assert not everybody.troubles
