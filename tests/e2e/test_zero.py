"""A real model without a replica: requests wait in its routers until one has started, and none is lost.

OCTAVO_ZERO_ROUNDS=20: so many times to zero and back (CI makes fewer).
"""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from clusterrig.fixtures import Cluster, eventually

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ROUNDS = int(os.environ.get("OCTAVO_ZERO_ROUNDS", "2"))
NAME = "sleeper"
IDLE_SECONDS = 30
PATIENCE = 300
ENGINE, ROUTER = (f"octavo.dev/llmdeployment={NAME},app.kubernetes.io/component={one}" for one in ("engine", "router"))


@pytest.fixture(scope="module")
def deployed(cluster: Cluster, installed: str) -> Iterator[str]:
    """The embedded model behind two routers, with its first replica."""
    if not cluster.is_rig:
        pytest.skip("the clients are outside of the cluster, and only the rig's Services are reached from there")
    manifest: dict[str, Any] = {
        "apiVersion": "octavo.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": NAME},
        "spec": {
            "model": {"uri": "smollm2-135m-instruct"},
            "engine": {"maxModelLen": 512, "maxNumSeqs": 16},
            "lifecycle": {"preStopSeconds": 5, "drainSeconds": 60},
            "routing": {"strategy": "prefix", "prefix": {"hold": {"maxRequests": 64, "maxSeconds": 240}}},
            "autoscaling": {"minReplicas": 0, "maxReplicas": 1, "idleSeconds": IDLE_SECONDS},
        },
    }
    cluster.apply(manifest, namespace=installed)
    eventually(lambda: condition(cluster, installed, "Ready")["status"] == "True", PATIENCE)
    yield installed
    cluster.kubectl("delete", "llmd", NAME, "-n", installed, "--timeout=60s", timeout=90)


def condition(cluster: Cluster, namespace: str, kind: str) -> dict[str, Any]:
    found = cluster.get("llmd", NAME, namespace=namespace)["status"]["conditions"]
    return next(one for one in found if one["type"] == kind)


def pods(cluster: Cluster, namespace: str, selector: str = ENGINE) -> list[str]:
    return [one["metadata"]["name"] for one in cluster.get("pods", "-l", selector, namespace=namespace)["items"]]


def at_zero(cluster: Cluster, namespace: str) -> None:
    """Waits until nothing is left of the replicas, and every router knows it."""
    eventually(lambda: condition(cluster, namespace, "Available")["reason"] == "ScaledToZero", PATIENCE)
    eventually(lambda: not pods(cluster, namespace), PATIENCE)


def held(cluster: Cluster, namespace: str) -> float:
    """How many requests wait in all routers."""
    total = 0.0
    for one in cluster.get("pods", "-l", ROUTER, namespace=namespace)["items"]:
        page = httpx.get(f"http://{one['status']['podIP']}:9001/metrics", timeout=20).text
        lines = [line for line in page.splitlines() if line.startswith("octavo_router_held_requests{")]
        total += sum(float(line.split()[-1]) for line in lines)
    return total


def ask(url: str, text: str, name: str = NAME) -> tuple[int, float, str]:
    """Status, seconds to the first token, and the answer, of a stream."""
    body = {"model": name, "prompt": text, "max_tokens": 4, "stream": True, "temperature": 0}
    began, first, said = time.monotonic(), 0.0, []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as answer:
        for line in answer.iter_lines():
            first = first or time.monotonic() - began
            said.append(line)
        return answer.status_code, first, "\n".join(said)


def whole(answer: tuple[int, float, str]) -> bool:
    return answer[0] == 200 and "[DONE]" in answer[2]


def address(cluster: Cluster, namespace: str, name: str = NAME) -> str:
    return f"http://{cluster.get('service', name, namespace=namespace)['spec']['clusterIP']}"


def operate(cluster: Cluster, namespace: str, count: int) -> None:
    """So many operators."""
    selector = "app.kubernetes.io/component=operator"
    cluster.kubectl("scale", "deployment", "-l", selector, "-n", namespace, f"--replicas={count}")
    eventually(lambda: len(pods(cluster, namespace, selector)) == count, 60)


def test_to_zero_and_back_without_losing_a_request(cluster: Cluster, deployed: str) -> None:
    url, chance, first = address(cluster, deployed), random.Random(7), list[float]()
    assert whole(ask(url, "Hello"))
    began = time.monotonic()
    at_zero(cluster, deployed)
    assert time.monotonic() - began < IDLE_SECONDS + 30 + 15, "pods take 15 s at most to end"
    assert condition(cluster, deployed, "Available")["status"] == "False"
    assert condition(cluster, deployed, "AutoscalerReady")["reason"] == "Idle"
    assert condition(cluster, deployed, "RouterReady")["status"] == "True"
    with ThreadPoolExecutor(64) as users:
        answers = list(users.map(lambda number: ask(url, f"User {number} asks:"), range(50)))
        assert all(map(whole, answers)), [one for one in answers if not whole(one)]
        assert len(pods(cluster, deployed)) == 1
        print(f"\n50 at once: first tokens after {min(one[1] for one in answers):.1f} s", end="")
        for number in range(ROUNDS):
            at_zero(cluster, deployed)
            answer = ask(url, f"Round {number}:")
            assert whole(answer), answer
            first.append(answer[1])
            print(f"\nfrom zero: {answer[1]:.1f} s", end="")
            time.sleep(IDLE_SECONDS + chance.uniform(0, 8))  # about when it stops
            answer = ask(url, f"Again {number}:")
            assert whole(answer), answer
    p95 = statistics.quantiles(first, n=20, method="inclusive")[-1] if len(first) > 1 else first[0]
    print(f"\nfirst token from zero: p50 {statistics.median(first):.1f} s, p95 {p95:.1f} s of {len(first)}")


def test_operator_and_routers_are_replaced_and_nobody_who_waits_is_lost(cluster: Cluster, deployed: str) -> None:
    url = address(cluster, deployed)
    at_zero(cluster, deployed)
    operate(cluster, deployed, 0)
    with ThreadPoolExecutor(10) as users:
        waiting = [users.submit(ask, url, f"User {number} asks:") for number in range(10)]
        eventually(lambda: held(cluster, deployed) == 10, 30)
        for name in pods(cluster, deployed, ROUTER):
            cluster.kubectl("delete", "pod", name, "-n", deployed, "--wait=false")
        time.sleep(8)  # longer than preStop
        assert not pods(cluster, deployed), "nobody has started one"
        operate(cluster, deployed, 1)
        answers = [one.result() for one in waiting]
    assert all(map(whole, answers)), answers


def test_a_request_for_a_model_that_cannot_start_is_told_why(cluster: Cluster, deployed: str) -> None:
    crash = {"op": "replace", "path": "/spec/containers/0/command", "value": ["/bin/false"]}
    prefix = {"replicas": 1, "hold": {"maxSeconds": 240}}
    manifest: dict[str, Any] = {
        "apiVersion": "octavo.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "broken"},
        "spec": {
            "model": {"uri": "smollm2-135m-instruct"},
            "replicas": 0,
            "podPatches": [crash],
            "routing": {"strategy": "prefix", "prefix": prefix},
            "autoscaling": {"minReplicas": 0, "maxReplicas": 1},
        },
    }
    cluster.apply(manifest, namespace=deployed)
    try:
        deployment = ("deployment", "broken-router")
        eventually(lambda: cluster.get(*deployment, namespace=deployed)["status"].get("availableReplicas"), PATIENCE)
        for _ in range(2):
            began = time.monotonic()
            status, _, text = ask(address(cluster, deployed, "broken"), "Anybody?", "broken")
            error = json.loads(text)["error"]
            assert (status, error["code"]) == (503, "model_failed"), text
            assert "CrashLoop" in error["message"]
            print(f"\ntold after {time.monotonic() - began:.1f} s: {error['message']}", end="")
            assert time.monotonic() - began < 60
    finally:
        cluster.kubectl("delete", "llmd", "broken", "-n", deployed, "--timeout=60s", timeout=90)
