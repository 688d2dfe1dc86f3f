"""What has been fetched stays fetched: the engine's real image, a claim on a real volume, and a hub that counts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from clusterrig import settings
from clusterrig.fixtures import Cluster, eventually
from support.hub_server import CONFIG, Hub, Repo

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

FILES = {
    "config.json": CONFIG, "tokenizer.json": b"{}", "tokenizer_config.json": b"[]", "model.safetensors": b"x" * 5000,
}  # fmt: skip
# The engine's container only answers probes: what is judged is the container that fetches.
ANSWER = (
    "from http.server import *\n"
    "class H(BaseHTTPRequestHandler):\n"
    "    def do_GET(self): self.send_response(200); self.end_headers()\n"
    "    def log_message(self, *_): pass\n"
    "ThreadingHTTPServer(('', 8001), H).serve_forever()"
)


@pytest.fixture
def hub(cluster: Cluster) -> Iterator[Hub]:
    if not cluster.is_rig:
        pytest.skip("the pods must reach a hub on this machine")
    with Hub(repos={"org/tiny": Repo(FILES)}, host=settings.HOST_IP) as one:
        yield one


def manifest(name: str, hub: Hub, mode: str, **spec: Any) -> dict[str, Any]:
    claim = {"size": "1Gi", "accessModes": [mode], "retain": True}
    return {
        "apiVersion": "octavo.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": name},
        "spec": {
            "model": {"uri": "hf://org/tiny", "cache": {"mode": "pvc", "pvc": claim}},
            "engine": {"env": [{"name": "HF_ENDPOINT", "value": hub.url}]},
            "lifecycle": {"preStopSeconds": 0, "drainSeconds": 0, "terminationGracePeriodSeconds": 1},
            "podPatches": [
                {"op": "replace", "path": "/spec/containers/0/command", "value": ["python", "-c", ANSWER]},
                {"op": "replace", "path": "/spec/containers/0/args", "value": []},
            ],
            **spec,
        },
    }


def ready(cluster: Cluster, namespace: str, name: str) -> None:
    def is_ready() -> bool:
        found = cluster.get("llmd", name, namespace=namespace)
        conditions = {c["type"]: c for c in (found.get("status") or {}).get("conditions") or []}
        one = conditions.get("Ready", {})
        return one.get("status") == "True" and one["observedGeneration"] == found["metadata"]["generation"]

    eventually(is_ready, 240, every=0.5)


def times_sent(hub: Hub) -> dict[str, int]:
    return {name: len(hub.sent(f"/{name}")) for name in FILES}


def selected(name: str) -> str:
    return f"octavo.dev/llmdeployment={name}"


def test_a_claim_of_one_writer_is_filled_once(
    cluster: Cluster, installed: str, hub: Hub, request: pytest.FixtureRequest
) -> None:
    name, once = "one-writer", dict.fromkeys(FILES, 1)
    request.addfinalizer(lambda: forget(cluster, installed, name))
    cluster.apply(manifest(name, hub, "ReadWriteOnce"), namespace=installed)
    ready(cluster, installed, name)
    assert times_sent(hub) == once
    status = cluster.get("llmd", name, namespace=installed)["status"]
    assert {c["type"]: c["status"] for c in status["conditions"]}["ModelCached"] == "True"

    cluster.kubectl("delete", "pods", "-l", selected(name), "-n", installed, timeout=60)
    ready(cluster, installed, name)
    change = json.dumps({"spec": {"engine": {"maxNumSeqs": 7}}})
    cluster.kubectl("patch", f"llmd/{name}", "-n", installed, "--type=merge", "-p", change)
    ready(cluster, installed, name)  # the old pod had to go first, or the new one would wait for the claim for ever

    cluster.kubectl("delete", "llmd", name, "-n", installed, "--timeout=30s")
    eventually(lambda: not cluster.get("pods", "-l", selected(name), namespace=installed)["items"], 40)
    cluster.apply(manifest(name, hub, "ReadWriteOnce"), namespace=installed)
    ready(cluster, installed, name)
    assert times_sent(hub) == once, "neither a restart, nor a rollout, nor a new life fetches it again"


def test_writers_that_start_together_fetch_it_once(
    cluster: Cluster, installed: str, hub: Hub, request: pytest.FixtureRequest
) -> None:
    name = "many-writers"
    request.addfinalizer(lambda: forget(cluster, installed, name))
    cluster.apply(manifest(name, hub, "ReadWriteMany", replicas=3), namespace=installed)
    ready(cluster, installed, name)
    assert times_sent(hub) == dict.fromkeys(FILES, 1)


def forget(cluster: Cluster, namespace: str, name: str) -> None:
    cluster.kubectl("delete", "llmd", name, "-n", namespace, "--ignore-not-found", "--timeout=30s")
    cluster.kubectl("delete", "pvc", f"{name}-model-cache", "-n", namespace, "--ignore-not-found", "--wait=false")
