"""Many LLMDeployments in a crowded cluster: all are reconciled, quickly, in little memory, and then there is silence.

OCTAVO_SCALE=1000 for the full size (the suite runs a smaller one), with twenty foreign pods to each.
"""

from __future__ import annotations

import asyncio
import collections
import json
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from clusterrig.fixtures import Cluster, eventually
from support.llmd import toy

from octavo_operator.kube.client import KubeClient as Client

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

COUNT = int(os.environ.get("OCTAVO_SCALE", "60"))
FOREIGN = int(os.environ.get("OCTAVO_FOREIGN_PODS", str(20 * COUNT)))
SAMPLES = min(COUNT, 200)
WRITES = ("create", "update", "patch", "delete")


@pytest.fixture
def crowd(cluster: Cluster, namespace: str, operator: Any, fake_nodes: Callable[..., None]) -> Iterator[str]:
    """A namespace for them, fake nodes, and another namespace full of pods that are none of ours."""
    fake_nodes(COUNT // 100 + 1)
    foreign = f"{namespace}-foreign"
    cluster.kubectl("create", "namespace", foreign)
    path = f"/api/v1/namespaces/{foreign}/pods"
    everywhere(cluster, lambda client, number: client.call("POST", path, stranger(number), timeout=60), range(FOREIGN))
    yield namespace
    cluster.kubectl("delete", "namespace", foreign, "--wait=false")


def everywhere(
    cluster: Cluster, do: Callable[[Client, Any], Awaitable[Any]], what: Iterable[Any], at_once: int = 16
) -> None:
    """`do` for each, some of them at once."""

    async def run() -> None:
        os.environ["KUBECONFIG"] = str(cluster.kubeconfig)
        client = Client.connect()
        left = iter(what)

        async def work() -> None:
            for one in left:
                await do(client, one)

        try:
            await asyncio.gather(*(work() for _ in range(at_once)))
        finally:
            await client.close()
            del os.environ["KUBECONFIG"]

    asyncio.run(run())


def stranger(number: int) -> dict[str, Any]:
    """A pod that waits for a gate to open: it costs the scheduler and the nodes nothing."""
    spec = {"schedulingGates": [{"name": "octavo.dev/never"}], "containers": [{"name": "c", "image": "example.com/c"}]}
    labels = {"app": f"app-{number % 100}", "app.kubernetes.io/managed-by": "somebody"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"p-{number}", "labels": labels}, "spec": spec}


def one(name: str, namespace: str) -> dict[str, Any]:
    scheduling = {"nodeSelector": {"nvidia.com/gpu.product": namespace}, "tolerations": [{"operator": "Exists"}]}
    body = toy("example.com/none:1", name=name, scheduling=scheduling)
    body["metadata"]["namespace"] = namespace
    return body


def memory(operator: Any, field: str) -> float:
    """MiB. VmRSS: now; VmHWM: the most that it ever was."""
    status = Path(f"/proc/{operator.process.pid}/status").read_text()
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith(field))


def processor_seconds(operator: Any) -> float:
    fields = Path(f"/proc/{operator.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def writes(cluster: Cluster, since: int, operator: Any) -> collections.Counter[str]:
    """The operator's writes by verb and resource, but for renewals of its Lease."""
    with cluster.audit_log.open() as log:
        log.seek(since)
        entries = [json.loads(line) for line in log]
    return collections.Counter(
        f"{e['verb']} {e['objectRef']['resource']}"
        for e in entries
        if e["user"]["username"] == operator.user and e["verb"] in WRITES and e["objectRef"]["resource"] != "leases"
    )


def test_a_crowd_is_served(cluster: Cluster, crowd: str, operator: Any) -> None:
    path = f"/apis/octavo.dev/v1alpha1/namespaces/{crowd}/llmdeployments"
    operator.restart(OCTAVO_LEASE_SECONDS="60")
    names = [f"m-{number}" for number in range(COUNT)]
    start, since = time.monotonic(), cluster.audit_log.stat().st_size
    everywhere(cluster, lambda client, name: client.call("POST", path, one(name, crowd), timeout=60), names)
    made = time.monotonic() - start

    def ready() -> bool:
        out = cluster.kubectl(
            "get", "llmd", "-n", crowd, "-o", "jsonpath={.items[*].status.conditions[?(@.type=='Ready')].status}"
        )
        return out.split().count("True") == COUNT

    eventually(ready, 60 + COUNT, every=2)
    served = time.monotonic() - start
    print(
        f"{COUNT} made in {made:.1f} s among {FOREIGN} foreign pods, ready after {served:.1f} s; operator: "
        f"{processor_seconds(operator):.1f} s of processor time, {dict(writes(cluster, since, operator))}"
    )

    waited = sorted(change_one_after_the_other(cluster, crowd, names))
    p99 = waited[int(len(waited) * 0.99) - 1]
    print(f"change p50 {waited[len(waited) // 2] * 1000:.0f} ms, p99 {p99 * 1000:.0f} ms of {len(waited)}")
    assert p99 < 2
    silence(cluster, operator, 8)
    print(f"operator: {memory(operator, 'VmRSS'):.0f} MiB, {memory(operator, 'VmHWM'):.0f} MiB at most")
    assert memory(operator, "VmHWM") < 300

    start = time.monotonic()
    operator.restart(OCTAVO_LEASE_SECONDS="60", OCTAVO_RESYNC_SECONDS="3")
    print(f"started anew and ready after {time.monotonic() - start:.1f} s")
    silence(cluster, operator, 12)
    print(f"operator after a restart: {memory(operator, 'VmHWM'):.0f} MiB at most")
    assert memory(operator, "VmHWM") < 300


def change_one_after_the_other(cluster: Cluster, namespace: str, names: list[str]) -> list[float]:
    """Seconds from the change of a spec to its changed child."""
    waited = []

    async def change(client: Client, name: str) -> None:
        patch = {"spec": {"service": {"port": 81}}}
        where = f"/apis/octavo.dev/v1alpha1/namespaces/{namespace}/llmdeployments/{name}"
        await client.call("PATCH", where, patch, content_type="application/merge-patch+json")
        changed = time.monotonic()
        service = f"/api/v1/namespaces/{namespace}/services/{name}"
        while (await client.call("GET", service))["spec"]["ports"][0]["port"] != 81:
            assert time.monotonic() - changed < 10
            await asyncio.sleep(0.01)
        waited.append(time.monotonic() - changed)

    everywhere(cluster, change, random.Random(0).sample(names, SAMPLES), at_once=1)
    return waited


def silence(cluster: Cluster, operator: Any, seconds: float) -> None:
    """Nothing changes, so nothing is written."""
    time.sleep(3)
    since = cluster.audit_log.stat().st_size
    time.sleep(seconds)
    assert writes(cluster, since, operator) == {}
