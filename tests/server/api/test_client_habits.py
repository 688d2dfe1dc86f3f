"""What clients and administrators of other servers do without thinking of it, as the table in docs/compatibility.md
has it: keys made of files, slashes, marks, headers and limits."""

from __future__ import annotations

import codecs
import json

import httpx
import pytest

KEY = {"authorization": "Bearer secret-key"}
HELLO = [{"role": "user", "content": "Hello"}]
CHAT = {"messages": HELLO, "max_tokens": 1}
COMPLETION = {"prompt": "Hello", "max_tokens": 1}


@pytest.fixture(scope="module")
def server(start):
    """With a key that was read from a file, and so ends in a newline. Prompt and answer have 512 tokens at most."""
    return start("--max-model-len", "512", "--served-model-name", "tiny", env={"OCTAVO_API_KEY": "secret-key\n"})


def test_a_key_with_a_newline_at_its_end_is_the_key_without_it(server):
    assert server.get("/v1/models", headers=KEY).status_code == 200
    assert server.get("/v1/models", headers={"authorization": "Bearer secret-key2"}).status_code == 401


def test_a_key_of_white_space_alone_opens_nothing(launch):
    server = launch(env={"OCTAVO_API_KEY": "\n"})
    assert server.process.wait(60) == 1
    assert "api_key must not be empty" in server.log


@pytest.mark.parametrize("header", ["api-key", "Api-Key", "x-api-key"])
def test_a_key_is_taken_from_the_headers_of_azure_and_anthropic(header, server):
    assert server.post("/v1/chat/completions", CHAT, headers={header: "secret-key"}).status_code == 200
    assert server.post("/v1/chat/completions", CHAT, headers={header: "another"}).status_code == 401


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions/", CHAT),
        ("/v1/completions//", COMPLETION),
        ("/v1/messages/", CHAT),
        ("/v1/embeddings/", {"input": "Hello"}),
        ("/tokenize/", {"prompt": "Hello"}),
        ("/api/chat/", {"model": "tiny", "messages": HELLO, "options": {"num_predict": 1}}),
        ("/v1/models/", None),
        ("/health/", None),
        ("/metrics/", None),
    ],
)
def test_a_route_answers_with_a_slash_at_its_end_as_without(path, body, server):
    """Itself: not every client follows a redirect of a POST."""
    ways = [
        httpx.request("GET" if body is None else "POST", server.url + way, json=body, headers=KEY, timeout=90)
        for way in (path, path.rstrip("/"))
    ]
    assert [answer.status_code for answer in ways] == [ways[1].status_code] * 2
    assert ways[0].headers["content-type"] == ways[1].headers["content-type"]
    assert ways[0].status_code not in (307, 404, 405)


def test_a_slash_gets_nobody_past_the_key(server):
    assert server.get("/v1/models/").status_code == 401
    assert server.get("/nowhere/", headers=KEY).status_code == 404


@pytest.mark.parametrize("padding", [0, 1 << 19], ids=["small", "large"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", COMPLETION),
        ("/v1/messages", CHAT),
        ("/api/generate", {"model": "tiny", "prompt": "Hello", "stream": False, "options": {"num_predict": 1}}),
    ],
)
def test_a_body_may_begin_with_the_mark_of_utf_8(path, body, padding, server):
    text = json.dumps(body).encode() + b" " * padding
    wanted, answer = (
        httpx.post(server.url + path, content=content, headers=KEY, timeout=90)
        for content in (text, codecs.BOM_UTF8 + text)
    )
    assert answer.status_code == wanted.status_code and "JSON" not in answer.text
    assert answer.json().keys() == wanted.json().keys()


def test_a_mark_is_taken_once_and_in_utf_8_alone(server):
    text = json.dumps(COMPLETION)
    for content in (2 * codecs.BOM_UTF8 + text.encode(), text.encode("utf-16")):
        answer = httpx.post(server.url + "/v1/completions", content=content, headers=KEY, timeout=90)
        assert answer.status_code == 400 and "JSON" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": -1}),
        ("/v1/chat/completions", {"messages": HELLO, "max_completion_tokens": -1.0}),
        ("/v1/completions", {"prompt": "Hello", "max_tokens": -1}),
        ("/v1/completions", {"prompt": ["Hello", "Hi"], "max_tokens": -1}),
    ],
)
def test_max_tokens_of_minus_one_is_as_many_as_fit(path, body, server):
    answer = server.post(path, {**body, "ignore_eos": True}, headers=KEY).json()
    assert answer["usage"]["total_tokens"] == 512 * len(answer["choices"])
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}


@pytest.mark.parametrize("limit", [-2, 0, -1.5, True])
def test_no_other_limit_below_one_is_taken(limit, server):
    for field in ("max_tokens", "max_completion_tokens"):
        answer = server.post("/v1/chat/completions", {"messages": HELLO, field: limit}, headers=KEY)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == field, answer.text


def test_tools_may_say_null_for_an_empty_list_of_required_parameters(server):
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": None}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    for choice in ("auto", "required"):
        body = {**CHAT, "tools": [tool], "tool_choice": choice}
        assert server.post("/v1/chat/completions", body, headers=KEY).status_code == 200
