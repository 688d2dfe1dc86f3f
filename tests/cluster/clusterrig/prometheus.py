"""A real Prometheus and promtool for tests: Debian's, unpacked into the cache, so that nothing is installed or started.

`PROMETHEUS_BIN` names a folder with both programs, where there is one already.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from . import settings

PROGRAMS = ("prometheus", "promtool")


@functools.cache
def programs() -> dict[str, Path] | None:
    """Path of each program, or None where they can be had from nowhere."""
    folders = [Path(given) for given in [os.environ.get("PROMETHEUS_BIN")] if given]
    folders += [Path("/usr/bin"), Path("/usr/local/bin"), settings.cache() / "prometheus/usr/bin"]
    for folder in folders:
        if all((folder / name).exists() for name in PROGRAMS):
            return {name: folder / name for name in PROGRAMS}
    if not _fetch(folders[-1].parents[1]):
        return None
    return {name: folders[-1] / name for name in PROGRAMS}


def _fetch(target: Path) -> bool:
    """Needs no root where apt's lists are there; with root they are brought up to date."""
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        for command in (["apt-get", "download", "prometheus"], ["apt-get", "update", "--quiet"]) * 2:
            subprocess.run(command, cwd=folder, capture_output=True)
            if found := list(Path(folder).glob("*.deb")):
                subprocess.run(["dpkg-deb", "--extract", str(found[0]), f"{folder}/root"], check=True)
                shutil.rmtree(target, ignore_errors=True)
                Path(folder, "root").rename(target)
                return True
    return False


class Prometheus:
    """One process that scrapes and evaluates every second, or less often. A context manager."""

    def __init__(
        self, folder: Path, jobs: list[dict[str, Any]], rules: Path | None = None, interval: str = "1s"
    ) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.config = {
            "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": "1s"},
            "scrape_configs": jobs,
            "rule_files": [str(rules)] if rules else [],
        }

    def __enter__(self) -> Prometheus:
        found = programs()
        assert found, "ask programs() first"
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "prometheus.yml").write_text(yaml.safe_dump(self.config))
        command = [
            str(found["prometheus"]),
            "--config.file=prometheus.yml",
            "--storage.tsdb.path=data",
            f"--web.listen-address=127.0.0.1:{self.port}",
        ]
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log)
        deadline = time.monotonic() + 30
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/ready", timeout=2)
                return self
            except OSError:
                assert self.process.poll() is None, (self.folder / "log").read_text()[-2000:]
                assert time.monotonic() < deadline, "Prometheus is not ready within 30 s"
                time.sleep(0.1)

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(20)

    def api(self, path: str, **params: str | float) -> Any:
        """`data` of an answer. Raises ValueError with Prometheus' words when it refuses."""
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(params)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(json.load(error).get("error", str(error))) from None

    def query(self, expression: str) -> list[dict[str, Any]]:
        return list(self.api("query", query=expression)["result"])

    def query_range(self, expression: str, seconds: float, step: float = 5) -> list[dict[str, Any]]:
        now = time.time()
        return list(self.api("query_range", query=expression, start=now - seconds, end=now, step=step)["result"])

    def alerts(self, name: str, state: str = "firing") -> list[dict[str, Any]]:
        found = self.api("alerts")["alerts"]
        return [one for one in found if one["labels"]["alertname"] == name and one["state"] == state]

    def up(self) -> dict[str, bool]:
        """Whether each target answers, by its instance."""
        return {one["metric"]["instance"]: one["value"][1] == "1" for one in self.query("up")}
