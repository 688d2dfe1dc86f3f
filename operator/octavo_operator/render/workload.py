"""Render the workload of the engine's pods: a Deployment, or, where a replica is a group of pods, a LeaderWorkerSet.

The leader of a group is a pod as that of a Deployment, with the engine's node 0; the others run the same container as
its other nodes, which serve nothing. They have a component of their own, so whatever selects the engine's pods (the
Services, routers, budgets, monitors, /scale) finds leaders alone. A change of what is made of the template here would
replace the groups of users at an upgrade of the operator.
"""

from __future__ import annotations

import copy
from typing import Any

from octavo_operator.api import GROUP, OWNER_LABEL, LLMDeployment
from octavo_operator.diff import digest
from octavo_operator.render import names
from octavo_operator.render.deployment import expected_deployment

Json = dict[str, Any]

KIND = "LeaderWorkerSet"
API_VERSION = "leaderworkerset.x-k8s.io/v1"
INDEX_LABEL = "leaderworkerset.sigs.k8s.io/group-index"  # of all pods of a group
TEMPLATE_HASH = f"{GROUP}/template-hash"  # annotation of the pods: no status says which change its counts are about
_EXCLUSIVE = "leaderworkerset.sigs.k8s.io/exclusive-topology"
_LEADERS_ONLY = ("OCTAVO_API_KEY", "OCTAVO_REPLICA_ADDRESS")  # variables


def is_grouped(deployment: LLMDeployment, apis: frozenset[str]) -> bool:
    """True if its replicas are groups of pods. Where the kind is not installed (`apis`), what runs stays as it is."""
    return deployment.spec.parallelism.nodes > 1 and KIND in apis


def expected_workload(
    deployment: LLMDeployment,
    template: Json,
    unavailable: int | None = None,
    held: int = 0,
    apis: frozenset[str] = frozenset({KIND}),
) -> Json:
    """The Deployment, or with parallelism.nodes above 1 the LeaderWorkerSet. `unavailable`: see expected_deployment;
    `held`: groups that are not to run, for want of room; `apis`: optional kinds that the cluster has."""
    if not is_grouped(deployment, apis):
        return expected_deployment(deployment, template, unavailable)
    nodes = deployment.spec.parallelism.nodes
    body = {
        "replicas": max(deployment.replicas - held, 0),
        "startupPolicy": "LeaderCreated",
        "networkConfig": {"subdomainPolicy": "Shared"},
        "rolloutStrategy": {"type": "RollingUpdate", "rollingUpdateConfiguration": _rollout(deployment)},
        "leaderWorkerTemplate": {
            "size": nodes,
            "restartPolicy": "RecreateGroupOnPodRestart",
            "leaderTemplate": _leader(template, nodes),
            "workerTemplate": _worker(template, nodes),
        },
    }
    out = names.manifest(deployment, API_VERSION, KIND, {"spec": body}, names.group(deployment.name))
    if key := deployment.spec.scheduling.group_topology_key:
        out["metadata"]["annotations"] = {_EXCLUSIVE: key}
    return out


def _rollout(deployment: LLMDeployment) -> Json:
    """Return the rollout settings. With Auto a group ends before its successor begins: room for one more whole group is
    not to be expected."""
    rollout = deployment.spec.rollout
    if rollout.type == "Auto":
        return {"partition": 0, "maxSurge": 0, "maxUnavailable": 1}
    surge, missing = rollout.max_surge or 0, rollout.max_unavailable
    if missing is None:
        missing = 1 if str(surge) in ("0", "0%") else 0
    return {"partition": 0, "maxSurge": surge, "maxUnavailable": missing}


def _leader(template: Json, nodes: int) -> Json:
    out = _member(template, nodes, ["--node-rank", "0", "--master-addr", "$(OCTAVO_POD_IP)"])
    engine = _engine(out)
    engine["env"] = [
        *engine.get("env", []),
        {"name": "OCTAVO_POD_IP", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}}},
    ]
    engine["ports"] = [
        *engine.get("ports", []),
        {"name": "group", "containerPort": names.GROUP_PORT, "protocol": "TCP"},
    ]
    return out


def _worker(template: Json, nodes: int) -> Json:
    """A worker of a group. The engine retries until the leader's name resolves; the worker answers probes."""
    rank = ["--node-rank", "$(LWS_WORKER_INDEX)", "--master-addr", "$(LWS_LEADER_ADDRESS)", "--headless"]
    out = _member(template, nodes, rank)
    out["metadata"]["labels"][names.COMPONENT_LABEL] = names.WORKER
    out["spec"].pop("topologySpreadConstraints", None)  # of replicas, which leaders stand for
    engine = _engine(out)
    engine.pop("lifecycle", None)  # it has no clients to wait for
    engine["ports"] = [one for one in engine.get("ports", []) if one.get("name") != "http"]
    engine["env"] = [one for one in engine["env"] if one["name"] not in _LEADERS_ONLY]
    return out


def _member(template: Json, nodes: int, rank: list[str]) -> Json:
    out = copy.deepcopy(template)
    out["metadata"]["annotations"] = {**out["metadata"].get("annotations", {}), TEMPLATE_HASH: digest(template)}
    engine = _engine(out)
    engine["args"] = [*engine.get("args", []), "--nnodes", str(nodes), *rank, "--master-port", str(names.GROUP_PORT)]
    secret = {"name": names.cluster_token(_owner(template)), "key": names.TOKEN_KEY}
    token = {"name": "OCTAVO_CLUSTER_TOKEN", "valueFrom": {"secretKeyRef": secret}}
    engine["env"] = [one for one in engine.get("env", []) if one["name"] != token["name"]] + [token]
    return out


def _owner(template: Json) -> str:
    name: str = template["metadata"]["labels"][OWNER_LABEL]
    return name


def _engine(template: Json) -> Json:
    found: Json = next(one for one in template["spec"]["containers"] if one["name"] == names.ENGINE)
    return found
