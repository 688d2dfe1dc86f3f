"""kill -9 at random points of random changes: the end is that of an undisturbed run.

OCTAVO_CHAOS=200 for the full number of changes (CI makes fewer).
"""

from __future__ import annotations

import copy
import json
import os
import random
import time
from typing import Any

import pytest
from clusterrig import settings
from clusterrig.fixtures import Cluster, eventually
from support.llmd import toy
from support.worlds import world

from octavo_operator.config import OperatorConfig
from octavo_operator.deployment.reconcile import parse, reconcile
from octavo_operator.diff import first_difference
from octavo_operator.kube.resources import CHILD_KINDS, OPTIONAL_KINDS

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

CHANGES = int(os.environ.get("OCTAVO_CHAOS", "25"))
NAMES = ("one", "two", "three")


def random_spec(rng: random.Random) -> dict[str, Any]:
    """Parts that come and go, values that change; no pod is started, so that the end is reached quickly."""
    choices: dict[str, list[Any]] = {
        "service": [{}, {"port": 81}, {"annotations": {"a": "b"}}, {"type": "NodePort"}],
        "routing": [{}, {"strategy": "clientIP"}],
        "networkPolicy": [{}, {"enabled": False}, {"egress": []}],
        "podDisruptionBudget": [{}, {"enabled": False}, {"minAvailable": "50%"}],
        "engine": [{}, {"env": [{"name": "A", "value": "1"}]}, {"env": [{"name": "B", "value": "2"}]}],
        "rollout": [{}, {"type": "Recreate"}, {"type": "RollingUpdate", "maxSurge": 2}],
        "scheduling": [{}, {"nodeSelector": {"a": "b"}}],
    }
    return {name: rng.choice(values) for name, values in choices.items()}


def test_the_end_is_that_of_an_undisturbed_run(cluster: Cluster, namespace: str, operator: Any) -> None:
    rng = random.Random(int(os.environ.get("OCTAVO_SEED", "7")))
    kills = 0
    for _ in range(CHANGES):
        body = toy(settings.TOOLBOX_IMAGE, name=rng.choice(NAMES), replicas=0, **copy.deepcopy(random_spec(rng)))
        body["metadata"]["namespace"] = namespace
        if rng.random() < 0.1:
            cluster.kubectl(
                "delete", "llmd", body["metadata"]["name"], "-n", namespace, "--ignore-not-found", "--timeout=20s"
            )
        else:
            done = cluster.try_kubectl("replace", "--force=false", "-f", "-", input=json.dumps(body))
            if done.returncode:
                cluster.kubectl("create", "-f", "-", input=json.dumps(body))
        if rng.random() < 0.2:
            kind = rng.choice(["service", "deployment", "networkpolicy"])
            cluster.kubectl("delete", kind, rng.choice(NAMES), "-n", namespace, "--ignore-not-found", "--wait=false")
        time.sleep(rng.random() * 0.3)
        if rng.random() < 0.4:
            operator.kill()
            kills += 1
            operator.start(patience=0)  # the next end may find it while it is starting
    eventually(operator.is_ready, 60)
    print(f"{CHANGES} changes, {kills} ends of the operator")
    eventually(lambda: not differences(cluster, namespace), 60, every=1)


def differences(cluster: Cluster, namespace: str) -> list[str]:
    """Where the namespace is not what an operator would make of its specs in one undisturbed step."""
    out = []
    expected = set()
    for item in cluster.get("llmd", namespace=namespace)["items"]:
        deployment = parse(item)
        desired = reconcile(deployment, world(now=time.time()), OperatorConfig()).plan.actions  # type: ignore[arg-type]
        if (item.get("status") or {}).get("observedGeneration") != item["metadata"]["generation"]:
            out.append(f"status of {item['metadata']['name']}")
        for action in desired:
            manifest = action.manifest  # type: ignore[union-attr]
            kind, name = manifest["kind"], manifest["metadata"]["name"]
            expected.add((kind, name))
            del manifest["metadata"]["annotations"]
            done = cluster.try_kubectl("get", kind, name, "-n", namespace, "-o", "json")
            live = json.loads(done.stdout) if not done.returncode else {}
            if where := first_difference(manifest, live):
                out.append(f"{kind} {name}: {where}")
            env = [v["name"] for v in deep(live, "spec", "template", "spec", "containers", 0, "env") or []]
            wanted = [v["name"] for v in deep(manifest, "spec", "template", "spec", "containers", 0, "env") or []]
            if env != wanted:
                out.append(f"{kind} {name}: {env}")
    kinds = ",".join(kind for kind in CHILD_KINDS if kind not in OPTIONAL_KINDS)
    found = cluster.get(kinds, namespace=namespace)["items"]
    ours = {(o["kind"], o["metadata"]["name"]) for o in found if o["metadata"].get("ownerReferences")}
    return out + [f"{kind} {name} is left over" for kind, name in ours - expected]


def deep(value: Any, *path: Any) -> Any:
    for part in path:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return None
    return value
