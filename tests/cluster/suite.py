#!/usr/bin/env python3
"""`make test-cluster`: every test that needs a Kubernetes, on one rig, in sessions side by side.

Most of a test's time is waiting for Kubernetes, so four sessions need little more time than the longest of them. What
has to have the cluster or the machine to itself (the marker `alone`) follows. What a session says is shown when it has
ended; arguments go to each pytest. On a cluster of yours (OCTAVO_E2E_KUBECONFIG) all of it is one session.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
RIG = [sys.executable, str(Path(__file__).with_name("rig.py"))]
OPERATOR, CLUSTER, E2E = "tests/operator", "tests/cluster", "tests/e2e"


def _of_the_operator(*names: str) -> list[str]:
    return [f"{OPERATOR}/test_{name}_on_cluster.py" for name in names]


LANES = {
    # All that registers external.metrics.k8s.io, of which a cluster has one.
    "autoscaling, boards, the rig": [*_of_the_operator("autoscaling", "watched"), f"{CLUSTER}/test_rig.py"],
    "endings, failures, watching": _of_the_operator("endings", "failures", "watching"),
    "images, a real model, rollouts, the API": [E2E, *_of_the_operator("rollout", "cel", "dry_run", "schemas")],
}
REST = [OPERATOR, *(f"--ignore={file}" for lane in LANES.values() for file in lane if file.endswith(".py"))]


class Session:
    """A pytest that runs; its words are kept until it has ended."""

    def __init__(self, name: str, *arguments: str, now: bool = False) -> None:
        self.name, self._start = name, time.monotonic()
        self._said: IO[bytes] | None = None if now else tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        command = [sys.executable, "-m", "pytest", *arguments, *sys.argv[1:]]
        environment = {**os.environ, "OCTAVO_CLUSTER_TESTS": "require"}
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=self._said, stderr=subprocess.STDOUT if self._said else None
        )

    def end(self) -> bool:
        """Waits for it and shows what it said; whether all went well. No test selected is well."""
        status = self._process.wait()
        if self._said:
            self._said.seek(0)
            sys.stdout.write(self._said.read().decode(errors="replace"))
        print(f"[suite] {self.name}: {time.monotonic() - self._start:.0f} s, exit status {status}", flush=True)
        return status in (0, 5)


def main() -> int:
    start = time.monotonic()
    if os.environ.get("OCTAVO_E2E_KUBECONFIG"):
        return not Session("all", "-m", "cluster", CLUSTER, OPERATOR, E2E, now=True).end()
    well = Session("up and down", "-m", "cluster", f"{CLUSTER}/test_lifecycle.py", now=True).end()
    was_up = subprocess.run([*RIG, "status"], capture_output=True).returncode == 0
    subprocess.run([*RIG, "up"], check=True)
    try:
        side_by_side = "cluster and not alone"
        sessions = [Session(name, "-m", side_by_side, *files) for name, files in LANES.items()]
        sessions.append(Session("the rest of the operator", "-m", side_by_side, *REST))
        ended = [session.end() for session in sessions]
        well = all(ended) and well
        well = Session("alone", "-m", "cluster and alone", CLUSTER, OPERATOR, E2E, now=True).end() and well
    finally:
        if not was_up:
            subprocess.run([*RIG, "down"], check=True)
    print(f"[suite] {'all passed' if well else 'FAILED'} in {time.monotonic() - start:.0f} s")
    return not well


if __name__ == "__main__":
    sys.exit(main())
