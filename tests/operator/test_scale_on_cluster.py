"""Many LLMDeployments at once: all are reconciled, quickly, in little memory, and then there is silence.

OCTAVO_SCALE=1000 for the full size (CI runs a smaller one).
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
from clusterrig import cluster as rig
from clusterrig import settings
from clusterrig.api import Api
from clusterrig.fixtures import Cluster, eventually
from support.llmd import toy

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

COUNT = int(os.environ.get("OCTAVO_SCALE", "60"))
SAMPLES = min(COUNT, 100)


@pytest.fixture
def crowd(cluster: Cluster, namespace: str, operator: Any, request: pytest.FixtureRequest) -> str:
    if not cluster.is_rig:
        pytest.skip("needs fake nodes")
    names = rig.add_fake_nodes(settings.default_places(), COUNT // 100 + 1, gpus=0, product="none", prefix=namespace)
    request.addfinalizer(lambda: cluster.kubectl("delete", "node", *names))
    return namespace


def one(name: str, namespace: str) -> dict[str, Any]:
    scheduling = {"nodeSelector": {"type": "kwok"}, "tolerations": [{"operator": "Exists"}]}
    body = toy("example.com/none:1", name=name, scheduling=scheduling)
    body["metadata"]["namespace"] = namespace
    return body


def test_a_crowd_is_served(cluster: Cluster, crowd: str, operator: Any) -> None:
    api = Api(settings.default_places())
    path = f"/apis/octavo.dev/v1alpha1/namespaces/{crowd}/llmdeployments"
    operator.restart(OCTAVO_LEASE_SECONDS="15")
    names = [f"m-{number}" for number in range(COUNT)]
    start = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: api.call("POST", path, one(name, crowd)), names))
    made = time.monotonic() - start

    def all_ready() -> bool:
        items = api.call("GET", path)["items"]
        ready = [
            c["status"] for item in items for c in item.get("status", {}).get("conditions", []) if c["type"] == "Ready"
        ]
        return ready.count("True") == COUNT

    eventually(all_ready, 60 + COUNT / 2, every=2)
    served = time.monotonic() - start

    # From a change of a spec to its children, one after the other.
    waited = []
    for name in random.Random(0).sample(names, SAMPLES):
        api.call("PATCH", f"{path}/{name}", {"spec": {"service": {"port": 81}}}, "application/merge-patch+json")
        changed = time.monotonic()
        where = f"/api/v1/namespaces/{crowd}/services/{name}"
        while api.call("GET", where)["spec"]["ports"][0]["port"] != 81:
            assert time.monotonic() - changed < 10
            time.sleep(0.01)
        waited.append(time.monotonic() - changed)
    p99 = sorted(waited)[int(len(waited) * 0.99) - 1]
    status = Path(f"/proc/{operator.process.pid}/status").read_text()
    rss = next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmRSS"))
    print(
        f"{COUNT} made in {made:.1f} s, ready after {served:.1f} s; change p99 {p99 * 1000:.0f} ms; operator "
        f"{rss:.0f} MiB"
    )
    assert p99 < 2
    assert rss < 300

    time.sleep(3)
    since = cluster.audit_log.stat().st_size
    time.sleep(5)
    with cluster.audit_log.open() as log:
        log.seek(since)
        entries = [json.loads(line) for line in log]
    noise = [
        entry["requestURI"]
        for entry in entries
        if entry["user"]["username"] == operator.user
        and entry["verb"] in ("create", "update", "patch", "delete")
        and entry["objectRef"]["resource"] != "leases"
    ]
    assert noise == []
