"""pytest fixtures for tests that need a Kubernetes: `cluster` (one a session) and `namespace` (one a test).

A test folder gets them by a conftest.py that puts tests/cluster into sys.path and imports the two names. The cluster is
that of OCTAVO_E2E_KUBECONFIG, else the rig: the one that is up, else one that lives as long as the session.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from . import binaries, settings
from . import cluster as rig

COMMAND = Path(__file__).parents[1] / "rig.py"


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A Kubernetes to test on. `is_rig`: it may be treated roughly, and images can be given to it."""

    kubeconfig: Path
    program: str
    is_rig: bool

    def kubectl(self, *arguments: str, input: str | None = None, timeout: float = 60) -> str:
        """Runs kubectl and returns what it printed. Raises CalledProcessError, with kubectl's words as a note."""
        done = self.try_kubectl(*arguments, input=input, timeout=timeout)
        if done.returncode:
            error = subprocess.CalledProcessError(done.returncode, ["kubectl", *arguments], done.stdout, done.stderr)
            error.add_note(f"{done.stdout}{done.stderr}")
            raise error
        return done.stdout

    def try_kubectl(
        self, *arguments: str, input: str | None = None, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Runs kubectl and returns its exit status and output, whatever they are."""
        command = [self.program, f"--kubeconfig={self.kubeconfig}", *arguments]
        return subprocess.run(command, input=input, capture_output=True, text=True, timeout=timeout)

    def apply(self, *manifests: dict[str, Any], namespace: str) -> None:
        listed = {"apiVersion": "v1", "kind": "List", "items": list(manifests)}
        self.kubectl("apply", "-n", namespace, "-f", "-", input=json.dumps(listed))

    def get(self, kind: str, *name: str, namespace: str | None = None) -> dict[str, Any]:
        """One object, or with no name `{"items": [...]}`."""
        where = ["-n", namespace] if namespace else []
        return dict(json.loads(self.kubectl("get", kind, *name, *where, "-o", "json")))

    @property
    def audit_log(self) -> Path:
        """Every write to the API, a JSON object a line (rig only)."""
        return settings.default_places().audit_log


def eventually(what: Callable[[], Any], seconds: float = 30, every: float = 0.2) -> Any:
    """The first true answer of `what`; fails the test when none comes in time. Lookup errors count as `not yet`."""
    deadline = time.monotonic() + seconds
    while True:
        trouble: Any = None
        try:
            if answer := what():
                return answer
        except (LookupError, OSError, subprocess.CalledProcessError) as error:
            trouble = error
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds:.0f} s: {what.__name__}; at last: {trouble or answer!r}")
        time.sleep(every)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    if foreign := os.environ.get("OCTAVO_E2E_KUBECONFIG"):
        yield Cluster(Path(foreign).expanduser(), shutil.which("kubectl") or str(_own_kubectl()), is_rig=False)
        return
    was_up = rig.is_up()
    if not was_up:
        if os.environ.get("OCTAVO_CLUSTER_TESTS") != "require":  # CI requires them: there a skip would hide something
            if os.geteuid() != 0:
                pytest.skip("the test cluster needs root; OCTAVO_E2E_KUBECONFIG=FILE uses a cluster of yours")
            if not binaries.are_built():
                pytest.skip("the test cluster's programs are not built yet: `make cluster` does it once")
        run_rig("up")
    yield Cluster(settings.default_places().kubeconfig, str(_own_kubectl()), is_rig=True)
    if not was_up:
        run_rig("down")


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace of the test's own that admits only pods of the restricted profile."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    manifest = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    cluster.kubectl("apply", "-f", "-", input=json.dumps(manifest))
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")


def kill_all(uid: str) -> None:
    """kill -9 of all processes of a pod but the one that holds its network. They run on this machine."""
    for group in Path("/proc").glob("[0-9]*/cgroup"):
        with contextlib.suppress(OSError):
            is_pause = (group.parent / "comm").read_text() == "toolbox\n"
            if f"pod{uid}" in group.read_text() and not is_pause:
                os.kill(int(group.parent.name), signal.SIGKILL)


def run_rig(*arguments: str) -> str:
    """Runs rig.py as a person would; fails the test with its words when it fails."""
    done = subprocess.run([sys.executable, str(COMMAND), *arguments], capture_output=True, text=True)
    if done.returncode:
        pytest.fail(f"rig.py {' '.join(arguments)}: {done.stderr.strip()[-3000:]}", pytrace=False)
    return done.stdout.strip()


def _own_kubectl() -> Path:
    return binaries.programs()["kubectl"]
