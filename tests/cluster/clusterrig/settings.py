"""Names, addresses and places of the rig. Everything that two files must agree on stands here."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
GO_SOURCES = Path(__file__).resolve().parents[1] / "go"

# One rig a machine: its addresses are fixed, so that a kubeconfig stays valid and nothing has to be looked up.
# Two other octets than ours (`10.213`) by OCTAVO_RIG_NETWORK, should that network be taken.
_NETWORK = os.environ.get("OCTAVO_RIG_NETWORK", "10.213")

NODE_NAME = "rig-node"
NODE_IP = f"{_NETWORK}.0.1"  # the bridge: gateway of the pods; API server, kubelet, DNS and registry listen on it
POD_CIDR = f"{_NETWORK}.0.0/24"
HOST_IP, LINK_IP = f"{_NETWORK}.1.1", f"{_NETWORK}.1.2"  # the two ends of the cable between this machine and the rig
LINK_PREFIX = 30
SERVICE_CIDR = f"{_NETWORK}.16.0/20"  # room for 4,000 Services: a thousand deployments fit
SERVICE_IP = f"{_NETWORK}.16.1"  # of the Service kubernetes.default
HOST_INTERFACE, RIG_INTERFACE, BRIDGE = "octavo-rig0", "octavo-rig1", "rig0"
API_SERVER = f"https://{NODE_IP}:6443"
REGISTRY = f"{NODE_IP}:5000"
CGROUP = "octavo-rig"
RECORD = Path("/run/octavo-rig.json")  # says which rig is up on this machine


def cache() -> Path:
    """What outlives a rig: binaries, images, build layers. Outside the tree, removed by `rig.py clean`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo" / "rig"


def sources_key() -> str:
    """Short hash of the Go sources: a changed rig gets new binaries and leaves the old ones alone."""
    digest = hashlib.sha256()
    for path in sorted(GO_SOURCES.rglob("*")):
        if path.suffix in {".go", ".mod", ".sum"}:
            digest.update(path.relative_to(GO_SOURCES).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


TOOLBOX_IMAGE = f"octavo.dev/rig/toolbox:{sources_key()}"  # the pause container; tests use it for small pods


@dataclasses.dataclass(frozen=True)
class Places:
    """Where one rig keeps its files. `run` lives as long as the rig, `keep` until `rig.py clean`."""

    run: Path
    keep: Path
    bin: Path

    @property
    def kubeconfig(self) -> Path:
        return self.run / "kubeconfig"

    @property
    def logs(self) -> Path:
        return self.run / "logs"

    @property
    def pki(self) -> Path:
        return self.run / "pki"

    @property
    def audit_log(self) -> Path:
        return self.logs / "audit.log"


def default_places() -> Places:
    return Places(run=REPOSITORY / ".cluster", keep=cache(), bin=cache() / "bin" / sources_key())
