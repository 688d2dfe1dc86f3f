"""LLMGateways: what is written for them, what is said of them, and what makes the operator look at them again."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.llmd import manifest, parsed
from support.reconciled_gateways import AVAILABLE, body, carried_out, gateway, live, model, pod
from support.worlds import gateway_world, world

from octavo_operator.api import API_VERSION, KIND, Key, LLMDeployment
from octavo_operator.api import gateway as api
from octavo_operator.api.gateway import InvalidLLMGateway, LLMGateway
from octavo_operator.config import OperatorConfig
from octavo_operator.deployment.reconcile import reconcile as reconcile_deployment
from octavo_operator.diff import digest
from octavo_operator.gateway.links import GatewayLinks
from octavo_operator.gateway.reconcile import Outcome, parse, reconcile, reconcile_invalid
from octavo_operator.kube.store import Observed, Store
from octavo_operator.observed.diagnosis import Problem
from octavo_operator.render.network import GATEWAYS
from octavo_operator.render.router.objects import FILES
from octavo_operator.render.router.served import Candidate
from octavo_operator.times import parse_time
from octavo_operator.writes.plan import Annotate, Apply, Delete, Plan

Json = dict[str, Any]

CONFIG = OperatorConfig(router_image="router:1")
LATER = OperatorConfig(router_image="router:2")


def conditions(outcome: Outcome) -> dict[str, tuple[str, str, str]]:
    assert outcome.status is not None
    return {one["type"]: (one["status"], one["reason"], one["message"]) for one in outcome.status["conditions"]}


def written(plan: Plan) -> list[str]:
    return [one.manifest["kind"] for one in plan.actions if isinstance(one, Apply)]


def test_a_first_reconciliation_writes_everything_and_a_second_one_nothing() -> None:
    models = [model("a"), model("b", 2, ready=False, aliases=["c"])]
    first = reconcile(gateway(), gateway_world([], models), CONFIG)
    assert written(first.plan) == ["NetworkPolicy", "ConfigMap", "Deployment", "Service", "PodDisruptionBudget"]
    assert conditions(first)["Ready"][:2] == ("False", "Starting")
    second = reconcile(gateway(), gateway_world(carried_out(first.plan), models), CONFIG)
    assert second.plan.actions == []
    assert conditions(second)["Ready"] == ("True", "Ready", "2 of 2 routers serve requests")
    assert conditions(second)["Degraded"][0] == "False"
    assert second.status is not None
    assert second.status["url"] == "http://all.default.svc.cluster.local/v1"
    assert second.status["models"] == [
        {"name": "a", "llmdeployment": "a", "ready": True},
        {"name": "b", "llmdeployment": "b", "ready": False},
        {"name": "c", "llmdeployment": "b", "ready": False},
    ]


def test_adapters_are_models_of_their_own() -> None:
    told = {"adapters": [{"name": "sql", "ready": 1, "of": 2}, {"name": "new", "ready": 0, "of": 2}]}
    entries = [{"name": name, "uri": "hf://org/x"} for name in ("sql", "new", "b")]
    adapted = Candidate(parsed("a", adapters=entries), 1)
    adapted.deployment.status.update(conditions=[AVAILABLE], **told)
    seen = reconcile(gateway(), gateway_world([], [adapted, model("b", 2)]), CONFIG)
    assert seen.status is not None
    ready = {one["name"]: (one["llmdeployment"], one["ready"]) for one in seen.status["models"]}
    assert ready == {"a": ("a", True), "sql": ("a", True), "new": ("a", False), "b": ("a", False)}
    assert "rename" not in conditions(seen)["Degraded"][2] and "served by a" in conditions(seen)["Degraded"][2]
    files = next(
        one.manifest["data"]
        for one in seen.plan.actions
        if isinstance(one, Apply) and one.manifest["kind"] == "ConfigMap"
    )
    assert '["parent"]="a"' in files["models.lua"]


def test_a_model_that_comes_changes_a_configmap_and_no_router() -> None:
    objects = carried_out(reconcile(gateway(), gateway_world([], [model("a")]), CONFIG).plan)
    for config in (CONFIG, LATER):
        plan = reconcile(gateway(), gateway_world([*objects, pod("of before")], [model("a"), model("b")]), config).plan
        apply, annotate = plan.actions
        assert isinstance(apply, Apply) and apply.manifest["kind"] == "ConfigMap"
        assert "b-pods.default" in apply.manifest["data"]["cds.yaml"]
        assert isinstance(annotate, Annotate), "its kubelet must not wait for a minute"
        assert annotate.annotations == {FILES: digest(apply.manifest["data"])}
    stamp = digest(next(one.body["data"] for one in objects if one.kind == "ConfigMap"))
    assert reconcile(gateway(), gateway_world([*objects, pod(stamp)], [model("a")]), CONFIG).plan.actions == []


def test_an_upgrade_of_the_operator_replaces_no_router() -> None:
    models = [model("a")]
    objects = carried_out(reconcile(gateway(), gateway_world([], models), CONFIG).plan)
    assert reconcile(gateway(), gateway_world(objects, models), LATER).plan.actions == []
    follows = OperatorConfig(router_image="router:2", image_policy="Follow")
    assert written(reconcile(gateway(), gateway_world(objects, models), follows).plan) == ["Deployment"]
    more = reconcile(gateway(replicas=3), gateway_world(objects, models), LATER).plan
    deployment = next(
        one.manifest for one in more.actions if isinstance(one, Apply) and one.manifest["kind"] == "Deployment"
    )
    images = {one["image"] for one in deployment["spec"]["template"]["spec"]["containers"]}
    assert (deployment["spec"]["replicas"], images) == (3, {"router:1"})
    changed = reconcile(gateway(routing={"loadFactor": 200}), gateway_world(objects, models), LATER).plan
    assert "router:2" in json.dumps([one.manifest for one in changed.actions if isinstance(one, Apply)])


def test_files_of_another_version_of_envoy_stay_but_for_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = carried_out(reconcile(gateway(), gateway_world([], [model("a")]), CONFIG).plan)
    monkeypatch.setattr("octavo_operator.render.router.gateway.gateway_lua", lambda _: "of a later version")
    (apply,) = reconcile(gateway(), gateway_world(objects, [model("a"), model("b")]), CONFIG).plan.actions
    assert isinstance(apply, Apply)
    files = apply.manifest["data"]
    assert "of a later version" not in files["key.lua"] + files["lds.yaml"]
    assert '"b"' in files["models.lua"]


def test_an_llmdeployment_of_its_name_is_left_alone() -> None:
    first = reconcile(gateway(), gateway_world(has_namesake=True), CONFIG)
    assert first.plan.actions == []
    assert conditions(first)["Degraded"][:2] == ("True", "NameConflict")
    assert conditions(first)["Ready"][:2] == ("False", "NameConflict")
    objects = carried_out(reconcile(gateway(), gateway_world(), CONFIG).plan)
    older = reconcile(gateway(), gateway_world(objects, [model("a")], has_namesake=True), CONFIG)
    assert written(older.plan) == ["ConfigMap"], "one that was there first goes on"
    assert conditions(older)["Degraded"][:2] == ("True", "NameConflict")
    assert conditions(older)["Ready"][0] == "True"
    service = next(
        one for one in carried_out(reconcile_deployment(parsed("all"), world(), CONFIG).plan) if one.kind == "Service"
    )
    assert reconcile(gateway(), gateway_world([service], has_namesake=True), CONFIG).plan.actions == []


def test_conflicts_of_models_degrade_it_and_it_serves() -> None:
    objects = carried_out(
        reconcile(gateway(), gateway_world([], [model("a"), model("b", 2, aliases=["a"])]), CONFIG).plan
    )
    seen = reconcile(gateway(), gateway_world(objects, [model("a"), model("b", 2, aliases=["a"])]), CONFIG)
    assert conditions(seen)["Ready"][0] == "True"
    assert conditions(seen)["Degraded"][:2] == ("True", "ModelNameConflict")
    assert "served by a, which is older" in conditions(seen)["Degraded"][2]


def test_too_many_models_for_a_configmap_change_nothing() -> None:
    models = [
        model(f"m{number}", aliases=[f"{'x' * 230}-{number}-{each}" for each in range(16)]) for number in range(220)
    ]
    seen = reconcile(gateway(), gateway_world([], models), CONFIG)
    assert seen.plan.actions == []
    assert conditions(seen)["Degraded"][:2] == ("True", "ConfigTooLarge")


def test_a_missing_certificate_and_a_router_that_fails_are_named() -> None:
    spec = {"tls": {"secretRef": {"name": "cert"}}}
    objects = carried_out(reconcile(gateway(**spec), gateway_world(), CONFIG).plan, available=0)
    hanging = pod().body
    hanging["status"] = {
        "phase": "Pending",
        "conditions": [{"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}],
        "containerStatuses": [{"name": "router", "state": {"waiting": {"reason": "ContainerCreating"}}}],
    }
    event = {
        "reason": "FailedMount",
        "type": "Warning",
        "lastTimestamp": "2026-01-01T00:00:30Z",
        "message": 'MountVolume.SetUp failed for volume "octavo-tls" : secret "cert" not found',
    }
    children = [*objects, Observed.of("Pod", "v1", hanging)]
    seen = reconcile(gateway(**spec), gateway_world(children, now=1e9, pod_events={"pod": [event]}), CONFIG)
    assert conditions(seen)["Degraded"][:2] == ("True", "SecretNotFound")
    assert conditions(seen)["Ready"][:2] == ("False", "SecretNotFound")
    assert "cert" in conditions(seen)["Ready"][2]


def test_an_invalid_spec_changes_nothing_and_says_so() -> None:
    broken = {**body(replicas="many"), "status": {"url": "u", "models": []}}
    one = parse(broken)
    assert isinstance(one, InvalidLLMGateway)
    seen = reconcile_invalid(one, 0.0)
    assert seen.plan.actions == [] and seen.status is not None and seen.status["url"] == "u"
    assert conditions(seen)["Degraded"][:2] == ("True", "InvalidSpec")
    assert "replicas" in conditions(seen)["Degraded"][2]


def test_pods_of_a_model_behind_a_gateway_are_found_and_not_rolled() -> None:
    one = parsed("a")
    before = reconcile_deployment(one, world(), CONFIG).plan
    objects = carried_out(before)
    plan = reconcile_deployment(one, world(objects, gateways=("all",)), CONFIG).plan
    (service,) = [each for each in plan.actions if isinstance(each, Apply)]
    assert (service.manifest["kind"], service.manifest["metadata"]["name"]) == ("Service", "a-pods")
    assert service.manifest["spec"]["clusterIP"] == "None"
    with_it = [*objects, live(service.manifest)]
    assert reconcile_deployment(one, world(with_it, gateways=("all",)), CONFIG).plan.actions == []
    assert len(reconcile_deployment(one, world(with_it), CONFIG).plan.actions) == 1, "and goes again"


@pytest.mark.parametrize(
    "spec", [{"routing": {"strategy": "prefix"}}, {"networkPolicy": {"ingressFrom": [{"podSelector": {}}]}}]
)
def test_its_routers_get_through_the_policy_of_closed_pods(spec: Json) -> None:
    plan = reconcile_deployment(parsed("a", **spec), world(gateways=("all",)), CONFIG).plan
    policy = next(
        one.manifest for one in plan.actions if isinstance(one, Apply) and one.manifest["kind"] == "NetworkPolicy"
    )
    assert GATEWAYS in policy["spec"]["ingress"][0]["from"]


class Links:
    """Links over a store, and what they have queued."""

    def __init__(self) -> None:
        self.store, self.queued, self._version = Store(), set[Key](), 0
        self.links = GatewayLinks(self.store, self.queued.add)

    def put(self, one: Json) -> set[Key]:
        self._version += 1
        one["metadata"] |= {"resourceVersion": str(self._version), "creationTimestamp": "2026-01-01T00:00:00Z"}
        one["metadata"].setdefault("uid", one["metadata"]["name"])
        key = self.store.put(Observed.of(one["kind"], API_VERSION, one))
        assert key
        return self.update(key)

    def update(self, key: Key) -> set[Key]:
        self.queued.clear()
        self.links.update(key)
        return set(self.queued)


def test_gateways_are_looked_at_again_when_something_of_theirs_changes() -> None:
    one, all_of_them = Links(), {("default", "llmgateway/all")}
    assert one.put(body()) == set()
    assert one.put(manifest("a")) == all_of_them, "a model comes"
    assert one.put({**manifest("a"), "status": {"replicas": 3}}) == set(), "a status that says nothing to it"
    assert one.put({**manifest("a"), "status": {"conditions": [AVAILABLE]}}) == all_of_them
    assert one.put({**manifest("a", replicas=2), "status": {"conditions": [AVAILABLE]}}) == set()
    added = {**manifest("a", adapters=[{"name": "sql", "uri": "hf://o/n"}]), "status": {"conditions": [AVAILABLE]}}
    assert one.put(added) == all_of_them
    ready = {"conditions": [AVAILABLE], "adapters": [{"name": "sql", "ready": 1, "of": 1}]}
    assert one.put({**added, "status": ready}) == all_of_them
    renamed = manifest("a", model={"uri": "x", "name": "b"})
    assert one.put({**renamed, "status": {"conditions": [AVAILABLE]}}) == all_of_them
    assert one.put({**manifest("a", "other")}) == set(), "of another namespace"
    assert one.store.delete(KIND, "default", "a", "a") == ("default", "a")
    assert one.update(("default", "a")) == all_of_them, "a model goes"


def test_models_are_looked_at_again_when_a_gateway_selects_them() -> None:
    one, models = Links(), {("default", "a"), ("default", "b")}
    one.put({**manifest("a"), "metadata": {"name": "a", "namespace": "default", "labels": {"team": "red"}}})
    one.put(manifest("b"))
    assert one.put(body(selector={"matchLabels": {"team": "red"}})) == models
    assert (one.links.gateways_of(parsed("a")), one.links.gateways_of(parsed("b"))) == (("all",), ())
    assert one.put(body(selector={"matchLabels": {"team": "red"}}, replicas=3)) == set()
    assert one.put(body()) == models
    assert one.links.gateways_of(parsed("b")) == ("all",)
    broken = body(replicas="many", selector={"matchLabels": {"team": "red"}})
    one.put(broken)
    assert one.links.gateways_of(parsed("a")) == ("all",), "its routers still ask the pods"
    one.store.delete(api.KIND, "default", "all", "uid-of-all")
    assert one.update(("default", "llmgateway/all")) == models
    assert one.links.gateways_of(parsed("a")) == ()


def test_a_model_whose_spec_no_longer_parses_keeps_its_names() -> None:
    one = Links()
    one.put(manifest("a", model={"uri": "hf://a/b", "name": "kept", "aliases": ["too"]}, replicas="many"))
    (found,) = one.links.candidates(gateway())
    assert found.deployment.served_names == ["kept", "too"]


def test_a_shared_name_is_ready_when_one_of_its_models_is() -> None:
    backends = [{"llmdeployment": "a", "weight": 90}, {"llmdeployment": "b", "weight": 10}]
    for ready in (True, False):
        models = [model("a", ready=False), model("b", ready=ready)]
        status = reconcile(
            gateway(splits=[{"name": "chat", "backends": backends}]), gateway_world([], models), CONFIG
        ).status
        assert status is not None
        (found,) = [one for one in status["models"] if one["name"] == "chat"]
        assert found == {"name": "chat", "llmdeployment": "a", "ready": ready}


ROUTED: Json = {
    "parentRefs": [{"name": "edge", "namespace": "infra"}],
    "hostnames": ["*.example.org", "llm.example.org"],
}
KINDS = frozenset({"HTTPRoute"})


@pytest.mark.parametrize(
    ("spec", "status", "url"),
    [
        ({}, {}, "http://all.default.svc.cluster.local/v1"),
        ({"ingress": {"host": "a.example.org"}}, {}, "http://a.example.org/v1"),
        ({"ingress": {"host": "a.example.org", "tlsSecretRef": {"name": "t"}}}, {}, "https://a.example.org/v1"),
        ({"httpRoute": ROUTED}, {}, "https://llm.example.org/v1"),
        ({"httpRoute": {**ROUTED, "scheme": "http"}}, {}, "http://llm.example.org/v1"),
        ({"service": {"type": "LoadBalancer"}}, {}, "http://all.default.svc.cluster.local/v1"),
        ({"service": {"type": "LoadBalancer"}}, {"ip": "192.0.2.1"}, "http://192.0.2.1/v1"),
        ({"service": {"type": "LoadBalancer", "port": 81}}, {"ip": "2001:db8::1"}, "http://[2001:db8::1]:81/v1"),
        (
            {"service": {"type": "LoadBalancer", "port": 443}, "tls": {"secretRef": {"name": "t"}}},
            {"hostname": "lb.example.org"},
            "https://lb.example.org/v1",
        ),
    ],
)
def test_the_address_is_the_one_from_outside_once_it_leads_there(spec: Json, status: Json, url: str) -> None:
    first = reconcile(gateway(**spec), gateway_world(apis=KINDS), CONFIG)
    assert first.status is not None and "all.default.svc" in first.status["url"]
    made = carried_out(first.plan)
    balancer = {"loadBalancer": {"ingress": [status]} if status else {}}
    made = [live(one.body, **balancer) if one.kind == "Service" else one for one in made]
    second = reconcile(gateway(**spec), gateway_world(made, apis=KINDS), CONFIG)
    assert second.status is not None and second.status["url"] == url
    assert not second.plan.actions


def test_a_route_that_cannot_be_is_told_while_the_service_serves() -> None:
    routed = gateway(httpRoute=ROUTED)
    without = reconcile(routed, gateway_world(), CONFIG)
    assert conditions(without)["Degraded"][1] == "GatewayAPINotInstalled" and "HTTPRoute" not in written(without.plan)
    made = carried_out(reconcile(routed, gateway_world(apis=KINDS), CONFIG).plan)
    fine = reconcile(routed, gateway_world(made, apis=KINDS), CONFIG)
    assert conditions(fine)["Degraded"][0] == "False"
    no = {"type": "Accepted", "status": "False", "reason": "NotAllowedByListeners", "message": "no listener"}
    parents = [{"parentRef": {"name": "edge"}, "conditions": [no]}]
    made = [live(one.body, parents=parents) if one.kind == "HTTPRoute" else one for one in made]
    refused = reconcile(routed, gateway_world(made, apis=KINDS), CONFIG)
    _, reason, message = conditions(refused)["Degraded"]
    assert reason == "RouteNotAccepted" and "Gateway edge: NotAllowedByListeners: no listener" in message
    assert conditions(refused)["Ready"][0] == "True"
    assert refused.status is not None and refused.status["url"] == "http://all.default.svc.cluster.local/v1"


def test_ingresses_and_routes_name_the_service_and_never_cut_a_stream() -> None:
    spec = {
        "service": {"port": 81},
        "ingress": {
            "host": "a.example.org",
            "className": "nginx",
            "tlsSecretRef": {"name": "t"},
            "annotations": {"a": "b"},
        },
        "httpRoute": {**ROUTED, "parentRefs": [{"name": "edge", "namespace": "infra", "sectionName": "https"}]},
    }
    plan = reconcile(gateway(**spec), gateway_world(apis=KINDS), CONFIG).plan
    made = {one.manifest["kind"]: one.manifest for one in plan.actions if isinstance(one, Apply)}
    ingress, route = made["Ingress"], made["HTTPRoute"]
    assert ingress["metadata"]["annotations"]["a"] == "b"
    assert ingress["spec"] == {
        "rules": [
            {
                "host": "a.example.org",
                "http": {
                    "paths": [
                        {
                            "path": "/",
                            "pathType": "Prefix",
                            "backend": {"service": {"name": "all", "port": {"number": 81}}},
                        }
                    ]
                },
            }
        ],
        "ingressClassName": "nginx",
        "tls": [{"hosts": ["a.example.org"], "secretName": "t"}],
    }
    (parent,) = route["spec"]["parentRefs"]
    assert (parent["name"], parent["namespace"], parent["sectionName"]) == ("edge", "infra", "https")
    (rule,) = route["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    assert (backend["name"], backend["port"], rule["timeouts"]) == ("all", 81, {"request": "0s"})
    gone = reconcile(gateway(), gateway_world(carried_out(plan), apis=KINDS), CONFIG).plan
    assert sorted(one.target.kind for one in gone.actions if isinstance(one, Delete)) == ["HTTPRoute", "Ingress"]


def deployed(status: Json, generation: int = 1, **spec: Any) -> list[Observed]:
    """The objects of a gateway, of whose Deployment the status is given."""
    out = []
    for one in (
        one.manifest
        for one in reconcile(gateway(**spec), gateway_world(), CONFIG).plan.actions
        if isinstance(one, Apply)
    ):
        meta = {**one["metadata"], "uid": one["kind"], "resourceVersion": "1", "generation": generation}
        told = status if one["kind"] == "Deployment" else {}
        out.append(Observed.of(one["kind"], one["apiVersion"], {**one, "metadata": meta, "status": told}))
    return out


def counts(generation: int, replicas: int, updated: int, available: int) -> Json:
    return {
        "observedGeneration": generation,
        "replicas": replicas,
        "updatedReplicas": updated,
        "readyReplicas": available,
        "availableReplicas": available,
    }


@pytest.mark.parametrize(
    ("status", "ready", "progressing"),
    [
        (counts(2, 2, 2, 2), ("True", "Ready"), ("False", "Complete")),
        (counts(1, 2, 2, 2), ("False", "RollingOut"), ("True", "RollingOut")),  # its controller has not looked yet
        (counts(2, 3, 1, 2), ("False", "RollingOut"), ("True", "RollingOut")),
        (counts(2, 3, 2, 3), ("False", "RollingOut"), ("True", "RollingOut")),  # an old router is left
        (counts(2, 2, 2, 1), ("False", "Starting"), ("True", "Starting")),
        ({}, ("False", "Starting"), ("True", "RollingOut")),
    ],
)
def test_ready_means_that_all_routers_are_of_the_latest_spec(
    status: Json, ready: tuple[str, str], progressing: tuple[str, str]
) -> None:
    found = conditions(reconcile(gateway(), gateway_world(deployed(status, 2)), CONFIG))
    assert (found["Ready"][:2], found["Progressing"][:2]) == (ready, progressing)


@pytest.mark.parametrize("change", [{"replicas": 3}, {"routing": {"loadFactor": 200}}, {"tenants": []}])
def test_ready_is_false_from_the_moment_at_which_the_spec_changes(change: Json) -> None:
    objects = deployed(counts(1, 2, 2, 2))
    seen = reconcile(gateway(**change), gateway_world(objects), CONFIG)
    assert conditions(seen)["Ready"][0] == ("True" if change == {"tenants": []} else "False")
    refused = reconcile(
        gateway(**change), gateway_world(objects, write_problem=Problem("ObjectRejected", "no")), CONFIG
    )
    assert conditions(refused)["Ready"][:2] == conditions(refused)["Progressing"][:2] == ("False", "ObjectRejected")


def test_status_has_what_scaling_asks_for() -> None:
    status = reconcile(gateway(), gateway_world(deployed(counts(1, 2, 2, 1))), CONFIG).status
    assert status is not None and (status["replicas"], status["readyReplicas"]) == (2, 1)
    assert status["selector"] == "octavo.dev/llmgateway=all,app.kubernetes.io/component=router"


def test_a_restart_replaces_the_routers_and_nothing_else() -> None:
    objects = deployed(counts(1, 2, 2, 2))
    again = body()
    again["metadata"]["annotations"] = {"kubectl.kubernetes.io/restartedAt": "now"}
    plan = reconcile(LLMGateway.from_json(again), gateway_world(objects), CONFIG).plan
    assert written(plan) == ["Deployment"]
    (apply,) = [one for one in plan.actions if isinstance(one, Apply)]
    marked = apply.manifest["spec"]["template"]["metadata"]["annotations"]
    assert marked["kubectl.kubernetes.io/restartedAt"] == "now"


@pytest.mark.parametrize("spec", [{}, {"routing": {"strategy": "prefix"}}])
def test_a_restart_of_an_llmdeployment_replaces_all_its_pods(spec: Json) -> None:
    body = manifest(**spec)
    body["metadata"] |= {"uid": "u", "generation": 1}

    def templates(annotations: Json, children: list[Observed]) -> tuple[list[Observed], Json]:
        body["metadata"]["annotations"] = annotations
        found = reconcile_deployment(LLMDeployment.from_json(body), world(children), CONFIG).plan
        made = [one.manifest for one in found.actions if isinstance(one, Apply)]
        marks = {
            one["metadata"]["name"]: one["spec"]["template"]["metadata"]
            .get("annotations", {})
            .get("kubectl.kubernetes.io/restartedAt")
            for one in made
            if one["kind"] == "Deployment"
        }
        return [live(one) for one in made], marks

    objects, marks = templates({}, [])
    assert set(marks.values()) == {None}
    assert templates({"other": "x"}, objects)[1] == {}, "other annotations change nothing"
    assert templates({"kubectl.kubernetes.io/restartedAt": "now"}, objects)[1] == dict.fromkeys(marks, "now")


def test_nothing_holds_is_said_only_once_a_gateway_had_the_time_to_come() -> None:
    body = manifest(autoscaling={"minReplicas": 0, "maxReplicas": 2})
    body["metadata"] |= {"uid": "u", "generation": 1, "creationTimestamp": "2026-01-01T00:00:00Z"}
    deployment, created = LLMDeployment.from_json(body), parse_time("2026-01-01T00:00:00Z")

    def told(age: float, *gateways: str) -> Outcome:
        return reconcile_deployment(deployment, world(now=created + age, gateways=gateways), CONFIG)

    assert conditions(told(2))["AutoscalerReady"][1] == "Starting"
    due = told(2).requeue_after
    assert due is not None and due <= 8, "it is looked at again"
    assert conditions(told(11))["AutoscalerReady"][:2] == ("False", "ScaleToZeroUnavailable")
    assert conditions(told(11, "all"))["AutoscalerReady"][1] == "Starting"
