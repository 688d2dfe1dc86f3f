"""Alerts on pods: Prometheus finds engine and operator as docs/monitoring.md says; three alerts fire and resolve.

They wait two seconds here instead of a minute; OCTAVO_REAL_DURATIONS=1 lets them wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from clusterrig import prometheus
from clusterrig.fixtures import Cluster, eventually
from clusterrig.prometheus import Prometheus

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
NAME = "watched"
GATEWAY = "doors"
SELECTOR = f"octavo.dev/llmdeployment={NAME}"
PATIENCE = 150 if os.environ.get("OCTAVO_REAL_DURATIONS") else 40
# Runs in the pod: sends a signal to the process of the engine's core.
SIGNAL_CORE = (
    "import glob, os, sys; others = [int(p.split('/')[2]) for p in glob.glob('/proc/[0-9]*/cmdline')"
    " if b'octavo.engine.core_proc' in open(p, 'rb').read()];"
    "[os.kill(pid, int(sys.argv[1])) for pid in others if pid not in (1, os.getpid())]"
)


@pytest.fixture(scope="module")
def watched(cluster: Cluster, installed: str) -> Iterator[str]:
    """One small replica, and a gateway: each job of docs/monitoring.md finds a pod."""
    if not cluster.is_rig:
        pytest.skip("Prometheus is outside of the cluster, and only the rig's pods are reached from there")
    manifest: dict[str, Any] = {
        "apiVersion": "octavo.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": NAME},
        "spec": {
            "model": {"uri": "smollm2-135m-instruct"},
            "engine": {
                "maxModelLen": 2048,
                "maxNumSeqs": 1,
                "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
                "args": ["--max-num-queued-reqs=200", "--health-stall-seconds=3", "--watchdog-seconds=300"],
            },
            "routing": {"strategy": "prefix", "prefix": {"replicas": 1}},
            "lifecycle": {"preStopSeconds": 0, "drainSeconds": 1},
            # The alert is judged, not the kubelet, which would restart a stalled engine under way.
            "probes": {"liveness": {"periodSeconds": 60, "failureThreshold": 10}},
        },
    }
    gateway = {
        "apiVersion": "octavo.dev/v1alpha1",
        "kind": "LLMGateway",
        "metadata": {"name": GATEWAY},
        "spec": {"replicas": 1},
    }
    cluster.apply(manifest, gateway, namespace=installed)
    made = (f"llmd/{NAME}", f"llmg/{GATEWAY}")
    cluster.kubectl("wait", *made, "-n", installed, "--for=condition=Ready", "--timeout=240s", timeout=250)
    yield installed
    cluster.kubectl("delete", *made, "-n", installed, "--timeout=60s", timeout=90)


class Discovery:
    """What Prometheus' kubernetes_sd_configs with role pod would find; Debian's Prometheus is built without them."""

    def __init__(self, cluster: Cluster, namespace: str, file: Path) -> None:
        self._cluster, self._namespace, self._file = cluster, namespace, file
        self.config = {"files": [str(file)], "refresh_interval": "1s"}
        self.look()

    def look(self) -> None:
        pods = self._cluster.get("pods", namespace=self._namespace)["items"]
        self._file.write_text(yaml.safe_dump([target for pod in pods for target in self._targets(pod)]))

    def _targets(self, pod: dict[str, Any]) -> Iterator[dict[str, Any]]:
        meta = {"namespace": self._namespace, "pod_name": pod["metadata"]["name"]}
        for name, value in pod["metadata"]["labels"].items():
            meta["pod_label_" + re.sub(r"\W", "_", name)] = value
        for port in (port for container in pod["spec"]["containers"] for port in container.get("ports") or []):
            labels = {**meta, "pod_container_port_name": port["name"]}
            address = f"{pod['status'].get('podIP', '0.0.0.0')}:{port['containerPort']}"
            yield {"targets": [address], "labels": {f"__meta_kubernetes_{key}": value for key, value in labels.items()}}


@pytest.fixture(scope="module")
def discovery(cluster: Cluster, watched: str, tmp_path_factory: pytest.TempPathFactory) -> Discovery:
    return Discovery(cluster, watched, tmp_path_factory.mktemp("discovery") / "pods.yaml")


@pytest.fixture(scope="module")
def watching(discovery: Discovery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Configured by what docs/monitoring.md tells people who have no Prometheus operator."""
    if prometheus.programs() is None:
        pytest.skip("no Prometheus here, and none to be had by apt-get; PROMETHEUS_BIN=FOLDER names one")
    folder = tmp_path_factory.mktemp("prometheus")
    text = (ROOT / "charts/octavo/files/alerts.yaml").read_text()
    if not os.environ.get("OCTAVO_REAL_DURATIONS"):
        text = re.sub(r"for: \d+m", "for: 2s", text).replace("[1m]", "[5s]")
    (folder / "alerts.yaml").write_text(text)
    found = re.search(r"```yaml\n(rule_files.*?)```", (ROOT / "docs/monitoring.md").read_text(), re.DOTALL)
    assert found
    jobs = yaml.safe_load(found[1])["scrape_configs"]
    for job in jobs:
        assert job.pop("kubernetes_sd_configs") == [{"role": "pod"}]
        job["file_sd_configs"] = [discovery.config]
    names = {job["job_name"] for job in jobs}
    with Prometheus(folder, jobs, folder / "alerts.yaml") as one:
        eventually(lambda: {found["metric"]["job"] for found in one.query("up == 1")} == names)
        yield one


def fires(one: Prometheus, name: str) -> dict[str, str]:
    return dict(eventually(lambda: one.alerts(name), PATIENCE)[0]["annotations"])


def resolves(one: Prometheus, name: str) -> None:
    eventually(lambda: not one.alerts(name) and not one.alerts(name, "pending"), PATIENCE)


@contextlib.contextmanager
def crowd(cluster: Cluster, namespace: str, count: int) -> Iterator[Callable[[], Any]]:
    """So many clients that want long answers; calling it, or leaving, lets them hang up."""
    address = cluster.get("service", NAME, namespace=namespace)["spec"]["clusterIP"]
    body = {"model": NAME, "prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True, "stream": True}

    async def everybody() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=None, limits=limits) as client:
            await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(count)))

    loop = asyncio.new_event_loop()
    asking = loop.create_task(everybody())

    def run() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(asking)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield lambda: loop.call_soon_threadsafe(asking.cancel)
    finally:
        loop.call_soon_threadsafe(asking.cancel)
        thread.join(30)
        loop.close()


def test_a_long_queue(cluster: Cluster, watched: str, watching: Prometheus) -> None:
    assert not watching.alerts("OctavoQueueLong")
    with crowd(cluster, watched, 80) as hang_up:
        words = fires(watching, "OctavoQueueLong")
        assert re.fullmatch(rf"\d+ requests wait for {NAME}", words["summary"])
        assert f"{watched}/{NAME}" in words["description"]
        hang_up()
        resolves(watching, "OctavoQueueLong")


def test_a_stalled_engine(cluster: Cluster, watched: str, watching: Prometheus) -> None:
    assert not watching.alerts("OctavoEngineStalled")

    def signal(number: int) -> None:
        command = ["python", "-c", SIGNAL_CORE, str(number)]
        cluster.kubectl("exec", "-n", watched, f"deploy/{NAME}", "-c", "engine", "--", *command)

    with crowd(cluster, watched, 1):
        signal(19)  # SIGSTOP
        words = fires(watching, "OctavoEngineStalled")
        assert f"{watched}/{NAME}-" in words["description"]
        signal(18)  # SIGCONT
        resolves(watching, "OctavoEngineStalled")


def test_an_operator_that_is_gone(cluster: Cluster, watched: str, watching: Prometheus, discovery: Discovery) -> None:
    resolves(watching, "OctavoOperatorDown")
    (operator,) = cluster.get("deployment", "-l", "app.kubernetes.io/component=operator", namespace=watched)["items"]
    name = operator["metadata"]["name"]
    cluster.kubectl("scale", f"deployment/{name}", "-n", watched, "--replicas=0")
    try:
        assert fires(watching, "OctavoOperatorDown")["summary"] == "No Octavo operator is running as the leader"
    finally:
        cluster.kubectl("scale", f"deployment/{name}", "-n", watched, "--replicas=1")
    cluster.kubectl("rollout", "status", f"deployment/{name}", "-n", watched, "--timeout=50s")
    discovery.look()
    resolves(watching, "OctavoOperatorDown")
