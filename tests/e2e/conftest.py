"""The whole of it: the images, the chart, a real model, on the rig or on the cluster of OCTAVO_E2E_KUBECONFIG.

On the rig the images are built from this tree (seconds, when only the source has changed). Another cluster pulls them:
OCTAVO_OPERATOR_IMAGE, OCTAVO_ROUTER_IMAGE and OCTAVO_SERVER_IMAGE name them, else they are the chart's own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

from clusterrig import binaries, images
from clusterrig.fixtures import Cluster, cluster, namespace, run_rig  # noqa: F401
from clusterrig.lws import group_controller  # noqa: F401

ROOT = Path(__file__).parents[2]
VALUES = {"operator": "image", "router": "router.image", "server": "engine.image"}
IMAGES = {part: f"octavo.dev/e2e/{part}" for part in VALUES}


@pytest.fixture(scope="session")
def image_names(cluster: Cluster) -> dict[str, str]:  # noqa: F811
    """The images under test; without those that are the chart's own."""
    named = {part: os.environ.get(f"OCTAVO_{part.upper()}_IMAGE") for part in IMAGES}
    if cluster.is_rig and not all(named.values()):
        if os.environ.get("OCTAVO_CLUSTER_TESTS") != "require" and not images.has(f"{IMAGES['server']}:test"):
            pytest.skip("the engine's image was never built; OCTAVO_CLUSTER_TESTS=require or `make test-cluster` does")
        for part, name in IMAGES.items():
            if named[part]:
                continue
            run_rig("build", f"{name}:test", str(ROOT), "--target", part, "--build-arg", "WITH_MODEL=1")
            named[part] = run_rig("load-image", f"{name}:test").splitlines()[-1]
    return {part: image for part, image in named.items() if image}


@pytest.fixture(scope="session")
def image_values(image_names: dict[str, str]) -> list[str]:
    """Helm's flags for them."""
    return [flag for part, image in image_names.items() for flag in _values(VALUES[part], image)]


def _values(key: str, image: str) -> list[str]:
    found = re.fullmatch(r"(?P<repository>.+?)(:(?P<tag>[^:/@]+))?(@(?P<digest>.+))?", image)
    assert found, image
    return [f"--set-string={key}.{name}={value}" for name, value in found.groupdict().items() if value]


@pytest.fixture(scope="session")
def helm(cluster: Cluster) -> Callable[..., str]:  # noqa: F811
    def run(*arguments: str) -> str:
        command = [str(binaries.programs()["helm"]), f"--kubeconfig={cluster.kubeconfig}", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="session")
def installed(cluster: Cluster, image_values: list[str], helm: Callable[..., str]) -> Iterator[str]:  # noqa: F811
    """A namespace of the restricted profile in which an operator, installed by the chart, looks after models."""
    was_there = cluster.try_kubectl("get", "crd", "llmdeployments.octavo.dev").returncode == 0
    cluster.kubectl(
        "apply", "--server-side", "--force-conflicts", "--field-manager=octavo-tests", "-f", str(ROOT / "crds")
    )
    name = f"e2e-{uuid.uuid4().hex[:6]}"
    cluster.kubectl("create", "namespace", name)
    cluster.kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
    helm(
        "install",
        name,
        str(ROOT / "charts/octavo"),
        "-n",
        name,
        "--wait",
        "--timeout=3m",
        "--set=crd.install=false",
        f"--set=watchNamespaces={{{name}}}",
        *image_values,
    )
    yield name
    cluster.kubectl("delete", "llmd,llmg", "--all", "-n", name, "--timeout=60s", timeout=90)
    helm("uninstall", name, "-n", name, "--wait", "--timeout=60s")
    cluster.kubectl("delete", "namespace", name, "--wait=false")
    left = cluster.try_kubectl("get", "llmd,llmg", "-A", "-o", "name")
    if not cluster.is_rig and not was_there and left.returncode == 0 and not left.stdout:  # others may use it by now
        cluster.kubectl("delete", "crd", "llmdeployments.octavo.dev", "llmgateways.octavo.dev", "--timeout=60s")
