"""The server does what its own /openapi.json says, whatever fits that description and whatever does not."""

from __future__ import annotations

import os

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks

from octavo.entrypoints.app import STATE_OPERATIONS, WORK_OPERATIONS

EXAMPLES = int(os.environ.get("OCTAVO_SCHEMA_EXAMPLES", "15"))
load_all_checks()

# What a schema cannot say: how many tokens a text has, and which fields need or exclude each other.
UNSAYABLE = {"/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize"}
OPERATIONS = [f"{operation.method} {operation.path}" for operation in (*STATE_OPERATIONS, *WORK_OPERATIONS)]


@pytest.fixture(scope="module")
def described(shared_server):
    schema = schemathesis.openapi.from_url(shared_server.url + "/openapi.json")
    return {result.ok().label: result.ok() for result in schema.get_all_operations()}


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("label", OPERATIONS)
def test_every_operation(described, label, mode):
    """All of schemathesis' checks, on data that fits the description and on data that does not."""
    operation = described[label.replace(":path}", "}")]
    excluded = [CHECKS.get_one("positive_data_acceptance")] if operation.path in UNSAYABLE else []
    if mode.is_negative and not operation.body:
        pytest.skip("nothing that could be wrong")

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    def run(case):
        if mode.is_positive and isinstance(case.body, dict) and operation.path.startswith("/v1/"):
            case.body["max_tokens"] = 3
        case.call_and_validate(excluded_checks=excluded, timeout=60)

    run()


def test_every_operation_is_documented(shared_server):
    paths = shared_server.get("/openapi.json").json()["paths"]
    assert {
        "/health", "/livez", "/readyz", "/ping", "/metrics", "/load", "/version", "/tokenize", "/detokenize",
        "/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/models", "/v1/models/{model_id}",
    } <= paths.keys()  # fmt: skip


def test_the_limits_are_this_servers(shared_server):
    schemas = shared_server.get("/openapi.json").json()["components"]["schemas"]
    properties = schemas["CompletionRequest"]["properties"]
    assert {"enum": ["tiny", "also-tiny"]} in properties["model"]["anyOf"]
    assert properties["max_tokens"]["anyOf"][0]["maximum"] == 1023
    assert properties["stop_token_ids"]["anyOf"][0]["items"]["maximum"] == 399
    assert properties["top_p"]["anyOf"][0] == {"type": "number", "exclusiveMinimum": 0, "maximum": 1}


def test_the_docs_page_is_there(shared_server):
    assert "swagger" in httpx.get(shared_server.url + "/docs").text.lower()
