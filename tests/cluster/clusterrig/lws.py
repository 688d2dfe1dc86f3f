"""LeaderWorkerSet's controller on the rig: a process of this machine, whose webhooks the API server calls by URL.

Built once from its Go module (../lws/go.mod), apart from the rig's own programs, and kept in the cache beside them.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import ipaddress
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from . import binaries, settings
from .fixtures import Cluster, eventually
from .progress import RigError

MODULE, COMMAND = "sigs.k8s.io/lws", "sigs.k8s.io/lws/cmd"
SOURCES = Path(__file__).parents[1] / "lws"
CRD = "leaderworkersets.leaderworkerset.x-k8s.io"
_FILES = {
    "crd.yaml": "config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml",
    "webhooks.yaml": "config/webhook/manifests.yaml",
}
_POD_WEBHOOKS = ("mpod.kb.io", "vpod.kb.io")
_ONLY_ITS_PODS = {"matchExpressions": [{"key": "leaderworkerset.sigs.k8s.io/name", "operator": "Exists"}]}
_NAMES = ("mutatingwebhookconfiguration/octavo-rig-lws", "validatingwebhookconfiguration/octavo-rig-lws")


@pytest.fixture(scope="session")
def group_controller(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """LeaderWorkerSet, on the rig: its kind and controller are there, and go after the session."""
    if not cluster.is_rig:
        pytest.skip("needs LeaderWorkerSet's controller, which is installed on the rig alone")
    if not is_built() and os.environ.get("OCTAVO_CLUSTER_TESTS") != "require":
        pytest.skip(
            "LeaderWorkerSet's controller is not built; OCTAVO_CLUSTER_TESTS=require or `make test-cluster` does"
        )
    with running(cluster, tmp_path_factory.mktemp("lws")):
        yield


def _folder() -> Path:
    digest = hashlib.sha256()
    for path in sorted(SOURCES.glob("go.*")):
        digest.update(path.read_bytes())
    return settings.cache() / "bin" / f"lws-{digest.hexdigest()[:12]}"


def is_built() -> bool:
    """Whether `build` returns at once."""
    return _folder().exists()


def build() -> Path:
    """The folder of the controller and its manifests; about two minutes the first time."""
    folder = _folder()
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix="unfinished-", dir=folder.parent))
    try:
        binaries.go_build(COMMAND, unfinished / "manager", "-s -w", sources=SOURCES)
        found = binaries.go_list(MODULE, SOURCES)
        for name, path in _FILES.items():
            shutil.copyfile(found / path, unfinished / name)
        unfinished.chmod(0o755)
        if not folder.exists():
            unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def install_kind(cluster: Cluster) -> None:
    """The kind alone, without who looks after it."""
    options = ("--server-side", "--force-conflicts", "--field-manager=octavo-tests")
    cluster.kubectl("apply", *options, "-f", str(build() / "crd.yaml"))
    eventually(lambda: _is_established(cluster.get("crd", CRD)), 20)  # `kubectl wait` fails before there is a condition


def _is_established(crd: dict[str, Any]) -> bool:
    conditions = crd.get("status", {}).get("conditions") or []
    return any(one["type"] == "Established" and one["status"] == "True" for one in conditions)


def remove_kind(cluster: Cluster) -> None:
    """With all objects of it."""
    cluster.kubectl("delete", "crd", CRD, "--ignore-not-found", "--timeout=60s", timeout=70)


@contextmanager
def running(cluster: Cluster, folder: Path) -> Iterator[Path]:
    """The kind and its controller; its log. Both go at the end. `folder`: for its files. Raises RigError."""
    program = build()
    (port, health), authority = _free_ports(2), _certificate(folder)
    config: dict[str, Any] = {
        "apiVersion": "config.lws.x-k8s.io/v1alpha1",
        "kind": "Configuration",
        "webhook": {"host": settings.HOST_IP, "port": port, "certDir": str(folder)},
        "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
        "metrics": {"bindAddress": "0"},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
    }
    (folder / "config.yaml").write_text(json.dumps(config))
    install_kind(cluster)
    log = folder / "manager.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            [str(program / "manager"), f"--config={folder / 'config.yaml'}", f"--kubeconfig={cluster.kubeconfig}"],
            stdout=output,
            stderr=output,
            cwd="/",
            preexec_fn=_die_with_parent,
        )
    try:
        _wait_for(process, log, f"http://127.0.0.1:{health}/readyz", (settings.HOST_IP, port))
        cluster.apply(*_webhooks(program, f"https://{settings.HOST_IP}:{port}", authority), namespace="default")
        yield log
    finally:
        cluster.kubectl("delete", *_NAMES, "--ignore-not-found")
        remove_kind(cluster)
        process.terminate()
        process.wait(20)


def _wait_for(process: subprocess.Popen[bytes], log: Path, url: str, webhooks: tuple[str, int]) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(url, timeout=1)
            socket.create_connection(webhooks, timeout=1).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RigError(f"LeaderWorkerSet's controller does not start:\n{log.read_text()[-2000:]}") from None
            time.sleep(0.1)


def _webhooks(folder: Path, address: str, authority: bytes) -> list[dict[str, Any]]:
    """As its module has them, but by URL instead of a Service, and asked about its own pods alone."""
    out = []
    for manifest in yaml.safe_load_all((folder / "webhooks.yaml").read_text()):
        manifest["metadata"] = {"name": "octavo-rig-lws"}
        for hook in manifest["webhooks"]:
            path = hook["clientConfig"]["service"]["path"]
            hook["clientConfig"] = {"url": address + path, "caBundle": base64.b64encode(authority).decode()}
            if hook["name"] in _POD_WEBHOOKS:
                hook["objectSelector"] = _ONLY_ITS_PODS
        out.append(manifest)
    return out


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _certificate(folder: Path) -> bytes:
    """Writes tls.crt and tls.key, for an address; the certificate is its own authority."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "octavo-rig-lws")])
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(settings.HOST_IP))])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(address, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    private = serialization.PrivateFormat.PKCS8
    (folder / "tls.crt").write_bytes(pem)
    (folder / "tls.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, private, serialization.NoEncryption())
    )
    return pem


def _die_with_parent() -> None:
    """A session that is killed leaves no controller behind."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
