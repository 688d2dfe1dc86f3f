"""Configuration of an ingress controller gets into no annotation, unless the chart allows it; all others do."""

from __future__ import annotations

import dataclasses
import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.llmd import parsed
from support.worlds import gateway_world, world

from octavo_operator.api.gateway import LLMGateway
from octavo_operator.config import OperatorConfig
from octavo_operator.deployment.reconcile import reconcile as reconcile_deployment
from octavo_operator.gateway.reconcile import reconcile
from octavo_operator.kube.store import Observed
from octavo_operator.writes.plan import Apply, Delete, Plan

Json = dict[str, Any]

CONFIG = OperatorConfig(router_image="router:1")
ALLOWING = dataclasses.replace(CONFIG, allow_snippet_annotations=True)
HOST = "llm.example.org"
# What controllers document as such. The prefixes of most are options of theirs.
SNIPPETS = [
    *(
        f"nginx.ingress.kubernetes.io/{one}-snippet"
        for one in ("configuration", "server", "auth", "stream", "modsecurity")
    ),
    "nginx.org/server-snippets",
    "nginx.org/location-snippets",
    *(
        f"{prefix}/{one}-config-snippet"
        for prefix in ("haproxy.org", "haproxy.com", "ingress.kubernetes.io")
        for one in ("backend", "frontend", "global", "defaults")
    ),
    *(
        f"{prefix}/config-{one}"
        for prefix in ("haproxy-ingress.github.io", "ingress.kubernetes.io", "mine.example.org")
        for one in ("backend", "backend-early", "backend-late", "frontend", "global", "defaults", "tcp-service")
    ),
    "snippet",
    "Server-Snippet",
]
ALPHABET = string.ascii_lowercase + string.digits
PART = st.text(ALPHABET, min_size=1, max_size=8)
WORDS = st.lists(PART, min_size=1, max_size=3).map("-".join)
PREFIXES = st.sampled_from(["", "nginx.ingress.kubernetes.io/", "haproxy.org/", "config-snippet.example.org/"])
PLAIN = st.builds(str.__add__, PREFIXES, WORDS.filter(lambda name: "snippet" not in name and name[:7] != "config-"))
NAMED = st.one_of(
    st.builds("{}{}snippet{}".format, WORDS, st.sampled_from(["", "-"]), st.sampled_from(["", "s", "-x"])),
    st.builds("config-{}".format, WORDS),
)
HIDDEN = st.builds(str.__add__, PREFIXES, NAMED)


def gateway(ingress: Json | None = None, service: Json | None = None) -> LLMGateway:
    spec: Json = {"service": {"annotations": service or {}}}
    if ingress is not None:
        spec["ingress"] = {"host": HOST, "annotations": ingress}
    return LLMGateway.from_json(
        {"metadata": {"name": "all", "namespace": "default", "uid": "uid", "generation": 1}, "spec": spec}
    )


def written(plan: Plan) -> dict[str, Json]:
    return {one.manifest["kind"]: one.manifest for one in plan.actions if isinstance(one, Apply)}


def own(manifest: Json) -> Json:
    found = manifest["metadata"].get("annotations") or {}
    return {key: value for key, value in found.items() if not key.startswith("octavo.dev/")}


def degraded(status: Json | None) -> tuple[str, str, str]:
    assert status is not None
    return next(
        (one["status"], one["reason"], one["message"]) for one in status["conditions"] if one["type"] == "Degraded"
    )


@given(plain=st.dictionaries(PLAIN, PART, max_size=4))
def test_plain_annotations_are_written_as_they_are(plain: Json) -> None:
    found = reconcile(gateway(plain, plain), gateway_world(), CONFIG)
    made = written(found.plan)
    assert own(made["Ingress"]) == own(made["Service"]) == plain
    assert degraded(found.status)[0] == "False"


@pytest.mark.parametrize("key", SNIPPETS)
def test_snippet_keys_that_controllers_document_are_refused(key: str) -> None:
    refused_everywhere(key, {})


@given(key=HIDDEN, plain=st.dictionaries(PLAIN, PART, max_size=3))
def test_a_name_of_configuration_is_refused_whatever_its_prefix(key: str, plain: Json) -> None:
    refused_everywhere(key, plain)


def refused_everywhere(key: str, plain: Json) -> None:
    found = reconcile(gateway({**plain, key: "x"}), gateway_world(), CONFIG)
    made = written(found.plan)
    assert "Ingress" not in made and {"Service", "Deployment", "ConfigMap"} <= made.keys()
    state, reason, message = degraded(found.status)
    assert (state, reason) == ("True", "SnippetAnnotationNotAllowed")
    assert f"spec.ingress.annotations: {key} " in message and "allowSnippetAnnotations" in message
    beside = reconcile(gateway(None, {**plain, key: "x"}), gateway_world(), CONFIG)
    assert own(written(beside.plan)["Service"]) == plain
    assert f"spec.service.annotations: {key} " in degraded(beside.status)[2]
    deployment = parsed("a", service={"annotations": {**plain, key: "x"}})
    model = reconcile_deployment(deployment, world(), CONFIG)
    assert own(written(model.plan)["Service"]) == plain
    assert f"spec.service.annotations: {key} " in degraded(model.status)[2]
    allowed = reconcile(gateway({**plain, key: "x"}, {key: "x"}), gateway_world(), ALLOWING)
    made = written(allowed.plan)
    assert own(made["Ingress"]) == {**plain, key: "x"} and own(made["Service"]) == {key: "x"}
    assert degraded(allowed.status)[0] == "False"


def test_an_ingress_that_is_there_stays_as_it_is_until_the_spec_drops_it() -> None:
    made = []
    for one in written(reconcile(gateway({"a": "b"}), gateway_world(), CONFIG).plan).values():
        meta = {**one["metadata"], "uid": one["kind"], "resourceVersion": "1", "generation": 1}
        made.append(Observed.of(one["kind"], one["apiVersion"], {**one, "metadata": meta, "status": {}}))
    refused = reconcile(gateway({"a": "c", "nginx.org/server-snippets": "x"}), gateway_world(made), CONFIG)
    assert refused.plan.actions == []
    assert refused.status is not None and refused.status["url"] == f"http://{HOST}/v1"
    gone = reconcile(gateway(), gateway_world(made), CONFIG).plan
    assert [one.target.kind for one in gone.actions if isinstance(one, Delete)] == ["Ingress"]
