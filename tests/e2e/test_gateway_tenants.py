"""A gateway on a real cluster: it wakes a model without routers of its own, and keeps its tenants to their limits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from clusterrig.fixtures import Cluster, eventually

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

MODEL, DOOR = "dozer", "door"
NEWCOMER = "n"  # which YAML may read as no
IDLE_SECONDS, PATIENCE, TOKENS = 30, 240, 400
Answer = tuple[int, dict[str, Any], httpx.Headers]


@pytest.fixture(scope="module")
def door(cluster: Cluster, installed: str) -> Iterator[str]:
    """The gateway's address."""
    if not cluster.is_rig:
        pytest.skip("the clients are outside of the cluster, and only the rig's Services are reached from there")
    group = "octavo.dev/v1alpha1"
    keys = {"red": "sk-red", "blue": "sk-blue"}
    objects: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": keys},
        {
            "apiVersion": group,
            "kind": "LLMDeployment",
            "metadata": {"name": MODEL},
            "spec": {
                "model": {"uri": "smollm2-135m-instruct"},
                "engine": {"maxModelLen": 512, "maxNumSeqs": 16},
                "lifecycle": {"preStopSeconds": 5, "drainSeconds": 60},
                "autoscaling": {"minReplicas": 0, "maxReplicas": 1, "idleSeconds": IDLE_SECONDS},
            },
        },
        {
            "apiVersion": group,
            "kind": "LLMGateway",
            "metadata": {"name": DOOR},
            "spec": {
                "tenants": [
                    {
                        "name": "red",
                        "apiKeySecretRef": {"name": "keys", "key": "red"},
                        "tokensPerMinute": TOKENS,
                        "isolateCache": True,
                    },
                    {"name": "blue", "apiKeySecretRef": {"name": "keys", "key": "blue"}},
                ]
            },
        },
    ]
    for one in objects:
        cluster.apply(one, namespace=installed)
    eventually(lambda: condition(cluster, installed, "llmg", DOOR, "Ready")["status"] == "True", PATIENCE)
    eventually(lambda: condition(cluster, installed, "llmd", MODEL, "Available")["status"] == "True", PATIENCE)
    yield f"http://{cluster.get('service', DOOR, namespace=installed)['spec']['clusterIP']}"
    for kind, name in (("llmg", DOOR), ("llmd", MODEL), ("secret", "keys")):
        cluster.kubectl("delete", kind, name, "-n", installed, "--timeout=60s", timeout=90)


def condition(cluster: Cluster, namespace: str, kind: str, name: str, which: str) -> dict[str, Any]:
    found = (cluster.get(kind, name, namespace=namespace).get("status") or {}).get("conditions") or []
    return next((one for one in found if one["type"] == which), {"status": "Unknown", "reason": ""})


def ask(url: str, tenant: str, text: str, max_tokens: int = 4, model: str = MODEL) -> Answer:
    body = {"model": model, "prompt": text, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    headers = {"Authorization": f"Bearer sk-{tenant}"}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=PATIENCE)
    return answer.status_code, answer.json(), answer.headers


def models(url: str, tenant: str) -> list[str]:
    answer = httpx.get(f"{url}/v1/models", headers={"Authorization": f"Bearer sk-{tenant}"}, timeout=PATIENCE)
    return [one["id"] for one in answer.json()["data"]]


def cached(answer: Answer) -> int:
    assert answer[0] == 200, answer[1]
    return int(answer[1]["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_tenants_have_their_own_cache_and_their_tokens(cluster: Cluster, door: str) -> None:
    eventually(lambda: ask(door, "red", "Hello")[0] == 200, 60)
    time.sleep(6)  # routers have read the engine once
    text = "What one tenant has asked is nothing that another one learns. " * 4
    assert cached(ask(door, "blue", text)) == 0
    assert cached(ask(door, "blue", text)) > 30
    assert cached(ask(door, "red", text)) == 0
    assert cached(ask(door, "red", text)) > 30
    assert ask(door, "red", "Count:", TOKENS)[0] == 200
    began = time.monotonic()
    while (refused := ask(door, "red", "Again:", 1))[0] == 200:
        assert time.monotonic() < began + 10
    print(f"\nrefused {time.monotonic() - began:.1f} s after the excess", end="")
    assert (refused[0], refused[1]["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(refused[2]["retry-after"]) <= 60
    assert ask(door, "blue", "Again:")[0] == 200
    eventually(lambda: ask(door, "red", "Once more:", 1)[0] == 200, 90)


def test_a_model_behind_a_gateway_goes_to_zero_and_wakes(cluster: Cluster, installed: str, door: str) -> None:
    ask(door, "blue", "Hello")
    began = time.monotonic()
    eventually(lambda: condition(cluster, installed, "llmd", MODEL, "Available")["reason"] == "ScaledToZero", PATIENCE)
    assert time.monotonic() - began < IDLE_SECONDS + 45
    assert condition(cluster, installed, "llmd", MODEL, "AutoscalerReady")["reason"] == "Idle"
    time.sleep(8)  # the pod ends
    began = time.monotonic()
    with ThreadPoolExecutor(10) as users:
        answers = list(users.map(lambda number: ask(door, "blue", f"User {number} asks:"), range(10)))
    assert [one[0] for one in answers] == [200] * 10
    print(f"\n10 answers from zero after {time.monotonic() - began:.1f} s", end="")


def test_fifty_requests_wake_a_model_that_never_ran(cluster: Cluster, installed: str, door: str) -> None:
    """Nobody has seen how many requests a replica of it handles at once; its queue takes 32 more than four."""
    manifest: dict[str, Any] = {
        "apiVersion": "octavo.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": NEWCOMER},
        "spec": {
            "model": {"uri": "smollm2-135m-instruct"},
            "replicas": 0,
            "engine": {"maxModelLen": 512, "maxNumSeqs": 4},
            "autoscaling": {"minReplicas": 0, "maxReplicas": 2, "idleSeconds": IDLE_SECONDS},
        },
    }
    cluster.apply(manifest, namespace=installed)
    try:
        reason = lambda: condition(cluster, installed, "llmd", NEWCOMER, "Available")["reason"]  # noqa: E731
        eventually(lambda: reason() == "ScaledToZero", 60)
        listed = lambda: cluster.get("llmg", DOOR, namespace=installed)["status"]["models"]  # noqa: E731
        eventually(lambda: NEWCOMER in [one["name"] for one in listed()], 30)
        eventually(lambda: all(NEWCOMER in models(door, "blue") for _ in range(8)), 60)
        began = time.monotonic()
        with ThreadPoolExecutor(50) as users:
            answers = list(
                users.map(lambda number: ask(door, "blue", f"User {number} asks:", model=NEWCOMER), range(50))
            )
        assert [one[1] for one in answers if one[0] != 200] == []
        print(f"\n50 answers of a model that never ran after {time.monotonic() - began:.1f} s", end="")
    finally:
        cluster.kubectl("delete", "llmd", NEWCOMER, "-n", installed, "--timeout=60s", timeout=90)
