"""Pods come and go under load, and no user notices: every token of every request arrives, none is refused.

OCTAVO_DRAINS=20,5: so many scale-downs and rollouts (CI makes fewer).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
from clusterrig.fixtures import Cluster, eventually
from support.token_clients import TokenClients

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.alone]

SCALE_DOWNS, ROLLOUTS = map(int, os.environ.get("OCTAVO_DRAINS", "2,1").split(","))
MOST = min(4, 1 + SCALE_DOWNS)  # replicas
NAME = "drained"
PATIENCE = 600


@pytest.fixture(scope="module")
def deployed(cluster: Cluster, installed: str) -> Iterator[str]:
    """Two replicas of the embedded model."""
    if not cluster.is_rig:
        pytest.skip("the clients are outside of the cluster, and only the rig's Services are reached from there")
    manifest: dict[str, Any] = {
        "apiVersion": "octavo.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": NAME},
        "spec": {
            "model": {"uri": "smollm2-135m-instruct"},
            "replicas": 2,
            "engine": {"maxModelLen": 512, "maxNumSeqs": 16, "env": [{"name": "OMP_NUM_THREADS", "value": "1"}]},
            "lifecycle": {"drainSeconds": 60},  # and 10 s until endpoints are updated, as everybody has
            # What is judged is the drain, not how fast a busy machine answers probes.
            "probes": {
                "readiness": {"timeoutSeconds": 10, "failureThreshold": 10},
                "liveness": {"timeoutSeconds": 30, "periodSeconds": 30, "failureThreshold": 10},
            },
        },
    }
    cluster.apply(manifest, namespace=installed)
    eventually(lambda: settled(cluster, installed, 2), PATIENCE)
    yield installed
    cluster.kubectl("delete", "llmd", NAME, "-n", installed, "--timeout=60s", timeout=90)


def settled(cluster: Cluster, namespace: str, count: int) -> bool:
    """So many pods, all ready, of the latest spec, and none that is still going."""
    found = cluster.get("llmd", NAME, namespace=namespace)
    ready = next(c for c in found["status"]["conditions"] if c["type"] == "Ready")
    pods = cluster.get("pods", "-l", f"octavo.dev/llmdeployment={NAME}", namespace=namespace)["items"]
    return (
        ready["status"] == "True"
        and ready["observedGeneration"] == found["metadata"]["generation"]
        and found["status"]["replicas"] == len(pods) == count
    )


@pytest.fixture
def clients(cluster: Cluster, deployed: str) -> Iterator[TokenClients]:
    address = cluster.get("service", NAME, namespace=deployed)["spec"]["clusterIP"]
    with TokenClients(f"http://{address}", NAME) as everybody:
        eventually(lambda: sum(everybody.finished.values()) >= 20, PATIENCE)
        yield everybody
    print(f"\n{dict(everybody.finished)}, {everybody.tokens} tokens")
    assert not everybody.troubles


def scale(cluster: Cluster, namespace: str, count: int) -> float:
    began = time.monotonic()
    cluster.kubectl("scale", "llmd", NAME, "-n", namespace, f"--replicas={count}")
    eventually(lambda: settled(cluster, namespace, count), PATIENCE)
    return time.monotonic() - began


@pytest.mark.smoke
def test_scaling_down_loses_no_token(cluster: Cluster, deployed: str, clients: TokenClients) -> None:
    """To the last replica, and up again."""
    replicas = 1
    for number in range(SCALE_DOWNS):
        if replicas == 1:
            replicas = MOST
            print(f"\nup to {replicas} in {scale(cluster, deployed, replicas):.0f} s", end="")
        replicas -= 1
        seconds = scale(cluster, deployed, replicas)
        requests = sum(clients.finished.values())
        print(f"\n{number + 1}. to {replicas} in {seconds:.0f} s, {requests} requests", end="", flush=True)
        assert not clients.troubles
    scale(cluster, deployed, 2)


def test_a_rollout_loses_no_token(cluster: Cluster, deployed: str, clients: TokenClients) -> None:
    for number in range(ROLLOUTS):
        before = time.monotonic()
        added = f'[{{"op": "add", "path": "/spec/engine/env/-", "value": {{"name": "ROUND", "value": "{number}"}}}}]'
        changed = f'[{{"op": "replace", "path": "/spec/engine/env/1/value", "value": "{number}"}}]'
        cluster.kubectl("patch", "llmd", NAME, "-n", deployed, "--type=json", "-p", changed if number else added)
        eventually(lambda: settled(cluster, deployed, 2), PATIENCE)
        print(f"\n{number + 1}: {time.monotonic() - before:.0f} s, {sum(clients.finished.values())} requests", end="")
        assert not clients.troubles
