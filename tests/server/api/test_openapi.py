"""The server does what its own /openapi.json says, whatever fits that description and whatever does not."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks
from support.examples import examples_of

from octavo.entrypoints.app import STATE_OPERATIONS, WORK_OPERATIONS

EXAMPLES = examples_of(15)
load_all_checks()

# What a schema cannot say: how many tokens a text has, and which fields need or exclude each other.
UNSAYABLE = {
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/embeddings",
    "/tokenize",
    "/v1/score",
    "/score",
    "/v1/rerank",
    "/rerank",
    "/v2/rerank",
    "/classify",
    "/api/chat",
    "/api/generate",
    "/api/embed",
    "/api/embeddings",
    "/api/show",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/conversations",
    "/v1/conversations/{conversation_id}/items",
    "/v2/embed",
    "/v1/decisions",
    "/infill",  # which models can
}
NOT_BUILT = {"/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete"}  # a 501 is what they say
OPERATIONS = [f"{operation.method} {operation.path}" for operation in (*STATE_OPERATIONS, *WORK_OPERATIONS)]


@pytest.fixture(scope="module")
def described(shared_server):
    schema = schemathesis.openapi.from_url(shared_server.url + "/openapi.json")
    return {result.ok().label: result.ok() for result in schema.get_all_operations()}


@pytest.mark.sampled(strength=2, share=3)
@pytest.mark.slow
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("label", OPERATIONS)
def test_every_operation(described, label, mode):
    """All of schemathesis' checks, on data that fits the description and on data that does not."""
    operation = described[label.replace(":path}", "}")]
    excluded = [CHECKS.get_one("positive_data_acceptance")] if operation.path in UNSAYABLE else []
    if operation.path in NOT_BUILT:
        excluded += [CHECKS.get_one("not_a_server_error"), CHECKS.get_one("positive_data_acceptance")]
    if mode.is_negative and not operation.body:
        pytest.skip("nothing that could be wrong")

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    def run(case):
        if mode.is_positive and isinstance(case.body, dict) and operation.path.startswith("/v1/"):
            case.body["max_output_tokens" if operation.path.startswith("/v1/responses") else "max_tokens"] = 3
        if mode.is_positive and isinstance(case.body, dict) and operation.path.startswith("/api/"):
            case.body["options"] = {**(case.body.get("options") or {}), "num_predict": 3}
        case.call_and_validate(excluded_checks=excluded, timeout=60)

    run()


def test_every_operation_is_documented(shared_server):
    paths = shared_server.get("/openapi.json").json()["paths"]
    assert {
        "/health",
        "/livez",
        "/readyz",
        "/ping",
        "/metrics",
        "/load",
        "/version",
        "/tokenize",
        "/detokenize",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/embeddings",
        "/v1/rerank",
        "/v1/score",
        "/classify",
        "/v1/models",
        "/v1/models/{model_id}",
        "/api/tags",
        "/api/chat",
        "/api/generate",
        "/api/show",
        "/props",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/responses",
        "/v1/responses/input_tokens",
        "/v1/conversations",
        "/v1/conversations/{conversation_id}/items/{item_id}",
    } <= paths.keys()
    headings: dict[str, set[str]] = {}
    for path, operations in paths.items():
        for operation in operations.values():
            (heading,) = operation["tags"]
            headings.setdefault(heading, set()).add(path)
    told = {"OpenAI": "/v1/chat/completions", "Anthropic": "/v1/messages/count_tokens", "This server": "/health"}
    told |= {"Ollama, llama.cpp": "/api/chat", "Vectors, scores": "/rerank", "OpenAI: batches": "/v1/files"}
    for heading, path in told.items():
        assert path in headings[heading] and not any(path in one for name, one in headings.items() if name != heading)
    for path in ("/v1/files", "/v1/batches", "/v1/responses/{response_id}/input_items"):
        assert {"after", "limit"} <= {one["name"] for one in paths[path]["get"]["parameters"] if one["in"] == "query"}


def test_the_limits_are_this_servers(shared_server):
    schemas = shared_server.get("/openapi.json").json()["components"]["schemas"]
    properties = schemas["CompletionRequest"]["properties"]
    assert {"enum": ["tiny", "also-tiny"]} in properties["model"]["anyOf"]
    assert properties["max_tokens"]["anyOf"][0]["maximum"] == 1023
    assert properties["stop_token_ids"]["anyOf"][0]["items"]["maximum"] == 399
    for body, field, most in (("CompletionRequest", "prompt", 1024), ("EmbeddingRequest", "input", 2048)):
        _, texts, ids, lists, *_ = schemas[body]["properties"][field]["anyOf"]
        assert texts["maxItems"] == lists["maxItems"] == most
        assert ids["items"]["maximum"] == lists["items"]["items"]["maximum"] == 399
        # A longer prompt is cut, if that is asked for.
        path = "/v1/completions" if field == "prompt" else "/v1/embeddings"
        for value in ([7] * 1500, [[7] * 1500]):
            given = {field: value, "truncate_prompt_tokens": 5}
            assert shared_server.post(path, given).status_code == 200
            assert shared_server.post(path, {field: value}).status_code == 400
    assert properties["top_p"]["anyOf"][0] == {"type": "number", "exclusiveMinimum": 0, "maximum": 1}


class Loaded(HTMLParser):
    """What a page has a browser load, and where its links lead."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.files: list[str] = []
        self.links: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("src", "href", "srcset", "action", "data") and value:
                (self.links if tag == "a" else self.files).append(value)


def test_the_documentation_loads_from_this_server_alone(shared_server):
    answer = shared_server.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    page = Loaded(answer.text)
    assert page.files, "an icon at least"
    for url in page.files:
        assert url.startswith("/") and not url.startswith("//"), url
        assert shared_server.get(url).status_code == 200 == httpx.head(shared_server.url + url).status_code
    policy = answer.headers["content-security-policy"]  # which the browser holds what the scripts load to
    assert "default-src 'self' data:;" in policy and "http" not in policy and "*" not in policy
    assert "swagger" in answer.text.lower()
    assert shared_server.get("/docs/../index.html").status_code == 404 == shared_server.get("/docs/x").status_code


def test_the_page_is_one_document_that_its_policy_lets_run(shared_server):
    answer = shared_server.get("/", headers={"accept": "text/html"})
    page = Loaded(answer.text)
    assert all(url.startswith(("data:image/svg+xml", "#")) for url in [*page.files, *page.links])
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'; " in policy and "unsafe" not in policy and "http" not in policy and "*" not in policy
    for tag in ("script", "style"):
        [text] = re.findall(f"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        assert f"{tag}-src 'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'; " in policy
    assert httpx.head(f"{shared_server.url}/", headers={"accept": "text/html"}).status_code == 200


def test_clients_that_look_for_a_server_get_words(shared_server):
    """Ollama's ask HEAD / or GET / whether somebody is there."""
    assert httpx.head(f"{shared_server.url}/").status_code == 200
    for accept in ("*/*", "application/json", "text/plain"):
        answer = shared_server.get("/", headers={"accept": accept})
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
        assert "tiny, also-tiny" in answer.text and f"{shared_server.url}/v1" in answer.text
    for host in ('"><script>alert(1)</script>', "<b>", "[", "a:b:c"):  # it shows the name that it was asked for under
        answer = shared_server.get("/", headers={"host": host})
        assert answer.status_code == 200 and answer.headers["x-content-type-options"] == "nosniff", host
