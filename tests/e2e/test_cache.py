"""What has been fetched stays fetched: the engine's real image, a claim on a real volume, and a hub that counts."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from clusterrig import settings
from clusterrig.fixtures import Cluster, eventually, run_rig
from support.hub_server import CONFIG, Hub, Repo
from support.serving import tiny_model

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
FILES = {
    "config.json": CONFIG,
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"[]",
    "model.safetensors": b"x" * 5000,
}
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


def manifest(name: str, hub: Hub, mode: str, prefetch: bool = False, **spec: Any) -> dict[str, Any]:
    claim = {"size": "1Gi", "accessModes": [mode], "retain": True}
    cache = {"mode": "pvc", "pvc": claim, "prefetch": prefetch}
    return {
        "apiVersion": "octavo.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": name},
        "spec": {
            "model": {"uri": "hf://org/tiny", "cache": cache},
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


def test_a_new_model_is_fetched_before_the_old_pods_go(
    cluster: Cluster, installed: str, hub: Hub, request: pytest.FixtureRequest
) -> None:
    name = "prefetched"
    request.addfinalizer(lambda: forget(cluster, installed, name))
    cluster.apply(manifest(name, hub, "ReadWriteMany", prefetch=True, replicas=2), namespace=installed)
    ready(cluster, installed, name)

    def pods() -> set[str]:
        label = f"{selected(name)},app.kubernetes.io/component=engine"
        return {one["metadata"]["uid"] for one in cluster.get("pods", "-l", label, namespace=installed)["items"]}

    def condition(kind: str) -> tuple[str, str, str]:
        found = {c["type"]: c for c in cluster.get("llmd", name, namespace=installed)["status"]["conditions"]}
        return found[kind]["status"], found[kind]["reason"], found[kind]["message"]

    before = pods()
    change = json.dumps({"spec": {"model": {"uri": "hf://org/next"}}})
    cluster.kubectl("patch", f"llmd/{name}", "-n", installed, "--type=merge", "-p", change)
    eventually(lambda: condition("Degraded")[1] == "ModelNotFound", 60)  # the hub has no such model yet
    assert "org/next" in condition("Degraded")[2] and condition("Progressing")[1] == "Prefetching"
    assert condition("Available")[0] == "True" and pods() == before
    assert len(before) == 2

    hub.repos["org/next"] = Repo({**FILES, "model.safetensors": b"y" * 5000})
    sent = len(hub.sent("/model.safetensors"))
    ready(cluster, installed, name)
    eventually(lambda: not pods() & before, 30)  # the last of them ends
    assert len(hub.sent("/model.safetensors")) == sent + 1, "the Job has fetched it; the new pods find it in the cache"
    eventually(lambda: not cluster.get("jobs", "-l", selected(name), namespace=installed)["items"], 20)


def test_a_second_pod_of_a_node_fetches_nothing(
    cluster: Cluster, installed: str, helm: Callable[..., str], hub: Hub, request: pytest.FixtureRequest
) -> None:
    name, folder = "on-the-node", Path(tempfile.mkdtemp(prefix="octavo-node-cache-", dir="/var/tmp"))
    folder.chmod(0o777)
    enforce = "pod-security.kubernetes.io/enforce"

    def allow(*folders: Path) -> None:
        paths = json.dumps([str(one) for one in folders])
        helm(
            "upgrade",
            installed,
            str(ROOT / "charts/octavo"),
            "-n",
            installed,
            "--wait",
            "--timeout=3m",
            "--reuse-values",
            f"--set-json=cache.nodePaths={paths}",
        )

    def put_back() -> None:
        forget(cluster, installed, name)
        cluster.kubectl("label", "namespace", installed, f"{enforce}=restricted", "--overwrite")
        allow()
        shutil.rmtree(folder)

    request.addfinalizer(put_back)
    body = manifest(name, hub, "ReadWriteMany", replicas=2)
    body["spec"]["model"]["cache"] = {"mode": "node", "node": {"path": str(folder), "maxSize": "1Gi"}}
    cluster.apply(body, namespace=installed)

    def reason() -> str:
        found = cluster.get("llmd", name, namespace=installed).get("status") or {}
        return next((c["reason"] for c in found.get("conditions") or [] if c["type"] == "Degraded"), "")

    eventually(lambda: reason() == "NodeCacheNotAllowed", 30)
    allow(folder)
    eventually(lambda: reason() == "PodSecurityViolation", 60)
    cluster.kubectl("label", "namespace", installed, f"{enforce}=privileged", "--overwrite")
    ready(cluster, installed, name)
    assert times_sent(hub) == dict.fromkeys(FILES, 1)
    assert [one.name for one in folder.iterdir()] == [installed]
    cluster.kubectl("delete", "pods", "-l", selected(name), "-n", installed, timeout=60)
    ready(cluster, installed, name)
    assert times_sent(hub) == dict.fromkeys(FILES, 1)


def test_a_model_of_an_image_is_mounted_and_nothing_is_fetched(
    cluster: Cluster, installed: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    runtimes = [one["status"]["nodeInfo"]["containerRuntimeVersion"] for one in cluster.get("nodes")["items"]]
    versions = [re.fullmatch(r"containerd://v?(\d+)\.(\d+).*", one) for one in runtimes]
    if not cluster.is_rig or not all(one and (int(one[1]), int(one[2])) >= (2, 1) for one in versions):
        pytest.skip(f"mounting an image needs containerd 2.1, the cluster has {', '.join(runtimes)}")
    name = "mounted"
    request.addfinalizer(lambda: forget(cluster, installed, name))
    tiny_model(tmp_path / "files" / "tiny")
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY files /models\n")
    run_rig("build", "octavo.dev/e2e/weights:test", str(tmp_path))
    image = run_rig("load-image", "octavo.dev/e2e/weights:test").splitlines()[-1]
    cluster.apply(
        {
            "apiVersion": "octavo.dev/v1alpha1",
            "kind": "LLMDeployment",
            "metadata": {"name": name},
            "spec": {
                "model": {"uri": f"oci://{image}//models/tiny", "name": "tiny"},
                "engine": {"args": ["--load-format=dummy"]},
            },
        },
        namespace=installed,
    )
    ready(cluster, installed, name)
    address = cluster.get("service", name, namespace=installed)["spec"]["clusterIP"]
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "ignore_eos": True}
    answer = httpx.post(f"http://{address}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4
    pod = cluster.get("pods", "-l", selected(name), namespace=installed)["items"][0]
    assert [one["name"] for one in pod["spec"].get("initContainers") or []] == [], "nothing fetches"
    write = cluster.try_kubectl("exec", "-n", installed, pod["metadata"]["name"], "--", "touch", "/model/x")
    assert write.returncode != 0, "what is mounted is read only"


def forget(cluster: Cluster, namespace: str, name: str) -> None:
    cluster.kubectl("delete", "llmd", name, "-n", namespace, "--ignore-not-found", "--timeout=30s")
    cluster.kubectl("delete", "pvc", f"{name}-model-cache", "-n", namespace, "--ignore-not-found", "--wait=false")
