"""The operator's way to the API server breaks in the ways that networks and servers do; what it knows stays true, and
its probes tell when it is not."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
import urllib.error
import urllib.request
from typing import Any

import pytest
from clusterrig import cluster as rig
from clusterrig import settings
from clusterrig.fixtures import Cluster, eventually
from support.llmd import toy
from support.tcp_proxy import Proxy

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

IMAGE = settings.TOOLBOX_IMAGE


def uid(cluster: Cluster, namespace: str, kind: str = "service") -> str:
    return str(cluster.get(kind, "toy", namespace=namespace)["metadata"]["uid"])


def made(cluster: Cluster, namespace: str) -> None:
    """One without pods: what is judged is who sees what."""
    cluster.apply(toy(IMAGE, replicas=0), namespace=namespace)
    eventually(lambda: uid(cluster, namespace, "poddisruptionbudget"), 20)
    time.sleep(0.5)


def delete_service(cluster: Cluster, namespace: str) -> str:
    before = uid(cluster, namespace)
    cluster.kubectl("delete", "service", "toy", "-n", namespace)
    return before


def healthz(operator: Any) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{operator.port}/healthz", timeout=2) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_connections_that_die_without_a_sign_are_noticed(
    cluster: Cluster, namespace: str, behind_proxy: tuple[Any, Proxy]
) -> None:
    operator, proxy = behind_proxy
    operator.start(OCTAVO_WATCH_SECONDS="2", OCTAVO_RESYNC_SECONDS="600", OCTAVO_LEASE_SECONDS="15")
    made(cluster, namespace)
    proxy.freeze(also_new=False)
    before = delete_service(cluster, namespace)
    eventually(lambda: uid(cluster, namespace) != before, 45)
    assert operator.process.poll() is None


def test_connections_that_are_cut_lose_nothing(
    cluster: Cluster, namespace: str, behind_proxy: tuple[Any, Proxy]
) -> None:
    operator, proxy = behind_proxy
    operator.start(OCTAVO_RESYNC_SECONDS="600", OCTAVO_LEASE_SECONDS="30")
    made(cluster, namespace)
    proxy.cut(refuse=True)
    before = delete_service(cluster, namespace)
    change = {"spec": {"service": {"port": 81}}}
    cluster.kubectl("patch", "llmd/toy", "-n", namespace, "--type=merge", "-p", json.dumps(change))
    time.sleep(3)
    proxy.admit()

    def caught_up() -> bool:
        service = cluster.get("service", "toy", namespace=namespace)
        return service["metadata"]["uid"] != before and service["spec"]["ports"][0]["port"] == 81

    eventually(caught_up, 20)
    assert operator.process.poll() is None


def test_liveness_holds_while_the_api_server_is_away_and_when_it_is_back(
    cluster: Cluster, namespace: str, behind_proxy: tuple[Any, Proxy]
) -> None:
    """A kubelet would end the operator again and again, later and later, and it would not be there in time."""
    operator, proxy = behind_proxy
    operator.start(OCTAVO_WATCH_SECONDS="1", OCTAVO_RESYNC_SECONDS="600")
    assert healthz(operator) == (200, "ok")
    proxy.freeze()
    deadline = time.monotonic() + 25  # its watches may be silent for 12 s
    while time.monotonic() < deadline:
        assert healthz(operator) == (200, "ok")
        time.sleep(0.5)
    proxy.thaw()
    proxy.cut()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        assert healthz(operator) == (200, "ok")
        time.sleep(0.5)


@pytest.mark.parametrize("refuse", [True, False])
def test_a_leader_without_an_api_server_goes_on_when_it_is_back(
    cluster: Cluster, namespace: str, behind_proxy: tuple[Any, Proxy], refuse: bool
) -> None:
    operator, proxy = behind_proxy
    operator.start(OCTAVO_RESYNC_SECONDS="600")
    made(cluster, namespace)
    if refuse:
        proxy.cut(refuse=True)
    else:
        proxy.freeze()
    before = delete_service(cluster, namespace)
    eventually(lambda: "the API server is away" in operator.log(), 30)
    time.sleep(10)  # longer than watches try by themselves
    assert operator.process.poll() is None
    if not refuse:
        proxy.thaw()
        proxy.cut()
    proxy.admit()
    eventually(lambda: uid(cluster, namespace) != before, 15)
    assert "the API server is back after" in operator.log()


def test_an_operator_that_starts_without_an_api_server_waits(
    cluster: Cluster, namespace: str, behind_proxy: tuple[Any, Proxy]
) -> None:
    operator, proxy = behind_proxy
    proxy.cut(refuse=True)
    with pytest.raises(BaseException, match="not within"):  # pytest.fail raises one
        operator.start(patience=3)
    assert operator.process.poll() is None
    proxy.admit()
    eventually(operator.is_ready, 20)
    made(cluster, namespace)


def test_a_frozen_operator_is_replaced_and_does_no_harm_when_it_wakes(
    cluster: Cluster, namespace: str, operator: Any, tmp_path: Any
) -> None:
    operator.restart()
    made(cluster, namespace)
    second = type(operator)(operator.log_file.parent / "kubeconfig", tmp_path, "two")
    second.start()
    frozen = operator.process
    os.kill(frozen.pid, signal.SIGSTOP)
    try:
        with pytest.raises(OSError):
            healthz(operator)  # the kubelet would end it
        before = delete_service(cluster, namespace)
        eventually(lambda: uid(cluster, namespace) != before, 20)
        known = len(operator.log())
        delete_service(cluster, namespace)
    finally:
        os.kill(frozen.pid, signal.SIGCONT)
    assert frozen.wait(10) == 1
    assert "created" not in operator.log()[known:], "it has written after the Lease was lost"
    assert second.stop() == 0


@pytest.mark.alone
def test_the_api_server_is_killed_and_comes_back(cluster: Cluster, namespace: str, operator: Any, alone: None) -> None:
    operator.restart(OCTAVO_RESYNC_SECONDS="600", OCTAVO_LEASE_SECONDS="30")
    made(cluster, namespace)
    before = delete_service(cluster, namespace)
    os.kill(rig.daemon_pid("kube-apiserver"), signal.SIGKILL)
    eventually(lambda: uid(cluster, namespace) != before, 40)
    for kind in ("service", "networkpolicy"):
        before = uid(cluster, namespace, kind)
        cluster.kubectl("delete", kind, "toy", "-n", namespace)
        eventually(lambda kind=kind, before=before: uid(cluster, namespace, kind) != before, 20)
    assert operator.process.poll() is None


@pytest.mark.alone
def test_a_restore_of_the_store_from_a_backup_is_noticed(
    cluster: Cluster, namespace: str, behind_proxy: tuple[Any, Proxy], alone: None, tmp_path: Any
) -> None:
    """Versions go back by hundreds: watches that go on from where they were would hear nothing."""
    operator, proxy = behind_proxy
    operator.start(OCTAVO_RESYNC_SECONDS="600", OCTAVO_LEASE_SECONDS="30")
    made(cluster, namespace)
    store = settings.default_places().run / "etcd"
    etcd = rig.daemon_pid("etcd")
    os.kill(etcd, signal.SIGSTOP)
    shutil.copytree(store, tmp_path / "backup")
    os.kill(etcd, signal.SIGCONT)
    marks = [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"mark-{one}"}} for one in range(700)]
    cluster.apply(*marks, namespace=namespace)  # the future that is lost: longer than what starting servers write
    cluster.apply(toy(IMAGE, name="lost", replicas=0), namespace=namespace)
    eventually(lambda: cluster.get("service", "lost", namespace=namespace), 20)
    proxy.freeze()  # it comes back to a server that is ready
    pids = [rig.daemon_pid(name) for name in ("kube-apiserver", "etcd")]
    os.kill(pids[0], signal.SIGSTOP)
    os.kill(pids[1], signal.SIGKILL)  # the rig starts it again after half a second
    store.rename(tmp_path / "lost")
    (tmp_path / "backup").rename(store)
    os.kill(pids[0], signal.SIGKILL)
    time.sleep(1)  # until the old one has ended
    eventually(lambda: cluster.kubectl("get", "--raw", "/readyz"), 40)
    assert cluster.try_kubectl("get", "llmd/lost", "-n", namespace).returncode, "the store was not restored"
    proxy.thaw()
    proxy.cut()
    time.sleep(3)
    port = {"spec": {"service": {"port": 81}}}
    cluster.kubectl("patch", "llmd/toy", "-n", namespace, "--type=merge", "-p", json.dumps(port))
    try:
        found = ("service", "toy")
        eventually(lambda: cluster.get(*found, namespace=namespace)["spec"]["ports"][0]["port"] == 81, 15)
        assert operator.process.poll() is None
    finally:  # the others are as deaf as operators that do not notice
        for name in (
            "kubelet",
            "kube-scheduler",
            "kube-controller-manager",
            "kube-proxy",
            "coredns",
            "kwok",
            "rig-provisioner",
        ):
            os.kill(rig.daemon_pid(name), signal.SIGKILL)
        time.sleep(2)
        cluster.kubectl("wait", "node", settings.NODE_NAME, "--for=condition=Ready", "--timeout=60s", timeout=70)
