"""Replicas that are groups of pods: what is made for them, and what is seen of them."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.llmd import parsed
from support.worlds import world

from octavo.cli import serve
from octavo_operator.config import OperatorConfig
from octavo_operator.deployment.reconcile import Outcome, reconcile
from octavo_operator.kube.client import ApiError
from octavo_operator.kube.store import Observed, Store
from octavo_operator.observed.workload import Workload
from octavo_operator.render import render
from octavo_operator.render.restricted import violations
from octavo_operator.render.workload import KIND, expected_workload
from octavo_operator.writes.apply import Applier
from octavo_operator.writes.plan import Apply, CreateToken, Delete, Evict, Plan

Json = dict[str, Any]
CONFIG = OperatorConfig(engine_image="example.com/engine:1")
APIS = frozenset({KIND, "PodMonitor", "ServiceMonitor", "InferencePool"})
GROUPED: Json = {"parallelism": {"tensor": 2, "nodes": 2}, "replicas": 2}

grouped = st.fixed_dictionaries(
    {"parallelism": st.integers(2, 8).map(lambda nodes: {"tensor": nodes, "nodes": nodes})},
    optional={
        "routing": st.sampled_from([{"strategy": "prefix"}, {"strategy": "clientIP"}]),
        "monitoring": st.sampled_from([{"kind": "PodMonitor"}, {"kind": "ServiceMonitor"}]),
        "inferencePool": st.just({"endpointPickerRef": {"name": "epp"}}),
        "autoscaling": st.just({"maxReplicas": 3}),
        "rollout": st.sampled_from([{}, {"type": "RollingUpdate", "maxUnavailable": 2}]),
        "networkPolicy": st.sampled_from([{}, {"egress": []}, {"enabled": False}]),
        "scheduling": st.just({"topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone"}]}),
        "auth": st.just({"apiKeySecretRef": {"name": "keys"}}),
    },
)


@functools.cache
def engine_flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(exit_on_error=False)
    serve.add_arguments(parser)
    return parser


def templates(manifests: list[Json]) -> tuple[Json, Json]:
    (found,) = [one for one in manifests if one["kind"] == KIND]
    made = found["spec"]["leaderWorkerTemplate"]
    return made["leaderTemplate"], made["workerTemplate"]


def selectors(value: Any, path: str = "") -> list[tuple[str, Json]]:
    """Every selector of pods in an object, but those of peers of policies."""
    if isinstance(value, list):
        return [found for one in value for found in selectors(one, path)]
    if not isinstance(value, dict) or path.endswith(("/from", "/to")):
        return []
    own = [value["matchLabels"]] if "matchLabels" in value else []
    if path == "/spec/selector" and "matchLabels" not in value:
        own = [value]
    return [(path, one) for one in own] + [
        found for key, inner in value.items() for found in selectors(inner, f"{path}/{key}")
    ]


@given(grouped)
def test_leaders_alone_are_found_by_whatever_looks_for_pods_that_serve(spec: Json) -> None:
    manifests = render(parsed(**spec), CONFIG, apis=APIS)
    leader, worker = (one["metadata"]["labels"] for one in templates(manifests))
    looked = 0
    for manifest in manifests:
        if manifest["kind"] == KIND or manifest["metadata"]["name"] == "toy-group":
            continue
        for _, wanted in selectors(manifest):
            looked += leader.items() >= wanted.items()
            about_pods = manifest["kind"] not in ("ServiceMonitor", "HorizontalPodAutoscaler")
            assert not about_pods or not worker.items() >= wanted.items(), manifest
    assert looked >= 2


@given(grouped)
def test_pods_of_groups_are_restricted_and_nodes_of_one_engine(spec: Json) -> None:
    deployment = parsed(**spec)
    nodes = deployment.spec.parallelism.nodes
    for index, template in enumerate(templates(render(deployment, CONFIG, apis=APIS))):
        assert list(violations(template, "toy")) == []
        (engine,) = template["spec"]["containers"]
        values = {"LWS_WORKER_INDEX": str(index), "LWS_LEADER_ADDRESS": "toy-group-0.toy-group.default"}
        values |= {one["name"]: "10.0.0.9" for one in engine["env"] if "fieldRef" in one.get("valueFrom", {})}
        args = [next((v for k, v in values.items() if f"$({k})" == one), one) for one in engine["args"]]
        read = engine_flags().parse_args(args)
        assert (read.nnodes, read.node_rank, getattr(read, "headless", False)) == (nodes, index, bool(index))
        assert read.master_addr == ["10.0.0.9", "toy-group-0.toy-group.default"][index]
        assert read.tensor_parallel_size == nodes
        token = next(one for one in engine["env"] if one["name"] == "OCTAVO_CLUSTER_TOKEN")
        assert token["valueFrom"]["secretKeyRef"] == {"name": "toy-cluster-token", "key": "token"}
        assert ("OCTAVO_API_KEY" in [one["name"] for one in engine["env"]]) is (not index and "auth" in spec)
        ports = [one["name"] for one in engine["ports"]]
        assert ports == (["management"] if index else ["http", "management", "group"])
        assert engine["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "management", "scheme": "HTTP"}
        assert ("lifecycle" in engine) is not bool(index)


@given(grouped)
def test_the_way_into_a_group_is_open_to_its_pods_alone(spec: Json) -> None:
    manifests = render(parsed(**spec), CONFIG, apis=APIS)
    leader, worker = templates(manifests)
    policies = [one["spec"] for one in manifests if one["kind"] == "NetworkPolicy"]
    if not policies:
        return
    port = next(one for one in leader["spec"]["containers"][0]["ports"] if one["name"] == "group")["containerPort"]
    assert f"{port}" in leader["spec"]["containers"][0]["args"]
    peers = []
    for policy in policies:
        if leader["metadata"]["labels"].items() >= policy["podSelector"]["matchLabels"].items():
            for rule in policy["ingress"]:
                assert rule.get("ports"), "no rule opens all ports of a leader"
                if {"port": "group", "protocol": "TCP"} in rule["ports"]:
                    peers += rule["from"]
    assert [one["podSelector"]["matchLabels"] for one in peers] == [
        {
            name: worker["metadata"]["labels"][name]
            for name in ("octavo.dev/llmdeployment", "app.kubernetes.io/component")
        }
    ]
    closed = [
        one for one in policies if worker["metadata"]["labels"].items() >= one["podSelector"]["matchLabels"].items()
    ]
    assert len(closed) == 1
    assert all(rule["from"] for rule in closed[0]["ingress"]), "nobody else reaches the others"
    if "egress" in spec.get("networkPolicy", {}):
        allowed = [peer["podSelector"]["matchLabels"] for rule in closed[0]["egress"] for peer in rule.get("to", [])]
        assert any(leader["metadata"]["labels"].items() >= one.items() for one in allowed)


def test_groups_are_replaced_one_by_one_unless_the_spec_says_how() -> None:
    def strategy(**rollout: Any) -> Json:
        spec = expected_workload(parsed(**GROUPED, rollout=rollout), pod_template())["spec"]["rolloutStrategy"]
        found: Json = spec["rollingUpdateConfiguration"]
        return found

    assert strategy() == {"partition": 0, "maxSurge": 0, "maxUnavailable": 1}
    assert strategy(type="RollingUpdate", maxSurge=1) == {"partition": 0, "maxSurge": 1, "maxUnavailable": 0}
    assert strategy(type="RollingUpdate", maxUnavailable="50%") == {
        "partition": 0,
        "maxSurge": 0,
        "maxUnavailable": "50%",
    }
    assert strategy(type="RollingUpdate") == strategy()


def pod_template() -> Json:
    made = render(parsed(), CONFIG)
    found: Json = next(one for one in made if one["kind"] == "Deployment")["spec"]["template"]
    return found


# What is observed.


def pod(name: str, template: Json, index: int, *, ready: bool = True, leaving: bool = False) -> Json:
    meta = template["metadata"]
    labels = {**meta["labels"], "leaderworkerset.sigs.k8s.io/group-index": str(index)}
    stamp = {"deletionTimestamp": "2026-01-01T00:00:00Z"} if leaving else {}
    conditions = [
        {"type": kind, "status": status, "lastTransitionTime": "2026-01-01T00:00:00Z"}
        for kind, status in (("PodScheduled", "True"), ("Ready", str(ready)))
    ]
    return {
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": name,
            "resourceVersion": "1",
            "labels": labels,
            "annotations": meta.get("annotations", {}),
            "creationTimestamp": "2026-01-01T00:00:00Z",
            **stamp,
        },
        "spec": template["spec"],
        "status": {"phase": "Running", "conditions": conditions},
    }


def alive(manifest: Json, version: str = "1") -> Observed:
    meta = {**manifest["metadata"], "uid": manifest["metadata"]["name"], "resourceVersion": version, "generation": 1}
    return Observed.of(manifest["kind"], manifest["apiVersion"], {**manifest, "metadata": meta})


def group(manifest: Json, index: int, **more: Any) -> list[Json]:
    made = manifest["spec"]["leaderWorkerTemplate"]
    leader = pod(f"toy-group-{index}", made["leaderTemplate"], index, **more)
    return [leader, *(pod(f"toy-group-{index}-{n}", made["workerTemplate"], index) for n in range(1, made["size"]))]


def look(spec: Json, *children: Observed, apis: frozenset[str] = APIS, now: float = 0.0) -> Outcome:
    return reconcile(parsed(**spec), world(list(children), now=now, apis=apis), CONFIG)


def applied(outcome: Outcome, kind: str) -> Json:
    found: Json = next(
        one.manifest for one in outcome.plan.actions if isinstance(one, Apply) and one.manifest["kind"] == kind
    )
    return found


def reason(outcome: Outcome, kind: str) -> tuple[str, str]:
    assert outcome.status
    found = next(one for one in outcome.status["conditions"] if one["type"] == kind)
    return found["status"], found["reason"]


def test_a_replica_counts_when_its_whole_group_is_ready_and_of_the_latest_template() -> None:
    first = look(GROUPED)
    made = applied(first, KIND)
    live = alive(made)
    ready = [Observed.of("Pod", "v1", one) for index in (0, 1) for one in group(made, index)]
    serving = look(GROUPED, live, *ready)
    assert serving.status
    assert [serving.status[name] for name in ("replicas", "readyReplicas", "availableReplicas", "updatedReplicas")] == [
        2
    ] * 4
    assert reason(serving, "Ready") == ("True", "Ready")
    assert serving.status["selector"] == "app.kubernetes.io/component=engine,octavo.dev/llmdeployment=toy"
    assert serving.status["image"] == "example.com/engine:1"

    lame = [Observed.of("Pod", "v1", one) for one in (*group(made, 0), group(made, 1)[0])]
    halting = look(GROUPED, live, *lame)
    assert halting.status and halting.status["readyReplicas"] == 1
    assert reason(halting, "Ready")[0] == "False"
    assert reason(halting, "Available")[0] == "True"

    going = [Observed.of("Pod", "v1", one) for one in (*group(made, 0), *group(made, 1, leaving=True))]
    status = look(GROUPED, live, *going).status
    assert status and (status["replicas"], status["readyReplicas"]) == (1, 1)

    changed = {**GROUPED, "engine": {"maxNumSeqs": 3}}
    newer = applied(look(changed, live, *ready), KIND)
    rolling = look(changed, alive(newer, "2"), *ready)
    assert rolling.status and rolling.status["updatedReplicas"] == 0
    assert reason(rolling, "Progressing")[0] == "True"


def test_pods_that_serve_nothing_are_diagnosed_all_the_same() -> None:
    made = applied(look(GROUPED), KIND)
    pods = [*group(made, 0), *group(made, 1)]
    waiting = {"reason": "ImagePullBackOff", "message": "no such image"}
    pods[-1]["status"] = {
        "phase": "Pending",
        "containerStatuses": [{"name": "engine", "image": "x", "state": {"waiting": waiting}}],
    }
    outcome = look(GROUPED, alive(made), *(Observed.of("Pod", "v1", one) for one in pods))
    assert reason(outcome, "Degraded") == ("True", "ImagePullBackOff")


def test_nothing_is_made_without_the_kind_and_running_pods_stay() -> None:
    without = APIS - {KIND}
    nothing = look(GROUPED, apis=without)
    assert nothing.plan.actions == []
    assert reason(nothing, "Degraded") == ("True", "LeaderWorkerSetNotInstalled")
    assert reason(nothing, "Available") == ("False", "LeaderWorkerSetNotInstalled")
    one = {"replicas": 2}
    manifests = [action.manifest for action in look(one).plan.actions if isinstance(action, Apply)]
    live = [alive(manifest) for manifest in manifests]
    grown = look({**one, **GROUPED}, *live, apis=without)
    kinds = {action.manifest["kind"] for action in grown.plan.actions if isinstance(action, Apply)}
    assert not kinds & {"Deployment", KIND, "StatefulSet"}
    assert not [action for action in grown.plan.actions if isinstance(action, Delete | CreateToken)]
    assert reason(grown, "Degraded") == ("True", "LeaderWorkerSetNotInstalled")
    scaled = look({**GROUPED, "replicas": 3}, *live, apis=without)
    assert applied(scaled, "Deployment")["spec"]["replicas"] == 3, "what runs still follows replicas"
    installed = look({**one, **GROUPED}, *live)
    assert applied(installed, KIND)["spec"]["replicas"] == 2
    (gone,) = [action.target.kind for action in installed.plan.actions if isinstance(action, Delete)]
    assert gone == "Deployment"


def test_a_replica_of_one_pod_again_is_a_deployment() -> None:
    first = look(GROUPED)
    live = [alive(one.manifest) for one in first.plan.actions if isinstance(one, Apply)]
    back = look({"replicas": 2}, *live)
    assert applied(back, "Deployment")["spec"]["replicas"] == 2
    gone = {(one.target.kind, one.target.name) for one in back.plan.actions if isinstance(one, Delete)}
    assert gone == {(KIND, "toy-group"), ("NetworkPolicy", "toy-group")}


def test_another_version_of_the_operator_replaces_no_group() -> None:
    made = applied(look(GROUPED), KIND)
    newer = OperatorConfig(engine_image="example.com/engine:2")
    outcome = reconcile(parsed(**GROUPED), world([alive(made)], apis=APIS), newer)
    assert not [one for one in outcome.plan.actions if isinstance(one, Apply) and one.manifest["kind"] == KIND]


def died(body: Json, code: int, words: str, *, reason: str = "Error") -> Json:
    """A pod that LeaderWorkerSet deletes since its container has ended once: it runs again, and is ready."""
    ended = {"exitCode": code, "reason": reason, "message": words}
    state = {
        "name": "engine",
        "restartCount": 1,
        "ready": True,
        "state": {"running": {}},
        "lastState": {"terminated": ended},
    }
    body["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    body["status"]["containerStatuses"] = [state]
    return body


def test_why_a_group_ended_is_told_until_it_serves_again() -> None:
    made = applied(look(GROUPED), KIND)
    live, (leader, worker) = alive(made), group(made, 1)
    first = [Observed.of("Pod", "v1", one) for one in group(made, 0)]
    going = [Observed.of("Pod", "v1", one) for one in (leader, died(worker, 1, "octavo: no such flag --x"))]
    ended = look(GROUPED, live, *first, *going)
    assert reason(ended, "Degraded") == ("True", "CrashLoop")
    assert ended.status and "no such flag --x" in str(ended.status["conditions"])

    def later(*pods: Json, generation: int = 1) -> tuple[str, str]:
        deployment = dataclasses.replace(parsed(**GROUPED), status=ended.status, generation=generation)
        seen = [live, *first, *(Observed.of("Pod", "v1", one) for one in pods)]
        return reason(reconcile(deployment, world(seen, apis=APIS), CONFIG), "Degraded")

    assert later() == ("True", "CrashLoop"), "its successor is not there yet"
    assert later(*group(made, 1)) == ("False", "AsExpected")
    assert later(generation=2) == ("False", "AsExpected"), "another spec may be better"


# The token.


class SecretsOnly:
    """An API server that takes Secrets, and forbids to read them."""

    def __init__(self, status: int = 201) -> None:
        self.status, self.bodies = status, []  # type: ignore[var-annotated]

    async def call(self, method: str, path: str, body: Any = None, **_: Any) -> Any:
        assert (method, path) == ("POST", "/api/v1/namespaces/default/secrets"), "nothing else is allowed"
        self.bodies.append(body)
        if self.status != 201:
            raise ApiError(self.status, {"message": "no", "reason": "AlreadyExists"})
        return body


def tokens(server: SecretsOnly) -> list[Any]:
    (action,) = [one for one in look(GROUPED).plan.actions if isinstance(one, CreateToken)]
    plan = Plan([action])

    async def run() -> list[Any]:
        applier = Applier(server, Store(), lambda: True)  # type: ignore[arg-type]
        return [error for _ in range(2) for error in await applier.execute(parsed(**GROUPED), plan)]

    return asyncio.run(run())


def test_a_token_is_made_at_random_for_each_and_told_to_nobody(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    server = SecretsOnly()
    assert tokens(server) == []
    made = [body["stringData"]["token"] for body in server.bodies]
    assert len(set(made)) == 2 and min(map(len, made)) >= 32
    assert server.bodies[0]["metadata"]["ownerReferences"][0]["name"] == "toy"
    assert not [token for token in made if token in caplog.text]


def test_a_token_that_is_there_stays() -> None:
    assert tokens(SecretsOnly(409)) == []
    (first, _) = tokens(SecretsOnly(403))
    assert first.status == 403


def test_a_token_is_made_before_groups_are_and_again_when_somebody_deletes_it() -> None:
    first = look(GROUPED)
    assert isinstance(first.plan.actions[0], CreateToken)
    made = applied(first, KIND)
    assert "token" not in str(first.plan.actions[0].manifest.keys())
    pods = group(made, 0)
    live = [alive(one.manifest) for one in first.plan.actions if isinstance(one, Apply)]
    quiet = look(GROUPED, *live, *(Observed.of("Pod", "v1", one) for one in pods))
    assert not [one for one in quiet.plan.actions if isinstance(one, CreateToken)]
    message = 'secret "toy-cluster-token" not found'
    waiting = {"waiting": {"reason": "CreateContainerConfigError", "message": message}}
    pods[1]["status"]["containerStatuses"] = [{"name": "engine", "state": waiting}]
    again = look(GROUPED, *live, *(Observed.of("Pod", "v1", one) for one in pods))
    assert isinstance(again.plan.actions[0], CreateToken)


def test_a_deployments_numbers_are_its_own() -> None:
    status = {"observedGeneration": 3, "replicas": 2, "readyReplicas": 2, "availableReplicas": 1, "updatedReplicas": 2}
    live = {"kind": "Deployment", "metadata": {"generation": 3}, "spec": {"replicas": 2}, "status": status}
    seen = Workload.of(live)
    assert (seen.replicas, seen.ready, seen.available, seen.updated, seen.is_complete) == (2, 2, 1, 2, False)
    status["availableReplicas"] = 2
    assert Workload.of(live).is_complete
    live["metadata"]["generation"] = 4
    assert not Workload.of(live).is_complete


class OnePod:
    """An API server that evicts, and has nothing else to say."""

    def __init__(self, status: int = 201) -> None:
        self.status, self.asked = status, []  # type: ignore[var-annotated]

    async def call(self, method: str, path: str, body: Any = None, **_: Any) -> Any:
        self.asked.append((method, path, body["deleteOptions"]["preconditions"]["uid"]))
        if self.status != 201:
            raise ApiError(self.status, {"message": "no"})
        return {}


@pytest.mark.parametrize(("status", "errors"), [(201, 0), (404, 0), (409, 0), (429, 1), (403, 1)])
def test_a_pod_is_evicted_if_it_is_still_the_one(status: int, errors: int) -> None:
    server = OnePod(status)
    leader = group(applied(look(GROUPED), KIND), 0)[0]

    async def run() -> int:
        applier = Applier(server, Store(), lambda: True)  # type: ignore[arg-type]
        try:
            return len(await applier.execute(parsed(**GROUPED), Plan([Evict(leader)])))
        except ApiError:  # the server is overloaded, or a budget forbids it: later
            return 1

    assert asyncio.run(run()) == errors
    assert server.asked == [("POST", "/api/v1/namespaces/default/pods/toy-group-0/eviction", "toy-group-0")]
