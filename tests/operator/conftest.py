"""The operator under test: a process of its own, with exactly the rights that the chart gives, on a real API server."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

from clusterrig import binaries
from clusterrig.fixtures import Cluster, cluster, eventually, namespace  # noqa: F401
from support.llmd import SESSION

ROOT = Path(__file__).parents[2]
CRD = ROOT / "crds/octavo.dev_llmdeployments.yaml"
((LABEL, NUMBER),) = SESSION.items()
SYSTEM = f"octavo-system-{NUMBER}"
RELEASE = f"octavo-{NUMBER}"


class Operator:
    """A running operator; `start`, `stop`, `kill` and `restart` as often as a test likes."""

    user = f"system:serviceaccount:{SYSTEM}:{RELEASE}"  # as the audit log calls it

    def __init__(self, kubeconfig: Path, folder: Path, name: str = "one") -> None:
        self.environment = {
            **os.environ, "KUBECONFIG": str(kubeconfig), "POD_NAMESPACE": SYSTEM, "POD_NAME": name,
            "OCTAVO_LEASE_NAME": RELEASE, "OCTAVO_LEASE_SECONDS": "3", "OCTAVO_RESYNC_SECONDS": "30",
            "OCTAVO_SELECTOR": f"{LABEL}={NUMBER}",
        }  # fmt: skip
        self.environment.pop("KUBERNETES_SERVICE_HOST", None)
        self.log_file = folder / f"{name}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.port = 0

    def start(self, **more: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        environment = {**self.environment, "OCTAVO_HEALTH_PORT": str(self.port), **more}
        with self.log_file.open("ab") as log:
            command = [sys.executable, "-m", "octavo_operator"]
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd="/")
        eventually(self.is_ready, 30)

    def is_ready(self) -> bool:
        assert self.process and self.process.poll() is None, self.log()[-3000:]
        return urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=2).status == 200

    def stop(self) -> int:
        return self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> int:
        if self.process is None:
            return 0
        self.process.send_signal(number)
        status = self.process.wait(20)
        self.process = None
        return status

    def restart(self, **more: str) -> None:
        self.stop()
        self.start(**more)

    def log(self) -> str:
        return self.log_file.read_text()


@pytest.fixture(scope="session")
def helm(cluster: Cluster) -> Callable[..., str]:  # noqa: F811
    def run(*arguments: str) -> str:
        command = [str(binaries.programs()["helm"]), f"--kubeconfig={cluster.kubeconfig}", *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="session")
def crd(cluster: Cluster) -> Iterator[None]:  # noqa: F811
    """The kind of this tree. It goes again only where it was not before: others may use the cluster, too."""
    was_there = cluster.try_kubectl("get", "crd", "llmdeployments.octavo.dev").returncode == 0
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "--field-manager=octavo-tests", "-f", str(CRD))
    cluster.kubectl("wait", "--for=condition=Established", "crd/llmdeployments.octavo.dev", "--timeout=20s")
    yield
    left = cluster.try_kubectl("get", "llmd", "-A", "-l", f"{LABEL}!={NUMBER}", "-o", "name").stdout
    if not was_there and not left:  # all LLMDeployments go with it, and nothing may hang
        cluster.kubectl("delete", "crd", "llmdeployments.octavo.dev", "--timeout=60s")


@pytest.fixture(scope="session")
def operator_kubeconfig(
    cluster: Cluster,  # noqa: F811
    crd: None,
    helm: Callable[..., str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Path]:
    """Logs in as the chart's ServiceAccount."""
    helm(
        "upgrade", "--install", RELEASE, str(ROOT / "charts/octavo"), "-n", SYSTEM, "--create-namespace",
        "--set", f"replicas=0,crd.install=false,fullnameOverride={RELEASE}",
    )  # fmt: skip
    token = cluster.kubectl("create", "token", "-n", SYSTEM, RELEASE, "--duration=2h").strip()
    path = tmp_path_factory.mktemp("operator") / "kubeconfig"
    path.write_text(kubeconfig_with(cluster, token))
    yield path
    helm("uninstall", RELEASE, "-n", SYSTEM, "--wait", "--timeout=60s")
    cluster.kubectl("delete", "namespace", SYSTEM, "--wait=false")


def kubeconfig_with(cluster: Cluster, token: str) -> str:  # noqa: F811
    """The cluster's, but as the account whose token it is."""
    config: dict[str, Any] = yaml.safe_load(cluster.kubeconfig.read_text())
    context = next(entry for entry in config["contexts"] if entry["name"] == config["current-context"])
    context["context"]["user"] = "operator"
    config["users"] = [{"name": "operator", "user": {"token": token}}]
    return yaml.safe_dump(config)


@pytest.fixture(scope="session")
def _operator(operator_kubeconfig: Path) -> Iterator[Operator]:
    one = Operator(operator_kubeconfig, operator_kubeconfig.parent)
    one.start()
    yield one
    one.kill()
    assert "Traceback" not in one.log(), "the operator met a defect of its own"


@pytest.fixture
def operator(_operator: Operator) -> Operator:
    """Running, whatever the test before did to it."""
    if _operator.process is None or _operator.process.poll() is not None:
        _operator.start()
    return _operator
