"""LoRA adapters on the embedded model come and go under load: no pod is replaced, and a broken one harms nobody."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from clusterrig import settings
from clusterrig.fixtures import Cluster, eventually, kill_all
from support.adapters import write_adapter
from support.hub_server import Hub, Repo
from support.token_clients import TokenClients

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.alone]

NAME = "lora"
PATIENCE = 600
USABLE_SECONDS = 10
TOLD_SECONDS = 30
ENGINE = f"octavo.dev/llmdeployment={NAME},app.kubernetes.io/component=engine"


def adapter(folder: Path, seed: int, rank: int = 8, width: int = 576) -> Repo:
    """A random one for the embedded model; of another ``width`` it is another model's."""
    shapes = {f"model.layers.{layer}.self_attn.q_proj": (width, width) for layer in range(30)}
    place = folder / f"{seed}-{rank}-{width}"
    write_adapter(place, shapes, seed, r=rank, lora_alpha=rank, target_modules=["q_proj"])
    return Repo({path.name: path.read_bytes() for path in place.iterdir()})


@pytest.fixture(scope="module")
def hub(cluster: Cluster) -> Iterator[Hub]:
    if not cluster.is_rig:
        pytest.skip("the pods must reach a hub on this machine")
    folder = Path(tempfile.mkdtemp(prefix="octavo-adapters-"))
    try:
        repos = {f"org/a{number}": adapter(folder, number) for number in range(4)}
        repos |= {"org/high": adapter(folder, 9, rank=64), "org/other": adapter(folder, 9, width=64)}
        with Hub(repos=repos, host=settings.HOST_IP) as one:
            yield one
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def deployed(cluster: Cluster, installed: str, hub: Hub) -> Iterator[str]:
    """Two replicas of the embedded model, with LoRA and without an adapter."""
    env = {"OMP_NUM_THREADS": "1", "HF_ENDPOINT": hub.url}
    manifest: dict[str, Any] = {
        "apiVersion": "octavo.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": NAME},
        "spec": {
            "model": {"uri": "smollm2-135m-instruct"},
            "replicas": 2,
            "adapters": [],
            "engine": {
                "maxModelLen": 512,
                "maxNumSeqs": 16,
                "env": [{"name": k, "value": v} for k, v in env.items()],
            },
            "lifecycle": {"preStopSeconds": 5, "drainSeconds": 60},
            "probes": {
                "readiness": {"timeoutSeconds": 10, "failureThreshold": 10},
                "liveness": {"timeoutSeconds": 30, "periodSeconds": 30, "failureThreshold": 10},
            },
        },
    }
    cluster.apply(manifest, namespace=installed)
    eventually(lambda: condition(cluster, installed, "Ready")["status"] == "True", PATIENCE)
    yield installed
    cluster.kubectl("delete", "llmd", NAME, "-n", installed, "--timeout=60s", timeout=90)


def condition(cluster: Cluster, namespace: str, kind: str) -> dict[str, Any]:
    found = cluster.get("llmd", NAME, namespace=namespace)
    one = next(one for one in found["status"]["conditions"] if one["type"] == kind)
    return one if one["observedGeneration"] == found["metadata"]["generation"] else {"status": "old", "reason": ""}


def told(cluster: Cluster, namespace: str) -> dict[str, dict[str, Any]]:
    """`status.adapters` by name."""
    status = cluster.get("llmd", NAME, namespace=namespace)["status"]
    return {one["name"]: one for one in status.get("adapters", [])}


def pods(cluster: Cluster, namespace: str) -> dict[str, dict[str, Any]]:
    """By uid."""
    items = cluster.get("pods", "-l", ENGINE, namespace=namespace)["items"]
    return {one["metadata"]["uid"]: one for one in items if "deletionTimestamp" not in one["metadata"]}


def ask(address: str, model: str) -> httpx.Response:
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"{address}/v1/completions", json=body, timeout=120)


def addresses(cluster: Cluster, namespace: str) -> list[str]:
    """Of the pods: each has to have what is asked for."""
    return [f"http://{one['status']['podIP']}:8000" for one in pods(cluster, namespace).values()]


def everywhere(cluster: Cluster, namespace: str, model: str, status: int = 200) -> bool:
    return all(ask(address, model).status_code == status for address in addresses(cluster, namespace))


def change(cluster: Cluster, namespace: str, *names: str, **others: str) -> float:
    """Adapters a0, a1, ... of the hub, and others by their URIs; when it was done."""
    entries = [{"name": name, "uri": f"hf://org/{name}"} for name in names]
    entries += [{"name": name, "uri": uri} for name, uri in others.items()]
    patch = json.dumps({"spec": {"adapters": entries}})
    cluster.kubectl("patch", "llmd", NAME, "-n", namespace, "--type=merge", "-p", patch)
    return time.monotonic()


def test_adapters_are_added_and_removed_under_load(cluster: Cluster, deployed: str) -> None:
    url = f"http://{cluster.get('service', NAME, namespace=deployed)['spec']['clusterIP']}"
    before = pods(cluster, deployed).keys()
    with TokenClients(url, NAME, users=4) as users:
        eventually(lambda: sum(users.finished.values()) >= 8, PATIENCE)
        for names in (("a0",), ("a0", "a1", "a2")):  # one, then two at once
            began = change(cluster, deployed, *names)
            for name in names:
                eventually(lambda name=name: everywhere(cluster, deployed, name), PATIENCE)
            seconds = time.monotonic() - began
            print(f"\n{', '.join(names)} usable after {seconds:.1f} s", end="")
            assert seconds <= USABLE_SECONDS
        eventually(lambda: condition(cluster, deployed, "AdaptersReady")["reason"] == "Loaded", TOLD_SECONDS)
        assert {name: (one["ready"], one["of"]) for name, one in told(cluster, deployed).items()} == dict.fromkeys(
            ("a0", "a1", "a2"), (2, 2)
        )
        began = change(cluster, deployed, "a0", "a2")
        eventually(lambda: everywhere(cluster, deployed, "a1", 404), PATIENCE)
        seconds = time.monotonic() - began
        print(f"\nremoved after {seconds:.1f} s", end="")
        assert seconds <= USABLE_SECONDS
        assert everywhere(cluster, deployed, "a0") and everywhere(cluster, deployed, "a2")
    assert pods(cluster, deployed).keys() == before
    assert not users.troubles and sum(users.finished.values()) > 8


def test_a_broken_one_is_told_of_and_harms_nobody(cluster: Cluster, deployed: str) -> None:
    url = f"http://{cluster.get('service', NAME, namespace=deployed)['spec']['clusterIP']}"
    change(cluster, deployed, "a0")
    eventually(lambda: everywhere(cluster, deployed, "a0"), PATIENCE)
    before = pods(cluster, deployed).keys()
    broken = {"high": "hf://org/high", "other": "hf://org/other", "absent": "hf://org/absent", "lost": "pvc://claim/x"}
    reasons = {"high": "RankTooHigh", "other": "WrongBase", "absent": "DownloadFailed", "lost": "PVCNotMounted"}
    with TokenClients(url, "a0", users=2) as users:
        began = change(cluster, deployed, "a0", **broken)

        def are_told() -> bool:
            found = told(cluster, deployed)
            return {name: found.get(name, {}).get("reason") for name in reasons} == reasons

        eventually(are_told, PATIENCE)
        seconds = time.monotonic() - began
        print(f"\ntold after {seconds:.1f} s", end="")
        assert seconds <= TOLD_SECONDS
        assert all("\n" not in one.get("message", "") for one in told(cluster, deployed).values())
        assert condition(cluster, deployed, "AdaptersReady")["status"] == "False"
        assert condition(cluster, deployed, "Ready")["status"] == "True", "the model and the others serve"
        eventually(lambda: told(cluster, deployed)["a0"] == {"name": "a0", "ready": 2, "of": 2}, TOLD_SECONDS)
        listed = cluster.get("events", namespace=deployed)["items"]
        assert any(one["reason"] in reasons.values() and one["type"] == "Warning" for one in listed)
        change(cluster, deployed, "a0", "a3")
        eventually(lambda: condition(cluster, deployed, "AdaptersReady")["status"] == "True", TOLD_SECONDS)
        assert everywhere(cluster, deployed, "a3")
    assert pods(cluster, deployed).keys() == before
    assert not users.troubles


def test_a_pod_is_ready_only_with_all_of_them(cluster: Cluster, deployed: str) -> None:
    """One is deleted, and one is killed in place: whenever a pod is ready it has every adapter."""
    names = ("a0", "a1", "a2")
    change(cluster, deployed, *names)
    eventually(lambda: condition(cluster, deployed, "AdaptersReady")["status"] == "True", PATIENCE)
    before = pods(cluster, deployed)
    gone, killed = before
    cluster.kubectl("delete", "pod", before[gone]["metadata"]["name"], "-n", deployed, "--wait=false")
    kill_all(killed)
    seen: set[str] = set()

    def all_back() -> bool:
        found = pods(cluster, deployed)
        for uid, pod in found.items():
            statuses = pod["status"].get("containerStatuses") or [{"restartCount": 0}]
            is_new = uid not in before or statuses[0]["restartCount"] > 0
            if is_new and is_ready(pod) and uid not in seen:
                seen.add(uid)
                address = f"http://{pod['status']['podIP']}:8000"
                assert [ask(address, name).status_code for name in names] == [200] * 3, "it was ready without them"
        return len(seen) == 2

    eventually(all_back, PATIENCE)


def is_ready(pod: dict[str, Any]) -> bool:
    return any((one["type"], one["status"]) == ("Ready", "True") for one in pod["status"].get("conditions") or [])


def test_routers_and_a_gateway_find_the_pods_that_have_one(cluster: Cluster, deployed: str) -> None:
    """Behind routers an adapter is used as soon as one pod has it, and never is anybody told that it is missing."""
    change(cluster, deployed, "a0")
    gateway = {
        "apiVersion": "octavo.dev/v1alpha1",
        "kind": "LLMGateway",
        "metadata": {"name": "all"},
        "spec": {"replicas": 1},
    }
    cluster.apply(gateway, namespace=deployed)
    routing = {"spec": {"routing": {"strategy": "prefix", "prefix": {"replicas": 1}}}}
    cluster.kubectl("patch", "llmd", NAME, "-n", deployed, "--type=merge", "-p", json.dumps(routing))
    for kind, name in (("llmd", NAME), ("llmg", "all")):
        cluster.kubectl(
            "wait", f"{kind}/{name}", "-n", deployed, "--for=condition=Ready", "--timeout=300s", timeout=310
        )
    urls = [f"http://{cluster.get('service', name, namespace=deployed)['spec']['clusterIP']}" for name in (NAME, "all")]
    try:
        for url in urls:
            eventually(lambda url=url: ask(url, "a0").status_code == 200, 60)
        with TokenClients(urls[0], NAME, users=2) as base, TokenClients(urls[1], "a0", users=2) as users:
            began = change(cluster, deployed, "a0", "a1")
            for url in urls:
                eventually(lambda url=url: ask(url, "a1").status_code == 200, PATIENCE)
                print(f"\nusable at {url} after {time.monotonic() - began:.1f} s", end="")
                assert time.monotonic() - began <= USABLE_SECONDS
            cards = {one["id"]: one for one in httpx.get(f"{urls[1]}/v1/models", timeout=30).json()["data"]}
            assert cards["a1"]["parent"] == NAME and cards["a1"]["owned_by"] == NAME
            models = cluster.get("llmg", "all", namespace=deployed)["status"]["models"]
            assert {one["name"] for one in models} == {NAME, "a0", "a1"}
            began = change(cluster, deployed, "a0")
            for url in urls:
                eventually(lambda url=url: ask(url, "a1").status_code == 404, PATIENCE)
                assert time.monotonic() - began <= USABLE_SECONDS
        assert not users.troubles and not base.troubles
    finally:
        cluster.kubectl("delete", "llmg", "all", "-n", deployed, "--timeout=60s", timeout=90)
