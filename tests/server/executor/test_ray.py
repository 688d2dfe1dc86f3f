"""Engines whose nodes a Ray cluster starts. `make test-ray` installs Ray outside the tree; OCTAVO_RAY says where."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.serving import Engine, are_gone, free_port

from octavo.engine.args import EngineArgs
from octavo.errors import ConfigError
from octavo.executor.ray_placement import choose_nodes

ROOT = Path(__file__).parents[3]
FOLDER = os.environ.get("OCTAVO_RAY")
PYTHON = f"{FOLDER}/bin/python" if FOLDER else sys.executable
needs_ray = pytest.mark.skipif(
    FOLDER is None and importlib.util.find_spec("ray") is None, reason="Ray is not installed: make test-ray"
)
ENV = {
    "PYTHONPATH": os.pathsep.join([str(ROOT / "server"), str(ROOT / "kernels"), sysconfig.get_path("purelib")]),
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "300",
    "PYTHONWARNINGS": "ignore",
}


@given(st.lists(st.integers(0, 8), min_size=1, max_size=5), st.integers(2, 12), st.integers(1, 5))
def test_ranks_are_spread_over_as_few_nodes_as_can_be(capacities: list[int], ranks: int, nodes: int) -> None:
    def fits(count: int) -> bool:
        share = ranks / count
        return ranks % count == 0 and capacities[0] >= share and sum(c >= share for c in capacities) >= count

    possible = [count for count in ([nodes] if nodes > 1 else range(1, ranks + 1)) if fits(count)]
    if possible:
        assert choose_nodes([*map(float, capacities)], ranks, nodes) == possible[0]
    else:
        with pytest.raises(ConfigError, match=f"{ranks} ranks find no room"):
            choose_nodes([*map(float, capacities)], ranks, nodes)


def test_ray_is_named_where_it_is_missing_and_refused_where_it_places_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else find(name))
    for arguments, says in (
        ({"tensor_parallel_size": 2}, r"octavo\[ray\]"),
        ({"tensor_parallel_size": 1}, "and that is 1"),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2}, "data_parallel_size 2"),
    ):
        with pytest.raises(ConfigError, match=says) as caught:
            EngineArgs("model", distributed_executor_backend="ray", **arguments)._validate()
        assert "\n" not in str(caught.value)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)


class Cluster:
    """Two of Ray's nodes with a CPU each, on loopback addresses: not the first, for which Ray takes another."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # paths of sockets have to be short
        self.address = f"127.0.0.2:{free_port()}"
        port = self.address.rpartition(":")[2]
        self.nodes: list[subprocess.Popen[bytes]] = []
        self._add("--head", "--node-ip-address=127.0.0.2", f"--port={port}", "--include-dashboard=false")
        self._add(f"--address={self.address}", "--node-ip-address=127.0.0.3")

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        command = [PYTHON, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1", "--disable-usage-stats"]
        command += ["--object-store-memory=80000000", f"--temp-dir={self.folder}", *words]
        with open(f"{self.folder}/{len(words)}.log", "wb") as log:
            return subprocess.Popen(
                command, env={**os.environ, **ENV}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _add(self, *words: str) -> None:
        """Start a node, anew where Ray has given up: it waits 30 seconds for its own processes, however busy all is."""
        self.nodes.append(self._start(*words))
        script = (
            "import os, sys, time, ray; ray.init(address=sys.argv[1], log_to_driver=False, logging_level='error')\n"
            "until = time.monotonic() + 30\n"
            "while sum(node['Alive'] for node in ray.nodes()) < int(sys.argv[2]): assert time.monotonic() < until"
        )
        until = time.monotonic() + 90
        while subprocess.run(
            [PYTHON, "-c", script, self.address, str(len(self.nodes))],
            env={**os.environ, **ENV},
            capture_output=True,
            timeout=90,
        ).returncode:
            assert time.monotonic() < until
            if self.nodes[-1].poll() is not None:
                self.nodes[-1] = self._start(*words)
            time.sleep(0.5)

    def processes(self, node: int) -> list[psutil.Process]:
        parent = psutil.Process(self.nodes[node].pid)
        return [parent, *parent.children(recursive=True)]

    def close(self) -> None:
        left = [process for node in range(2) if self.nodes[node].poll() is None for process in self.processes(node)]
        for process in left:
            process.kill()
        for node in self.nodes:
            node.wait(90)
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    found = Cluster()
    yield found
    found.close()


def ours() -> list[int]:
    """All processes of engines that Ray or its driver has started."""
    names = ("octavo.executor.ray_node", "octavo.executor.ray_placement")
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(name in (process.info["cmdline"] or []) for name in names):
            found.append(process.pid)
    return found


@needs_ray
@pytest.mark.slow
def test_ray_places_a_node_and_its_end_ends_the_server(cluster: Cluster, tmp_path: Path) -> None:
    """On two of Ray's nodes; then all processes of the second are killed, with ours on it."""
    env = {**ENV, "RAY_ADDRESS": cluster.address}
    flags = ("-tp", "2", "--distributed-executor-backend", "ray", "--nnodes", "2", "--master-port", str(free_port()))
    before = ours()
    with Engine(tmp_path, *flags, env=env, python=PYTHON) as engine:
        assert engine.complete("hello") == 200
        started = [pid for pid in ours() if pid not in before]
        assert len(started) == 2 and engine.core_pid
        core, crowd = engine.core_pid, engine.crowd(3, 1000)
        time.sleep(0.5)
        killed = time.monotonic()
        for process in cluster.processes(1):
            process.send_signal(signal.SIGKILL)
        for request in crowd:
            request.join(90)
            assert not request.is_alive()
        assert engine.process.wait(90) == 1 and time.monotonic() - killed < 10
        assert are_gone([core, *started])
        assert "rank 1 (node 1) " in engine.log
