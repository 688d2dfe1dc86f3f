"""Routers in front of a real model come, go, restart and are rolled out under load, and no user notices.

OCTAVO_ROUTER_ROUNDS=20: so many restarts and rollouts of each kind (CI makes fewer).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from clusterrig.fixtures import Cluster, eventually, kill_all
from support.token_clients import TokenClients

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.alone]

ROUNDS = int(os.environ.get("OCTAVO_ROUTER_ROUNDS", "2"))
NAME = "routed"
PATIENCE = 600
OWN = f"octavo.dev/llmdeployment={NAME}"
ENGINE, ROUTER = (f"{OWN},app.kubernetes.io/component={one}" for one in ("engine", "router"))


@pytest.fixture(scope="module")
def deployed(cluster: Cluster, installed: str) -> Iterator[str]:
    """Two replicas of the embedded model, without routers."""
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
            "lifecycle": {"preStopSeconds": 5, "drainSeconds": 60},
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


def pods(cluster: Cluster, namespace: str, selector: str) -> dict[str, str]:
    """Names of pods by uid."""
    items = cluster.get("pods", "-l", selector, namespace=namespace)["items"]
    return {one["metadata"]["uid"]: one["metadata"]["name"] for one in items}


def settled(cluster: Cluster, namespace: str, count: int) -> bool:
    """So many pods of both components, all ready, of the latest spec, and none that is still going."""
    found = cluster.get("llmd", NAME, namespace=namespace)
    ready = next(one for one in found["status"]["conditions"] if one["type"] == "Ready")
    is_current = ready["observedGeneration"] == found["metadata"]["generation"]
    return ready["status"] == "True" and is_current and len(pods(cluster, namespace, OWN)) == count


def change(cluster: Cluster, namespace: str, spec: dict[str, Any], count: int) -> float:
    """Merges into the spec; seconds until it is so."""
    began = time.monotonic()
    cluster.kubectl("patch", "llmd", NAME, "-n", namespace, "--type=merge", "-p", json.dumps({"spec": spec}))
    eventually(lambda: settled(cluster, namespace, count), PATIENCE)
    return time.monotonic() - began


def address(cluster: Cluster, namespace: str) -> str:
    return f"http://{cluster.get('service', NAME, namespace=namespace)['spec']['clusterIP']}"


def stat(cluster: Cluster, namespace: str, name: str) -> float:
    """The sum of a metric over all routers."""
    total = 0.0
    for one in cluster.get("pods", "-l", ROUTER, namespace=namespace)["items"]:
        page = httpx.get(f"http://{one['status']['podIP']}:8002/stats/prometheus", timeout=20).text
        total += sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(f"envoy_{name}{{"))
    return total


@pytest.mark.smoke
def test_routers_come_and_go_and_nobody_notices(cluster: Cluster, deployed: str) -> None:
    url, engines = address(cluster, deployed), pods(cluster, deployed, ENGINE)
    with TokenClients(url, NAME) as users:
        eventually(lambda: sum(users.finished.values()) >= 20, PATIENCE)
        seconds = change(cluster, deployed, {"routing": {"strategy": "prefix"}}, 4)
        print(f"\nrouted in {seconds:.0f} s, {sum(users.finished.values())} requests", end="")
        assert not users.troubles
        before = stat(cluster, deployed, "cluster_upstream_rq_total")
        eventually(lambda: stat(cluster, deployed, "cluster_upstream_rq_total") >= before + 20, PATIENCE)
        hits = [conversation(url, f"c{number}") for number in range(4)]
        assert all(hits), f"a second turn finds what the first has computed: {hits} tokens of it"
        assert stat(cluster, deployed, "http_lua_errors") == 0
        for number in range(ROUNDS):
            routers = pods(cluster, deployed, ROUTER)
            gone = next(iter(routers.values()))
            cluster.kubectl("delete", "pod", gone, "-n", deployed, "--timeout=120s", timeout=130)
            eventually(lambda: settled(cluster, deployed, 4), PATIENCE)
            prefix = {"resources": {"limits": {"memory": f"{300 + number}Mi"}}}
            seconds = change(cluster, deployed, {"routing": {"prefix": prefix}}, 4)
            assert not routers.keys() & pods(cluster, deployed, ROUTER).keys()
            print(f"\n{number + 1}: routers replaced in {seconds:.0f} s", end="")
            assert not users.troubles
        assert pods(cluster, deployed, ENGINE) == engines
        seconds = change(cluster, deployed, {"routing": {"strategy": "none", "prefix": None}}, 2)
        eventually(lambda: not cluster.get("configmaps", "-l", OWN, namespace=deployed)["items"], 60)
        print(f"\nwithout them after {seconds:.0f} s", end="")
        assert address(cluster, deployed) == url
        assert pods(cluster, deployed, ENGINE) == engines
    print(f"\n{dict(users.finished)}, {users.tokens} tokens")
    assert not users.troubles


def conversation(url: str, session: str) -> int:
    """Prompt tokens of a second turn that were in the cache."""
    prompt, cached = f"{session}: " + "what was said before. " * 12, 0
    with httpx.Client(timeout=120) as client:  # which stays with one router: another one's loads may be others
        for _ in range(2):
            body = {"model": NAME, "prompt": prompt, "max_tokens": 4, "prompt_cache_key": session}
            answer = client.post(f"{url}/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            cached = (answer.json()["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            prompt += "And so on."
    return cached if cached > 32 else 0


def test_engines_and_routers_are_killed_and_the_operator_is_away(cluster: Cluster, deployed: str) -> None:
    """A killed replica costs streams that were under way on it, which end in an error; no request is lost. A killed
    router costs what was under way in it; clients connect to the others."""
    change(cluster, deployed, {"routing": {"strategy": "prefix"}}, 4)
    with TokenClients(address(cluster, deployed), NAME) as users:

        def served(count: int) -> None:
            goal = sum(users.finished.values()) + count
            eventually(lambda: sum(users.finished.values()) >= goal, PATIENCE)

        served(20)
        for number in range(ROUNDS):
            changed = [{"name": "OMP_NUM_THREADS", "value": "1"}, {"name": "ROUND", "value": str(number)}]
            seconds = change(cluster, deployed, {"engine": {"env": changed}}, 4)
            print(f"\n{number + 1}: engines replaced in {seconds:.0f} s", end="")
            assert not users.troubles
        operate(cluster, deployed, 0)
        for number in range(ROUNDS):
            kill_all(next(iter(pods(cluster, deployed, ENGINE))))
            served(40)
            eventually(lambda: available(cluster, deployed) == [2, 2], PATIENCE)
            print(f"\n{number + 1}: engine killed; {len(users.broken)} streams ended in an error", end="")
        gone = next(iter(pods(cluster, deployed, ENGINE).values()))
        cluster.kubectl("delete", "pod", gone, "-n", deployed, "--timeout=120s", timeout=130)
        eventually(lambda: available(cluster, deployed) == [2, 2], PATIENCE)
        assert not users.refused, "without an operator, too"
        operate(cluster, deployed, 1)
        for number in range(ROUNDS):
            kill_all(next(iter(pods(cluster, deployed, ROUTER))))
            eventually(lambda: settled(cluster, deployed, 4), PATIENCE)
            served(20)
            count = len(users.troubles)
            print(f"\n{number + 1}: router killed; {len(users.refused)} requests in it were lost", end="")
            served(40)
            assert len(users.troubles) == count, "only what was under way"
    assert all("after" in one and "Error" in one for one in users.broken), "none ends as if it were complete"


def operate(cluster: Cluster, namespace: str, count: int) -> None:
    """So many operators."""
    found = cluster.get("deployments", "-l", "app.kubernetes.io/component=operator", namespace=namespace)["items"]
    name = found[0]["metadata"]["name"]
    cluster.kubectl("scale", "deployment", name, "-n", namespace, f"--replicas={count}")
    selector = "app.kubernetes.io/component=operator"
    eventually(lambda: len(pods(cluster, namespace, selector)) == count, 60)


def available(cluster: Cluster, namespace: str) -> list[int]:
    """Pods of both Deployments, as they count them."""
    items = (cluster.get("deployment", name, namespace=namespace) for name in (NAME, f"{NAME}-router"))
    return [one["status"].get("availableReplicas", 0) for one in items]
