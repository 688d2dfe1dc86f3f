"""The rig comes up from nothing, survives its own death, and goes without a trace."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from clusterrig import cluster as rig
from clusterrig import settings
from clusterrig.binaries import are_built
from clusterrig.fixtures import eventually, run_rig
from clusterrig.node import PRIVATE_FOLDERS
from clusterrig.progress import RigError

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def traces() -> dict[str, set[str]]:
    """What a rig could leave behind on this machine."""
    rules = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True).stdout
    words = ("kube", "etcd", "containerd", "coredns", "kwok", "registry", "rig-provisioner", "clusterrig")
    argvs = [path.read_text().replace("\0", " ") for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    folders = (*PRIVATE_FOLDERS, str(settings.default_places().run))
    return {
        "processes": {argv for argv in argvs if any(word in argv.partition(" ")[0] for word in words)},
        "mounts": set(Path("/proc/self/mounts").read_text().splitlines()),
        "interfaces": set(os.listdir("/sys/class/net")),
        "routes": set(subprocess.run(["ip", "route"], capture_output=True, text=True).stdout.splitlines()),
        "rules": set(rules.splitlines()),
        "control groups": {folder for folder, _, _ in os.walk("/sys/fs/cgroup") if settings.CGROUP in folder},
        "folders": {folder for folder in folders if Path(folder).exists()},
        "forwarding": {Path("/proc/sys/net/ipv4/ip_forward").read_text()},
    }


@pytest.mark.skipif(rig.is_up(), reason="a rig is up that this test did not start")
@pytest.mark.skipif(os.geteuid() != 0 or not are_built(), reason="needs root and the rig's programs (`make cluster`)")
def test_a_rig_goes_without_a_trace_also_after_a_crash() -> None:
    before = traces()
    run_rig("up")
    init = rig.require_up()["init"]
    run_rig("up")
    assert rig.require_up()["init"] == init, "a second `up` must leave the first one's rig alone"
    os.kill(init, signal.SIGKILL)
    eventually(lambda: not rig.is_up())
    run_rig("up")
    assert rig.require_up()["init"] != init
    assert run_rig("kubectl", "get", "node", settings.NODE_NAME, "--output=name") == f"node/{settings.NODE_NAME}"
    run_rig("down")
    assert traces() == before


def test_the_error_without_root_names_the_alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(RigError, match=r"root.*(?s:.)*OCTAVO_E2E_KUBECONFIG.*(?s:.)*make serve"):
        rig.up()


def test_it_refuses_addresses_that_the_machine_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "POD_CIDR", "127.0.0.0/24")
    taken = '[{"dst": "default", "dev": "eth0"}, {"dst": "127.0.0.0/16", "dev": "podman0"}]'
    answer = subprocess.CompletedProcess([], 0, stdout=taken)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    with pytest.raises(RigError, match=r"127\.0\.0\.0/16 \(podman0\).*OCTAVO_RIG_NETWORK"):
        rig._refuse_taken_network()
