"""Routers come and go behind one Service: in which order, what stays as it is, and what is said of them."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
from support.llmd import manifest
from support.worlds import world

from octavo_operator import api
from octavo_operator.config import OperatorConfig
from octavo_operator.deployment.events import events
from octavo_operator.deployment.image_rollout import ImageTurn
from octavo_operator.deployment.reconcile import reconcile
from octavo_operator.deployment.routing import NOT_READY, OPEN_SECONDS
from octavo_operator.kube.resources import IMAGE_VOLUMES
from octavo_operator.kube.store import Observed
from octavo_operator.observed.diagnosis import Problem
from octavo_operator.render.names import PICKER, ROUTER
from octavo_operator.writes.plan import Apply, Delete

Json = dict[str, Any]
NOW = 1.9e9
LONG_AGO = "2026-01-01T00:00:00Z"
CONFIG = OperatorConfig(router_image="router:1")
APIS = frozenset({"PodMonitor", "ServiceMonitor", IMAGE_VOLUMES})
PREFIX = {"routing": {"strategy": "prefix"}}
ROUTES = {"ConfigMap toy-router", "NetworkPolicy toy-router", "Service toy-pods"}
ROUTERS = {"Deployment toy-router", "PodDisruptionBudget toy-router", "PodMonitor toy-router"}


class Cluster:
    """What the API server has of one LLMDeployment. Deployments have the pods that `available` says."""

    def __init__(self, **spec: Any) -> None:
        self.objects: dict[str, Json] = {}
        self.pods: list[Json] = []
        self.available = {"toy": 1, "toy-router": 0}
        self.now, self.config, self.generation = NOW, CONFIG, 0
        self.status: Json = {}
        self.turn: ImageTurn | None = None
        self.rejected: Problem | None = None
        self.change(**spec)

    def change(self, **spec: Any) -> None:
        self.spec, self.generation = spec, self.generation + 1

    def step(self) -> set[str]:
        """One reconciliation; what it wrote (and "-" what it deleted)."""
        body = manifest(**self.spec)
        body["metadata"] |= {"uid": "u", "generation": self.generation}
        deployment = api.LLMDeployment.from_json({**body, "status": self.status})
        seen = [self._observed(ref, one) for ref, one in self.objects.items()]
        seen += [Observed.of("Pod", "v1", pod) for pod in self.pods]
        outcome = reconcile(
            deployment, world(seen, now=self.now, apis=APIS, image_turn=self.turn, rejected=self.rejected), self.config
        )
        self.due = outcome.requeue_after
        wrote = set()
        for action in outcome.plan.actions:
            if isinstance(action, Apply):
                ref = f"{action.manifest['kind']} {action.manifest['metadata']['name']}"
                self.objects[ref] = copy.deepcopy(action.manifest)
                wrote.add(ref)
            elif isinstance(action, Delete):
                ref = f"{action.target.kind} {action.target.name}"
                del self.objects[ref]
                wrote.add(f"-{ref}")
        assert outcome.status is not None
        self.status = outcome.status
        return wrote

    def _observed(self, ref: str, body: Json) -> Observed:
        kind, name = ref.split()
        status = {}
        if kind == "Deployment":
            wanted = body["spec"]["replicas"]
            counts = dict.fromkeys(("replicas", "updatedReplicas", "readyReplicas"), wanted)
            status = {"status": {"observedGeneration": 1, **counts, "availableReplicas": self.available[name]}}
        meta = {**body["metadata"], "uid": ref, "generation": 1, "resourceVersion": "1"}
        return Observed.of(kind, body["apiVersion"], {**body, **status, "metadata": meta})

    def settle(self, *available: int) -> Cluster:
        """Reconciles, with so many routers, until there is nothing to write."""
        self.available["toy-router"] = available[0] if available else self.available["toy-router"]
        for _ in range(5):
            if not self.step():
                return self
        raise AssertionError("it writes and writes")

    @property
    def component(self) -> str:
        """Which pods the Service of clients selects."""
        return str(self.objects["Service toy"]["spec"]["selector"]["app.kubernetes.io/component"])

    @property
    def peers(self) -> Any:
        """Who may reach the API of the engine's pods."""
        return self.objects["NetworkPolicy toy"]["spec"]["ingress"][0].get("from")

    def condition(self, kind: str) -> tuple[str, str]:
        one = next(one for one in self.status["conditions"] if one["type"] == kind)
        return one["status"], one["reason"]


def router_pod(name: str = "r", ready: bool = False, state: Json | None = None, **more: Any) -> Json:
    labels = {"octavo.dev/llmdeployment": "toy", "app.kubernetes.io/component": ROUTER}
    meta = {
        "name": name,
        "namespace": "default",
        "uid": name,
        "resourceVersion": "1",
        "labels": labels,
        "creationTimestamp": LONG_AGO,
    }
    container = {"name": ROUTER, "ready": ready, "restartCount": 3, "state": state or {}, "image": "router:1", **more}
    return {"metadata": meta, "spec": {"containers": []}, "status": {"containerStatuses": [container]}}


GATEWAYS = {
    "podSelector": {
        "matchLabels": {"app.kubernetes.io/component": "router"},
        "matchExpressions": [{"key": "octavo.dev/llmgateway", "operator": "Exists"}],
    }
}
ROUTERS_ONLY = [
    {"podSelector": {"matchLabels": {"octavo.dev/llmdeployment": "toy", "app.kubernetes.io/component": ROUTER}}},
    GATEWAYS,
]


def test_there_and_back_without_a_moment_in_which_nobody_answers() -> None:
    cluster = Cluster()
    cluster.settle()
    before = copy.deepcopy(cluster.objects)
    cluster.change(**PREFIX)
    assert cluster.step() == ROUTES | ROUTERS, "the engine's Deployment is not touched"
    assert cluster.component == "engine", "no router serves yet"
    assert (cluster.condition("Available"), cluster.condition("Ready")) == (("True", "Serving"), ("False", NOT_READY))
    assert cluster.condition("RouterReady") == ("False", "Starting")

    cluster.available["toy-router"] = 1
    assert cluster.step() == {"Service toy"}
    assert cluster.component == ROUTER
    assert cluster.condition("RouterReady") == ("False", "Starting"), "one of two"
    cluster.settle(2)
    assert cluster.condition("Ready") == ("True", "Ready")
    assert cluster.peers is None, "clients still have connections to pods"
    assert cluster.due == OPEN_SECONDS
    cluster.now += OPEN_SECONDS
    assert cluster.step() == {"NetworkPolicy toy"}
    assert cluster.peers == ROUTERS_ONLY
    cluster.settle(0)
    assert cluster.component == ROUTER, "routers that fail are repaired, not gone around"
    assert cluster.condition("Available") == ("False", NOT_READY)
    cluster.settle(2)

    cluster.change()
    assert cluster.step() == {"NetworkPolicy toy", "Service toy"}, "routers stay until the Service selects the pods"
    assert cluster.component == "engine"
    assert cluster.due is not None
    assert cluster.due <= 2, "no watch tells of our own write"
    cluster.pods = [router_pod(ready=True)]
    assert cluster.step() == {f"-{one}" for one in ROUTERS}
    assert cluster.step() == set(), "routers that finish requests need the pods' names, and may reach them"
    cluster.pods = []
    assert cluster.step() == {f"-{one}" for one in ROUTES}
    assert cluster.settle().objects == before
    assert "RouterReady" not in [one["type"] for one in cluster.status["conditions"]]


def test_policies_let_routers_through_at_every_step() -> None:
    spec = {"networkPolicy": {"ingressFrom": [{"podSelector": {}}], "managementFrom": [{"namespaceSelector": {}}]}}
    cluster = Cluster(**spec)
    cluster.settle()
    assert cluster.peers == [{"podSelector": {}}, GATEWAYS]
    for change, available in ((PREFIX, 0), (PREFIX, 2), ({}, 2)):
        cluster.change(**change, **spec)
        cluster.available["toy-router"] = available
        cluster.pods = [router_pod(ready=True)]
        cluster.step()
        assert cluster.peers == [{"podSelector": {}}, *ROUTERS_ONLY]
        management = cluster.objects["NetworkPolicy toy"]["spec"]["ingress"][1]["from"]
        assert management[1:] == ROUTERS_ONLY, "their health checks"
    cluster.pods = []
    cluster.settle()
    assert cluster.peers == [{"podSelector": {}}, GATEWAYS]


def test_a_new_one_is_closed_from_the_start_and_serves_through_routers() -> None:
    cluster = Cluster(**PREFIX).settle()
    assert (cluster.component, cluster.peers) == (ROUTER, ROUTERS_ONLY)
    assert cluster.condition("Ready") == ("False", NOT_READY)
    assert cluster.settle(2).condition("Ready") == ("True", "Ready")
    cluster.change(**PREFIX, suspend=True)
    cluster.settle()
    assert cluster.objects["Deployment toy-router"]["spec"]["replicas"] == 0
    assert cluster.condition("RouterReady") == ("False", "Suspended")


def test_the_metrics_port_is_found_with_and_without_routers() -> None:
    spec = {"monitoring": {"kind": "ServiceMonitor"}}
    cluster = Cluster(**spec)

    def ports(name: str) -> set[str]:
        return {one["name"] for one in cluster.objects[f"Service {name}"]["spec"]["ports"]}

    cluster.settle()
    assert ports("toy") == {"http", "management"}
    cluster.change(**spec, **PREFIX)
    cluster.settle(2)
    assert (ports("toy"), ports("toy-pods")) == ({"http"}, {"http", "management"})
    assert {"ServiceMonitor toy", "PodMonitor toy-router"} <= cluster.objects.keys()


def test_another_operator_replaces_no_router(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(**PREFIX).settle(2)
    changed = {"envoy.yaml": "newer", "lds.yaml": "", "cds.yaml": "", "key.lua": ""}
    cluster.config = dataclasses.replace(CONFIG, router_image="router:2")
    monkeypatch.setattr("octavo_operator.deployment.reconcile.expected_files", lambda *_: changed)
    assert cluster.step() == set(), "files for another Envoy might be rejected by this one"
    cluster.objects["ConfigMap toy-router"]["data"]["key.lua"] = "theirs"
    assert cluster.step() == {"ConfigMap toy-router"}, "what others change is written anew"
    cluster.change(routing={"strategy": "prefix", "prefix": {"replicas": 3}})
    assert cluster.step() == {"Deployment toy-router"}
    found = cluster.objects["Deployment toy-router"]["spec"]
    image = found["template"]["spec"]["containers"][0]["image"]
    assert (found["replicas"], image) == (3, "router:1"), "more of the same"
    cluster.turn = ImageTurn("engine:2", True, ("default/other",))
    assert cluster.step() == set(), "it is not its turn"
    cluster.turn = ImageTurn("engine:2", False)
    assert cluster.step() == {"Deployment toy-router"}
    template = cluster.objects["Deployment toy-router"]["spec"]["template"]
    assert template["spec"]["containers"][0]["image"] == "router:2"


def test_a_change_of_what_is_routed_by_rolls_no_pod() -> None:
    cluster = Cluster(**PREFIX).settle(2)
    template = copy.deepcopy(cluster.objects["Deployment toy-router"]["spec"]["template"])
    cluster.change(routing={"strategy": "prefix", "prefix": {"replicas": 3, "loadFactor": 200, "keyBytes": 64}})
    assert cluster.step() == {"ConfigMap toy-router", "Deployment toy-router"}
    found = cluster.objects["Deployment toy-router"]["spec"]
    assert (found["replicas"], found["template"]) == (3, template)
    assert "200" in cluster.objects["ConfigMap toy-router"]["data"]["cds.yaml"]


WAITING = {"waiting": {"reason": "CrashLoopBackOff"}}
CRASHED = {"terminated": {"exitCode": 1, "message": "x"}}


@pytest.mark.parametrize(
    ("pod", "reason"),
    [
        (router_pod(state=WAITING, lastState=CRASHED), "CrashLoop"),
        (
            router_pod(
                state=WAITING,
                lastState={"terminated": {"exitCode": 1, "message": "error initializing configuration 'x': field"}},
            ),
            "ConfigRejected",
        ),
        (router_pod(state={"running": {"startedAt": LONG_AGO}}), "ConfigRejected"),
        (router_pod(state={"waiting": {"reason": "ImagePullBackOff"}}), "ImagePullBackOff"),
        (router_pod(state={"terminated": {"reason": "OOMKilled", "exitCode": 137}}), "OOMKilled"),
    ],
    ids=["crashes", "invalid", "does not listen", "no image", "no memory"],
)
def test_a_router_s_problem_is_reported_as_one_of_routers(pod: Json, reason: str) -> None:
    cluster = Cluster(**PREFIX).settle(2)
    cluster.pods = [pod]
    cluster.settle(1)
    assert cluster.condition("RouterReady") == ("False", reason)
    assert cluster.condition("Available") == ("True", "Serving"), "by the other router"
    assert (cluster.condition("Ready"), cluster.condition("Degraded")) == (("False", NOT_READY), ("True", NOT_READY))
    said = str(cluster.status["conditions"])
    assert "engine.image;" not in said
    assert reason != "ImagePullBackOff" or "router.image" in said
    assert reason != "OOMKilled" or "routing.prefix.resources.limits.memory" in said or "no limit" in said
    cluster.settle(0)
    assert cluster.condition("Available") == ("False", NOT_READY)


@pytest.mark.parametrize(
    ("pod", "message"),
    [
        (None, "at line 7"),
        (router_pod(state={"running": {"startedAt": LONG_AGO}}), "at line 7"),
        (router_pod(state={"terminated": {"reason": "OOMKilled", "exitCode": 137}}), "memory"),
    ],
    ids=["serves on", "does not listen", "something else"],
)
def test_routers_that_go_on_with_old_files_are_not_ready(pod: Json | None, message: str) -> None:
    cluster = Cluster(**PREFIX).settle(2)
    assert cluster.condition("Ready") == ("True", "Ready")
    cluster.rejected = Problem("ConfigRejected", "Envoy rejected its clusters at line 7")
    cluster.pods = [pod] if pod else []
    cluster.settle(2)
    (router,) = (one for one in cluster.status["conditions"] if one["type"] == "RouterReady")
    assert router["status"] == "False" and message in router["message"], "the words are Envoy's own"
    assert cluster.condition("Available") == ("True", "Serving")
    assert (cluster.condition("Ready"), cluster.condition("Degraded")) == (("False", NOT_READY), ("True", NOT_READY))
    cluster.rejected, cluster.pods = None, []
    cluster.settle(2)
    assert (cluster.condition("Ready"), cluster.condition("Degraded")[0]) == (("True", "Ready"), "False")


def test_routers_without_a_replica_say_so() -> None:
    cluster = Cluster(**PREFIX)
    cluster.available["toy"] = 0
    cluster.settle(2)
    assert cluster.condition("RouterReady") == ("False", "NoBackend")
    assert cluster.condition("Degraded") == ("False", "AsExpected")
    assert cluster.condition("Ready")[1] == "Starting", "the engine's own reason"


def test_at_zero_routers_hold_requests_and_nothing_is_wrong() -> None:
    zero = {**PREFIX, "autoscaling": {"minReplicas": 0, "maxReplicas": 2}}
    cluster = Cluster(**PREFIX, autoscaling={"maxReplicas": 2}).settle(2)
    cluster.change(**zero)
    assert {"ConfigMap toy-router", "Deployment toy-router", "NetworkPolicy toy-router"} <= cluster.step()
    pod = cluster.objects["Deployment toy-router"]["spec"]["template"]["spec"]
    assert [one["name"] for one in pod["containers"]] == [ROUTER, PICKER]
    assert pod["terminationGracePeriodSeconds"] > 300, "what it holds may wait for so long"
    before = cluster.settle(2).status
    assert cluster.condition("Ready") == ("True", "Ready")
    cluster.change(**zero, replicas=0)
    cluster.available["toy"] = 0
    cluster.settle(2)
    assert cluster.condition("Available") == ("False", "ScaledToZero")
    assert cluster.condition("AutoscalerReady") == ("True", "Idle")
    assert cluster.condition("RouterReady") == ("True", "HoldingRequests")
    assert cluster.condition("Degraded") == ("False", "AsExpected")
    told = [one for one in events(before, cluster.status) if one.kind == "Warning" or "Zero" in one.reason]
    assert [(one.kind, one.reason) for one in told] == [("Normal", "ScaledToZero")]
