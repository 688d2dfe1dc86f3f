"""The operator's way to the API server breaks in the ways that networks and servers do; what it knows stays true, and
its probes tell when it is not."""

from __future__ import annotations

import json
import os
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


def test_liveness_fails_while_watches_are_silent_and_recovers(
    cluster: Cluster, namespace: str, behind_proxy: tuple[Any, Proxy], tmp_path: Any
) -> None:
    operator, proxy = behind_proxy
    leader = type(operator)(tmp_path / "kubeconfig", tmp_path, "leader")
    leader.environment["KUBECONFIG"] = str(tmp_path / "straight")
    config = json.loads(json.dumps(cluster.kubectl("config", "view", "--raw", "-o", "json")))
    (tmp_path / "straight").write_text(config)
    leader.start(OCTAVO_LEASE_SECONDS="60")  # so that the one behind the proxy only waits, and does not end by itself
    try:
        eventually(lambda: "leader is the leader" in leader.log(), 20)
        operator.start(OCTAVO_WATCH_SECONDS="1", OCTAVO_RESYNC_SECONDS="600")
        assert healthz(operator) == (200, "ok")
        proxy.freeze()
        status, said = eventually(lambda: (found := healthz(operator))[0] == 503 and found, 20)
        assert status == 503 and "no events or bookmarks" in said
        proxy.thaw()
        proxy.cut()
        eventually(lambda: healthz(operator) == (200, "ok"), 20)
    finally:
        leader.stop()


def test_a_leader_without_an_api_server_ends_and_one_that_starts_waits(
    cluster: Cluster, namespace: str, behind_proxy: tuple[Any, Proxy]
) -> None:
    operator, proxy = behind_proxy
    operator.start()
    made(cluster, namespace)
    proxy.freeze()
    before = delete_service(cluster, namespace)
    assert operator.process.wait(15) == 1, "the Lease was lost: Kubernetes starts it anew"
    proxy.thaw()
    proxy.cut(refuse=True)
    with pytest.raises(BaseException, match="not within"):  # pytest.fail raises one
        operator.start(patience=3)
    assert operator.process.poll() is None
    proxy.admit()
    eventually(operator.is_ready, 20)
    eventually(lambda: uid(cluster, namespace) != before, 20)


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
