"""Pods that the cluster refuses to make: each way of refusing has its reason, for engines, routers and groups alike."""

from __future__ import annotations

from typing import Any

import pytest
from support.llmd import parsed
from support.worlds import gateway_world, world

from octavo_operator.api import API_VERSION
from octavo_operator.api import gateway as api
from octavo_operator.api.gateway import LLMGateway
from octavo_operator.config import OperatorConfig
from octavo_operator.deployment.reconcile import Outcome, reconcile
from octavo_operator.gateway.reconcile import reconcile as reconcile_gateway
from octavo_operator.kube.store import Observed
from octavo_operator.observed.hanging import pod_controllers
from octavo_operator.render import names
from octavo_operator.writes.plan import Apply

Json = dict[str, Any]
CONFIG = OperatorConfig()
WORDS = [
    ('pods "x" is forbidden: exceeded quota: q, requested: pods=1, used: pods=1, limited: pods=1', "QuotaExceeded"),
    ('pods "x" is forbidden: failed quota: q: must specify limits.cpu for: router', "QuotaExceeded"),
    ('pods "x" is forbidden: violates PodSecurity "restricted:latest": privileged', "PodSecurityViolation"),
    ('pods "x" is forbidden: maximum memory usage per Container is 1Gi, but limit is 2Gi', "LimitRangeViolated"),
    ('pods "x" is forbidden: minimum cpu usage per Pod is 2, but request is 1', "LimitRangeViolated"),
    ("memory max limit to request ratio per Container is 1, but provided ratio is 8.0", "LimitRangeViolated"),
    ('admission webhook "policy.example.com" denied the request: no', "Forbidden"),
    ("ValidatingAdmissionPolicy 'p' with binding 'b' denied request: no", "Forbidden"),
    ('Internal error occurred: failed calling webhook "policy.example.com": timed out', "WebhookUnavailable"),
    ('pods "x" is forbidden: error looking up service account n/x: not found', "ServiceAccountNotFound"),
    ('pods "x" is forbidden: no PriorityClass with name high was found', "PriorityClassNotFound"),
    ('pods "x" is forbidden: pod rejected: RuntimeClass "kata" not found', "RuntimeClassNotFound"),
    ("a reason of tomorrow", "PodsNotCreated"),
]


def observed(manifest: Json, **status: Any) -> Observed:
    meta = {**manifest["metadata"], "uid": manifest["kind"], "resourceVersion": "1", "generation": 1}
    return Observed.of(manifest["kind"], manifest["apiVersion"], {**manifest, "metadata": meta, "status": status})


def carried_out(outcome: Outcome, refused: str, message: str) -> list[Observed]:
    """What a first reconciliation makes, with the Deployment `refused` as one whose pods are not made."""
    failure = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": message}
    objects = [one.manifest for one in outcome.plan.actions if isinstance(one, Apply)]
    return [
        observed(one, **({"conditions": [failure]} if one["metadata"]["name"] == refused else {})) for one in objects
    ]


def conditions(outcome: Outcome) -> dict[str, Json]:
    assert outcome.status is not None
    return {one["type"]: one for one in outcome.status["conditions"]}


@pytest.mark.parametrize(("message", "reason"), WORDS)
def test_routers_of_a_gateway(message: str, reason: str) -> None:
    metadata = {"name": "all", "namespace": "default", "uid": "u", "generation": 1}
    gateway = LLMGateway.from_json({"apiVersion": API_VERSION, "kind": api.KIND, "metadata": metadata, "spec": {}})
    first = reconcile_gateway(gateway, gateway_world(), CONFIG)
    found = conditions(reconcile_gateway(gateway, gateway_world(carried_out(first, "all-router", message)), CONFIG))
    for kind, status in (("Ready", "False"), ("Degraded", "True")):
        assert (found[kind]["status"], found[kind]["reason"]) == (status, reason)
        assert message in found[kind]["message"]
    if reason == "QuotaExceeded":
        assert "routing.resources" in found["Ready"]["message"], "the field that sets them is named"


@pytest.mark.parametrize(("message", "reason"), WORDS)
def test_routers_of_an_llmdeployment(message: str, reason: str) -> None:
    deployment = parsed(routing={"strategy": "prefix"})
    first = reconcile(deployment, world(), CONFIG)
    found = conditions(reconcile(deployment, world(carried_out(first, "toy-router", message)), CONFIG))
    assert (found["RouterReady"]["status"], found["RouterReady"]["reason"]) == ("False", reason)
    assert found["Degraded"]["reason"] == "RouterNotReady" and message in found["Degraded"]["message"]


@pytest.mark.parametrize(("message", "reason"), WORDS)
def test_engines(message: str, reason: str) -> None:
    first = reconcile(parsed(), world(), CONFIG)
    found = conditions(reconcile(parsed(), world(carried_out(first, "toy", message)), CONFIG))
    assert {found[kind]["reason"] for kind in ("Ready", "Available", "Degraded")} == {reason}


def failed(message: str, seconds: int = 5, reason: str = "FailedCreate") -> Json:
    return {"type": "Warning", "reason": reason, "message": message, "lastTimestamp": f"2026-01-01T00:00:{seconds:02}Z"}


@pytest.mark.parametrize(("message", "reason"), WORDS)
def test_groups(message: str, reason: str) -> None:
    deployment, apis = parsed(parallelism={"nodes": 2, "tensor": 2}), frozenset({"LeaderWorkerSet"})
    objects = carried_out(reconcile(deployment, world(apis=apis), CONFIG), "", "")
    (subject,) = pod_controllers(objects)
    assert subject.key == f"StatefulSet/{names.group('toy')}"
    assert subject.selector == f"involvedObject.kind=StatefulSet,involvedObject.name={names.group('toy')}"
    told = {subject.key: [failed(message)]}
    found = conditions(reconcile(deployment, world(objects, apis=apis, pod_events=told), CONFIG))
    assert {found[kind]["reason"] for kind in ("Ready", "Available", "Degraded")} == {reason}
    told[subject.key].append(failed("create Pod x-0", 6, "SuccessfulCreate"))
    found = conditions(reconcile(deployment, world(objects, apis=apis, pod_events=told), CONFIG))
    assert found["Degraded"]["status"] == "False", "the last attempt counts"


def test_workers_of_a_group_are_made_by_a_set_of_the_leaders_name() -> None:
    deployment, apis = parsed(parallelism={"nodes": 2, "tensor": 2}), frozenset({"LeaderWorkerSet"})
    objects = carried_out(reconcile(deployment, world(apis=apis), CONFIG), "", "")
    group = names.group("toy")

    def pod(name: str, component: str) -> Observed:
        meta = {"name": name, "namespace": "default", "labels": names.labels(deployment, component)}
        return observed({"apiVersion": "v1", "kind": "Pod", "metadata": meta})

    leader, worker = pod(f"{group}-0", names.ENGINE), pod(f"{group}-0-1", names.WORKER)
    assert [one.key for one in pod_controllers([*objects, leader])] == [f"StatefulSet/{group}-0"]
    assert pod_controllers([*objects, leader, worker]) == []
