"""The operator under test: a process of its own, with exactly the rights that the chart gives, on a real API server."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

from clusterrig import binaries, settings
from clusterrig import cluster as rig
from clusterrig.api import Api
from clusterrig.fixtures import Cluster, cluster, eventually, namespace  # noqa: F401
from clusterrig.lws import group_controller  # noqa: F401
from support.llmd import SESSION
from support.tcp_proxy import Proxy

ROOT = Path(__file__).parents[2]
CRDS = ROOT / "crds"
KINDS = ("llmdeployments.octavo.dev", "llmgateways.octavo.dev")
((LABEL, NUMBER),) = SESSION.items()
SYSTEM = f"octavo-system-{NUMBER}"
RELEASE = f"octavo-{NUMBER}"


def _die_with_parent() -> None:
    """A session that is killed leaves no operator behind."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


class Operator:
    """A running operator; `start`, `stop`, `kill` and `restart` as often as a test likes."""

    user = f"system:serviceaccount:{SYSTEM}:{RELEASE}"  # as the audit log calls it

    def __init__(self, kubeconfig: Path, folder: Path, name: str = "one") -> None:
        self.environment = {
            **os.environ,
            "KUBECONFIG": str(kubeconfig),
            "POD_NAMESPACE": SYSTEM,
            "POD_NAME": name,
            "OCTAVO_LEASE_NAME": RELEASE,
            "OCTAVO_LEASE_SECONDS": "6",
            "OCTAVO_RESYNC_SECONDS": "30",
            "OCTAVO_SELECTOR": f"{LABEL}={NUMBER}",
            "OCTAVO_METRICS_SERVICE": f"{RELEASE}-metrics",
        }
        self.environment.pop("KUBERNETES_SERVICE_HOST", None)
        self.log_file = folder / f"{name}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.port = 0

    def start(self, patience: float = 60, **more: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        environment = {**self.environment, "OCTAVO_HEALTH_PORT": str(self.port), **more}
        with self.log_file.open("ab") as log:
            command = [sys.executable, "-m", "octavo_operator"]
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, cwd="/", preexec_fn=_die_with_parent
            )
        if patience:
            eventually(self.is_ready, patience)

    @property
    def claim(self) -> str:
        """What `status.operator` says of those that it serves."""
        return f"{self.environment['POD_NAMESPACE']}/{self.environment['OCTAVO_LEASE_NAME']}"

    def with_metrics(self, **more: str) -> dict[str, str]:
        """For `start`: it serves the metrics API, as with the chart's value metricsAPI.enabled."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        release, system = self.environment["OCTAVO_LEASE_NAME"], self.environment["POD_NAMESPACE"]
        name, role = f"{release}-metrics", f"{release}-{system}-metrics"  # as the chart names them
        return {
            "OCTAVO_METRICS_API": "true",
            "OCTAVO_METRICS_SERVICE": name,
            "OCTAVO_METRICS_OWNER": role,
            "OCTAVO_METRICS_PORT": str(port),
            "POD_IP": settings.HOST_IP,
            "OCTAVO_LEASE_SECONDS": "15",
            **more,
        }

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
        status = self.process.wait(90)
        self.process = None
        return status

    def restart(self, **more: str) -> None:
        self.stop()
        self.start(**more)

    def log(self) -> str:
        return self.log_file.read_text() if self.log_file.exists() else ""


@pytest.fixture(scope="session")
def helm(cluster: Cluster) -> Callable[..., str]:  # noqa: F811
    def run(*arguments: str) -> str:
        command = [str(binaries.programs()["helm"]), f"--kubeconfig={cluster.kubeconfig}", *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="session")
def crd(cluster: Cluster) -> Iterator[Callable[[], None]]:  # noqa: F811
    """The kinds of this tree, installed; calling it does so again. They stay on the rig, which is thrown away, and go
    from another cluster only when they were not there before and nobody has used them since."""

    def apply() -> None:
        cluster.kubectl("apply", "--server-side", "--force-conflicts", "--field-manager=octavo-tests", "-f", str(CRDS))
        cluster.kubectl("wait", "--for=condition=Established", "crd", *KINDS, "--timeout=20s")

    was_there = cluster.try_kubectl("get", "crd", KINDS[0]).returncode == 0
    apply()
    yield apply
    others = cluster.try_kubectl("get", "llmd,llmg", "-A", "-l", f"{LABEL}!={NUMBER}", "-o", "name")
    if not cluster.is_rig and not was_there and others.returncode == 0 and not others.stdout:
        cluster.kubectl("delete", "crd", *KINDS, "--timeout=60s")


@pytest.fixture(scope="session")
def operator_kubeconfig(
    cluster: Cluster,  # noqa: F811
    crd: Callable[[], None],
    helm: Callable[..., str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Path]:
    """Logs in as the chart's ServiceAccount."""
    install(helm, RELEASE)
    path = tmp_path_factory.mktemp("operator") / "kubeconfig"
    log_in(cluster, RELEASE, path)
    yield path
    helm("uninstall", RELEASE, "-n", SYSTEM, "--wait", "--timeout=60s")
    cluster.kubectl("delete", "namespace", SYSTEM, "--wait=false")


def install(helm: Callable[..., str], name: str, *values: str, system: str = SYSTEM) -> None:
    """The chart without a pod of the operator: rights and account alone."""
    fixed = f"replicas=0,crd.install=false,fullnameOverride={name}"
    flags = [flag for value in (fixed, *values) for flag in ("--set", value)]
    helm("upgrade", "--install", name, str(ROOT / "charts/octavo"), "-n", system, "--create-namespace", *flags)


def log_in(cluster: Cluster, account: str, path: Path, system: str = SYSTEM) -> None:  # noqa: F811
    """Writes a kubeconfig for one of the chart's accounts."""
    token = cluster.kubectl("create", "token", "-n", system, account, "--duration=2h").strip()
    config: dict[str, Any] = yaml.safe_load(cluster.kubeconfig.read_text())
    context = next(entry for entry in config["contexts"] if entry["name"] == config["current-context"])
    context["context"]["user"] = "operator"
    config["users"] = [{"name": "operator", "user": {"token": token}}]
    path.write_text(yaml.safe_dump(config))


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


@pytest.fixture
def namespaced(
    cluster: Cluster,  # noqa: F811
    crd: Callable[[], None],
    helm: Callable[..., str],
    namespace: str,  # noqa: F811
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> Iterator[Operator]:
    """An operator of its own with rights in the test's namespace alone; the session's one rests."""
    request.getfixturevalue("_operator").kill()
    name = f"{RELEASE}-own"
    install(helm, name, f"watchNamespaces={{{namespace}}}")
    log_in(cluster, name, tmp_path / "kubeconfig")
    one = Operator(tmp_path / "kubeconfig", tmp_path, "namespaced")
    one.environment |= {"OCTAVO_WATCH_NAMESPACES": namespace, "OCTAVO_LEASE_NAME": name}
    one.start()
    yield one
    one.kill()
    helm("uninstall", name, "-n", SYSTEM, "--wait", "--timeout=60s")
    assert "Traceback" not in one.log(), "the operator met a defect of its own"


@pytest.fixture
def second(
    cluster: Cluster,  # noqa: F811
    crd: Callable[[], None],
    helm: Callable[..., str],
    tmp_path: Path,
) -> Iterator[Operator]:
    """The operator of a second release, in a namespace of its own, for the same LLMDeployments; not started yet."""
    name, system = f"{RELEASE}-second", f"{SYSTEM}-second"
    install(helm, name, system=system)
    log_in(cluster, name, tmp_path / "kubeconfig", system)
    one = Operator(tmp_path / "kubeconfig", tmp_path, "second")
    one.user = f"system:serviceaccount:{system}:{name}"
    one.environment |= {"OCTAVO_LEASE_NAME": name, "POD_NAMESPACE": system}
    yield one
    one.kill()
    helm("uninstall", name, "-n", system, "--wait", "--timeout=60s")
    cluster.kubectl("delete", "namespace", system, "--wait=false")
    assert "Traceback" not in one.log(), "the operator met a defect of its own"


@pytest.fixture
def fake_nodes(cluster: Cluster, namespace: str) -> Iterator[Callable[..., None]]:  # noqa: F811
    """Adds nodes on which pods only seem to run (`count`, `gpus`), with the namespace as their nvidia.com/gpu.product.
    They go after its pods, which never finish going without their node."""
    if not cluster.is_rig:
        pytest.skip("needs fake nodes")
    places, names = settings.default_places(), set[str]()

    def add(count: int = 1, *, gpus: int = 0, product: str = namespace) -> None:
        names.update(rig.add_fake_nodes(places, count, gpus=gpus, product=product, prefix=namespace))

    yield add
    api = Api(places)

    def is_empty() -> bool:  # asked again: of a thousand, one call does not delete all in its time
        api.call("DELETE", f"/apis/octavo.dev/v1alpha1/namespaces/{namespace}/llmdeployments")
        return not api.call("GET", f"/api/v1/namespaces/{namespace}/pods?limit=1")["items"]

    eventually(is_empty, 300)
    cluster.kubectl("delete", "node", *names)


@pytest.fixture
def alone(cluster: Cluster) -> None:  # noqa: F811
    """For tests that treat the whole cluster roughly: only on a rig of our own, and while nobody else uses it."""
    if not cluster.is_rig:
        pytest.skip("would disturb others: not on a cluster of yours")
    others = cluster.kubectl("get", "llmd", "-A", "-l", f"{LABEL}!={NUMBER}", "-o", "name").split()
    systems = cluster.kubectl("get", "ns", "-o", "name").split()
    others += [one for one in systems if one.startswith("namespace/octavo-system-") and not one.endswith(NUMBER)]
    if others:
        pytest.skip(f"would disturb others: {', '.join(others)}")


@pytest.fixture
def behind_proxy(
    cluster: Cluster,  # noqa: F811
    _operator: Operator,
    operator_kubeconfig: Path,
    tmp_path: Path,
) -> Iterator[tuple[Operator, Proxy]]:
    """An operator whose way to the API server can be broken, not started yet; the other one rests."""
    _operator.kill()
    cluster.kubectl("delete", "lease", RELEASE, "-n", SYSTEM, "--ignore-not-found")  # it is free at once
    config = yaml.safe_load(operator_kubeconfig.read_text())
    for entry in config["clusters"]:
        server = urlsplit(entry["cluster"]["server"])
        proxy = Proxy((server.hostname or "", server.port or 443))
        entry["cluster"] = {"server": f"https://127.0.0.1:{proxy.port}", "insecure-skip-tls-verify": True}
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    one = Operator(path, tmp_path, "proxied")
    yield one, proxy
    one.kill()
    proxy.close()
    assert "Traceback" not in one.log(), "the operator met a defect of its own"
