"""LLMGateways: their CRD, and what they serve."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from support.llmd import parsed

from octavo_operator.api.gateway import LLMGateway
from octavo_operator.config import OperatorConfig
from octavo_operator.crd import gateway as crd
from octavo_operator.render.gateway import render_gateway, url
from octavo_operator.render.restricted import violations
from octavo_operator.render.router.served import Candidate, gateway_spec, served_models


def gateway(**spec: Any) -> LLMGateway:
    return LLMGateway.from_json({"metadata": {"name": "all", "namespace": "team", "uid": "u"}, "spec": spec})


def fields(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, inner in schema.get("properties", {}).items():
        yield f"{path}.{name}", inner
        yield from fields(inner, f"{path}.{name}")
    if "items" in schema:
        yield from fields(schema["items"], f"{path}[]")


def test_the_crd_is_small_described_and_bounded() -> None:
    made = crd.manifest()
    assert yaml.safe_load(crd.text()) == made
    assert len(crd.text().encode()) < 16_000
    assert made["spec"]["names"]["shortNames"] == ["llmg"]
    schema = made["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    everything = [*fields(schema["spec"], "spec"), *fields(schema["status"], "status")]
    assert [path for path, one in everything if not one.get("description")] == []
    for path, one in fields(schema["spec"], "spec"):
        assert one.get("type") != "array" or "maxItems" in one, path
        assert "additionalProperties" not in one or "maxProperties" in one, path


@pytest.mark.parametrize(
    ("selector", "labels", "selected"),
    [
        (None, {}, True),
        ({"matchLabels": {"a": "b"}}, {"a": "b", "c": "d"}, True),
        ({"matchLabels": {"a": "b"}}, {"a": "c"}, False),
        ({"matchExpressions": [{"key": "a", "operator": "In", "values": ["b", "c"]}]}, {"a": "c"}, True),
        ({"matchExpressions": [{"key": "a", "operator": "In", "values": ["b"]}]}, {}, False),
        ({"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["b"]}]}, {}, True),
        ({"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["b"]}]}, {"a": "b"}, False),
        ({"matchExpressions": [{"key": "a", "operator": "Exists"}]}, {"a": ""}, True),
        ({"matchExpressions": [{"key": "a", "operator": "DoesNotExist"}]}, {"a": ""}, False),
    ],
)
def test_selectors_select_as_kubernetes_does(selector: Any, labels: dict[str, str], selected: bool) -> None:
    assert gateway(**({"selector": selector} if selector else {})).selects(labels) is selected


def model(owner: str, created: int, **fields: Any) -> Candidate:
    return Candidate(parsed(owner, "team", model={"uri": "hf://org/name", **fields}), created)


def test_the_older_of_two_models_with_one_name_has_it() -> None:
    aliases = [{"name": "small", "model": "one"}, {"name": "old", "model": "one"}, {"name": "x", "model": "nobody"}]
    candidates = [model("b", 2, name="one", aliases=["two"]), model("a", 1, name="one", aliases=["old"])]
    served = served_models(gateway(aliases=aliases), candidates)
    assert [(one.name, one.owner, one.served) for one in served.models] == [
        ("one", "a", "one"),
        ("old", "a", "old"),
        ("two", "b", "two"),
        ("small", "a", "one"),
    ]
    assert len(served.conflicts) == 3
    assert "'one' of LLMDeployment b is served by a" in served.conflicts[0]
    assert "alias 'old'" in served.conflicts[1] and "'nobody'" in served.conflicts[2]
    reverse = served_models(gateway(aliases=aliases), reversed(candidates))
    assert reverse == served, "the order of a listing does not matter"


def test_a_name_is_shared_by_weight_where_the_gateway_says_so() -> None:
    candidates = [model("v1", 1, name="chat"), model("v2", 2, name="chat"), model("v3", 3), model("v4", 4, name="chat")]
    backends = [
        {"llmdeployment": name, "weight": weight} for name, weight in {"v2": 10, "v1": 90, "v3": 0, "gone": 5}.items()
    ]
    made = gateway(splits=[{"name": "chat", "backends": backends}], aliases=[{"name": "gpt", "model": "chat"}])
    served = served_models(made, candidates)
    by_name = {one.name: one for one in served.models}
    assert list(by_name) == ["v3", "chat", "gpt"]
    shared = by_name["chat"]
    assert [(one.pool, one.served, one.weight) for one in shared.backends] == [
        ("v2", "chat", 10),
        ("v1", "chat", 90),
        ("v3", "v3", 0),
    ]
    assert (shared.owner, shared.created, by_name["gpt"].backends) == ("v1", 1, shared.backends)
    missing, stranger = served.conflicts
    assert "no LLMDeployment gone" in missing
    assert "of LLMDeployment v4 is shared by others" in stranger and "spec.splits" in stranger
    pools = gateway_spec(made, candidates, OperatorConfig()).pools
    assert {one.name for one in pools} == {"v1", "v2", "v3"}, (
        "v2 has no name of its own, and weight 0 keeps its streams"
    )
    nobody = served_models(gateway(splits=[{"name": "chat", "backends": backends[3:]}]), candidates)
    assert {one.name: one.owner for one in nobody.models} == {"chat": "v1", "v3": "v3"}


def test_envoys_settings_follow_the_spec() -> None:
    key = {"apiKeySecretRef": {"name": "keys"}}
    made = gateway_spec(
        gateway(
            tls={"secretRef": {"name": "cert"}},
            replicas=3,
            routing={"loadFactor": 150},
            tenants=[{"name": "red", "requestsPerMinute": 9, "models": ["a"], **key}],
        ),
        [model("a", 1), model("b", 2)],
        OperatorConfig(cluster_domain="example.org"),
    )
    assert [pool.endpoints[0].address for pool in made.pools] == [
        f"{name}-pods.team.svc.example.org." for name in ("a", "b")
    ]
    assert (made.replicas, made.router.load_factor, made.tls_directory) == (3, 150, "/etc/octavo-tls")
    (tenant,) = made.tenants
    assert (tenant.key_file, tenant.requests_per_minute, tenant.models) == ("/etc/octavo-tenants/red/apiKey", 9, ("a",))


def test_its_objects_are_restricted_routers_behind_a_service_of_its_name() -> None:
    key = {"apiKeySecretRef": {"name": "keys", "key": "red"}}
    spec = {"tls": {"secretRef": {"name": "cert"}}, "tenants": [{"name": "red", **key}], "service": {"port": 443}}
    made = render_gateway(gateway(**spec), [model("a", 1)], OperatorConfig(router_image="router:1"))
    (together,) = (one for one in made if one["metadata"]["name"] == "all-routers")
    made.remove(together)
    by_kind = {one["kind"]: one for one in made}
    assert len(by_kind) == len(made) == 5
    for one in [*made, together]:
        assert one["metadata"]["ownerReferences"][0]["kind"] == "LLMGateway"
    for one in made:
        assert one["metadata"]["name"] == ("all" if one["kind"] == "Service" else "all-router")
    pod = by_kind["Deployment"]["spec"]["template"]
    assert [one for one in violations(pod, "default") if "serviceAccountName" not in one] == []
    container, picker = pod["spec"]["containers"]
    assert container["image"] == "router:1"
    selector = by_kind["Deployment"]["spec"]["selector"]["matchLabels"]
    assert by_kind["Service"]["spec"]["selector"] == selector
    assert by_kind["Service"]["spec"]["sessionAffinity"] == "ClientIP", "a client's conversations are at one router"
    assert selector.items() <= pod["metadata"]["labels"].items()
    (limits,) = (one.split("=")[1] for one in picker["args"] if one.startswith("--tenants="))
    assert limits == f"{picker['volumeMounts'][0]['mountPath']}/tenants.json"
    assert set(by_kind["ConfigMap"]["data"]) == {
        "tenants.json",
        "envoy.yaml",
        "lds.yaml",
        "cds.yaml",
        "key.lua",
        "models.lua",
        "sds.yaml",
    }
    volumes = {one["name"]: one for one in pod["spec"]["volumes"]}
    mounts = {one["mountPath"]: volumes[one["name"]] for one in container["volumeMounts"]}
    assert mounts["/etc/octavo-tls"]["secret"] == {"secretName": "cert"}
    (source,) = mounts["/etc/octavo-tenants"]["projected"]["sources"]
    assert source["secret"]["items"] == [{"key": "red", "path": "red/red"}]
    assert (together["spec"]["clusterIP"], together["spec"]["selector"]) == ("None", selector)
    ports = {one["name"]: one["containerPort"] for one in picker["ports"]}
    assert ports["peers"] == together["spec"]["ports"][0]["port"]
    assert {"--peers=all-routers.team.svc.cluster.local.", "--peer-address=$(POD_IP)"} <= set(picker["args"])
    assert [one["name"] for one in picker["env"]] == ["POD_IP"]
    (ours,) = (one["from"] for one in by_kind["NetworkPolicy"]["spec"]["ingress"] if one["ports"][0]["port"] == "peers")
    assert ours == [{"podSelector": {"matchLabels": selector}}], "nobody else tells what routers have let in"
    assert url(gateway(**spec), "x.y") == "https://all.team.svc.x.y/v1"
    assert url(gateway(), "x.y") == "http://all.team.svc.x.y/v1"
    alone = render_gateway(gateway(replicas=1), [], OperatorConfig())
    assert "PodDisruptionBudget" not in {one["kind"] for one in alone}
    assert len([one for one in alone if one["kind"] == "Service"]) == 1, "without tenants there is nothing to keep"
