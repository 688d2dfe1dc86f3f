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
from clusterrig.fixtures import Cluster, eventually
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
        "apiVersion": "octavo.dev/v1alpha1", "kind": "LLMDeployment", "metadata": {"name": NAME},
        "spec": {
            "model": {"uri": "smollm2-135m-instruct"}, "replicas": 2, "adapters": [],
            "engine": {
                "maxModelLen": 512, "maxNumSeqs": 16, "env": [{"name": k, "value": v} for k, v in env.items()],
            },
            "lifecycle": {"preStopSeconds": 5, "drainSeconds": 60},
            "probes": {
                "readiness": {"timeoutSeconds": 10, "failureThreshold": 10},
                "liveness": {"timeoutSeconds": 30, "periodSeconds": 30, "failureThreshold": 10},
            },
        },
    }  # fmt: skip
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
