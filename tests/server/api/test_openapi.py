"""The server does what its own /openapi.json says, whatever fits that description and whatever does not."""

from __future__ import annotations

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
    "/v2/embed",
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
    } <= paths.keys()
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


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_pages_load_from_this_server_alone(shared_server, path):
    answer = shared_server.get(path)
    assert answer.headers["content-type"].startswith("text/html")
    page = Loaded(answer.text)
    assert page.files, "an icon at least"
    for url in page.files:
        assert url.startswith("/") and not url.startswith("//"), url
        assert shared_server.get(url).status_code == 200 == httpx.head(shared_server.url + url).status_code
    policy = answer.headers["content-security-policy"]  # which the browser holds what the scripts load to
    assert "default-src 'self' data:;" in policy and "http" not in policy and "*" not in policy
    assert "swagger" in answer.text.lower() or path == "/"
    assert shared_server.get("/docs/../index.html").status_code == 404 == shared_server.get("/docs/x").status_code


def test_the_first_page(shared_server):
    page = shared_server.get("/").text
    assert "<h1>tiny</h1>" in page and "also-tiny" in page and f"{shared_server.url}/v1/chat/completions" in page
    links = Loaded(page).links
    assert {"/docs", "/metrics", "/health"} <= set(links)
    assert all(shared_server.get(link).status_code == 200 for link in links)
    for host in ('"><script>alert(1)</script>', "<b>", "[", "a:b:c"):  # it shows the name that it was asked for under
        answer = shared_server.get("/", headers={"host": host})
        assert answer.status_code == 200, host
        assert "<script" not in answer.text and "<b>" not in answer.text
