"""A release, rehearsed: images and chart go to a registry, and a cluster is installed from nothing else.

The commands are those that a release and its users run: `make image`, `make chart`, `helm push`, `helm install oci://`.
The registry is the rig's, which its node asks for every image, whatever host a name has: the published chart's own
names are found there, as they would be through a mirror.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from clusterrig import images, settings
from clusterrig.fixtures import Cluster, eventually
from openai import OpenAI

from octavo.version import __version__

# Other sessions' objects of the chart's kinds would be this release's, too.
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.alone]

ROOT = Path(__file__).parents[2]
PREFIX = f"{settings.REGISTRY}/octavo-dev"
OFFICIAL = "ghcr.io/octavo-dev"
PARTS = ("operator", "router", "server-cpu")  # what a cluster of CPUs runs; `server` is built and sent in the same way
MODEL, NAME = "smollm2-135m-instruct", "smollm2"
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of Japan?"}]
PATIENCE = 180  # seconds until a model answers on a busy machine of two cores


@dataclass(frozen=True)
class Release:
    """What is in the registry."""

    digests: dict[str, str]  # of the images, by part
    chart: str  # oci://...

    def image(self, part: str) -> str:
        return f"{PREFIX}/octavo-{part}@{self.digests[part]}"


def make(target: str, *arguments: str) -> str:
    """Runs `make` as a person does, whatever make runs this test."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "MFLAGS"
    }
    done = subprocess.run(
        ["make", "--no-print-directory", target, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def release(cluster: Cluster, helm: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Release:
    """Everything is built and sent to the registry."""
    if not cluster.is_rig:
        pytest.skip("needs the rig's registry")
    if os.environ.get("OCTAVO_CLUSTER_TESTS") != "require" and not images.has(
        f"{PREFIX}/octavo-server-cpu:{__version__}"
    ):
        pytest.skip("the images were never built: `make test-release` does it")
    options = ["PUSH=1", "PLAIN_HTTP=1", "WITH_MODEL=1", f"TAG={__version__}"]
    said = make("image", f"IMAGES={' '.join(PARTS)}", f"IMAGE_PREFIX={PREFIX}", *options)
    sent = rf"^{re.escape(PREFIX)}/octavo-(\S+):{re.escape(__version__)}@(sha256:[0-9a-f]{{64}})$"
    digests = dict(re.findall(sent, said, re.MULTILINE))
    assert digests.keys() == set(PARTS), said
    folder = tmp_path_factory.mktemp("chart")
    named = " ".join(f"--digest {part}={digest}" for part, digest in digests.items())
    packed = make("chart", f"ARGS=--out {folder} {named}").split()[-1]
    helm("push", packed, f"oci://{PREFIX}/charts", "--plain-http")
    return Release(digests, f"oci://{PREFIX}/charts/octavo")


@pytest.fixture(scope="module")
def system(cluster: Cluster, release: Release, helm: Callable[..., str]) -> Iterator[str]:
    """The namespace of a release that came out of the registry with the chart's own images, for CPUs alone."""
    name = f"release-{uuid.uuid4().hex[:6]}"
    cluster.kubectl("create", "namespace", name)
    cluster.kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
    there = cluster.try_kubectl("get", "crd", "llmdeployments.octavo.dev").returncode == 0
    try:
        helm("install", name, *flags(release, name), *(["--take-ownership"] if there else []))
        yield name
    finally:
        cluster.try_kubectl("delete", "llmd", "--all", "-n", name, "--timeout=60s", timeout=90)
        helm("uninstall", name, "-n", name, "--ignore-not-found", "--wait", "--timeout=60s")
        cluster.kubectl("delete", "namespace", name, "--wait=false")


def flags(release: Release, namespace: str) -> list[str]:
    """Of `helm install` and `helm upgrade`."""
    chart = [release.chart, f"--version={__version__}", "--plain-http", "-n", namespace, "--wait", "--timeout=3m"]
    values = [f"engine.image.repository={OFFICIAL}/octavo-server-cpu", f"watchNamespaces={{{namespace}}}"]
    return chart + [f"--set={value}" for value in values]


@pytest.fixture(scope="module")
def model(cluster: Cluster, system: str) -> str:
    """The address of an LLMDeployment behind a router, once it answers."""
    manifest = yaml.safe_load((ROOT / "examples/routed.yaml").read_text())
    manifest["spec"]["replicas"] = 1  # two cores
    cluster.apply(manifest, namespace=system)
    address = f"http://{eventually(lambda: cluster.get('service', NAME, namespace=system))['spec']['clusterIP']}"
    wait_for(address, lambda: cluster.get("llmd", NAME, namespace=system)["status"])
    return address


def wait_for(address: str, state: Callable[[], Any], has_ended: Callable[[], bool] = lambda: False) -> None:
    """Until a server answers; fails with ``state()`` where it does not in time, or has ended."""
    until = time.monotonic() + PATIENCE
    while not answers(address):
        assert time.monotonic() < until and not has_ended(), state()
        time.sleep(0.3)


def answers(address: str) -> bool:
    try:
        return httpx.get(f"{address}/v1/models", timeout=10).status_code == 200
    except httpx.HTTPError:
        return False


def ask(address: str, model: str) -> str:
    client = OpenAI(base_url=f"{address}/v1", api_key="none")
    said = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=64)
    return said.choices[0].message.content or ""


def image_of(cluster: Cluster, namespace: str, *which: str) -> str:
    """Of the first container of the one Deployment that a selector names."""
    (found,) = cluster.get("deployments", *which, namespace=namespace)["items"]
    return str(found["spec"]["template"]["spec"]["containers"][0]["image"])


def test_the_released_operator_passes_its_own_test(system: str, helm: Callable[..., str]) -> None:
    assert re.search(r"^Phase: +Succeeded$", helm("test", system, "-n", system, "--timeout=2m"), re.MULTILINE)


def test_a_model_answers_an_openai_client(cluster: Cluster, release: Release, system: str, model: str) -> None:
    assert "Tokyo" in ask(model, NAME)
    pods = cluster.get("pods", namespace=system)["items"]
    asked_for = {container["image"] for pod in pods for container in pod["spec"]["containers"]}
    assert asked_for == {f"{OFFICIAL}/octavo-{part}@{digest}" for part, digest in release.digests.items()}


def test_a_registry_of_ones_own_takes_the_place_of_the_published_one(
    cluster: Cluster, release: Release, system: str, model: str, helm: Callable[..., str]
) -> None:
    """An upgrade to it replaces the operator and leaves the engines as they run."""
    before = cluster.get("pods", "-l", f"octavo.dev/llmdeployment={NAME}", namespace=system)["items"]
    mirror = [f"--set=global.imageRegistry={settings.REGISTRY}", "--set=image.pullPolicy=Always"]
    helm("upgrade", system, *flags(release, system), *mirror)
    image = image_of(cluster, system, "-l", "app.kubernetes.io/component=operator")
    assert image == f"{PREFIX}/octavo-operator:{__version__}"
    assert "Tokyo" in ask(model, NAME)
    after = cluster.get("pods", "-l", f"octavo.dev/llmdeployment={NAME}", namespace=system)["items"]
    assert {pod["metadata"]["uid"] for pod in after} == {pod["metadata"]["uid"] for pod in before}


@pytest.mark.parametrize(
    ("arguments", "port", "name"),
    [
        pytest.param(
            f"--model {MODEL} --host 0.0.0.0 --port 9000 --max-model-len 512 --max-num-seqs 4 --dtype auto "
            "--gpu-memory-utilization 0.5 --enable-prefix-caching --served-model-name mine",
            9000,
            "mine",
            id="flags",
        ),
        pytest.param(f"{MODEL} --max-model-len 512 --trust-remote-code", 8000, MODEL, id="a model and flags"),
    ],
)
def test_the_cpu_image_is_started_as_vllms_is(
    cluster: Cluster, release: Release, namespace: str, arguments: str, port: int, name: str
) -> None:
    """`docker run IMAGE ARGUMENTS`: a pod gives the image arguments and nothing else."""
    hardened = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    container = {
        "name": "engine",
        "image": release.image("server-cpu"),
        "args": arguments.split(),
        "securityContext": hardened,
        "resources": {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "2Gi"}},
    }
    spec = {
        "containers": [container],
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "automountServiceAccountToken": False,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 5,
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "by-hand"}, "spec": spec}
    cluster.apply(pod, namespace=namespace)

    def status() -> dict[str, Any]:
        return dict(cluster.get("pod", "by-hand", namespace=namespace)["status"])

    address = f"http://{eventually(lambda: status()['podIP'], PATIENCE)}:{port}"
    wait_for(
        address,
        lambda: cluster.try_kubectl("logs", "-n", namespace, "by-hand").stdout[-3000:],
        lambda: status()["phase"] in ("Failed", "Succeeded"),
    )
    assert "Tokyo" in ask(address, name)
