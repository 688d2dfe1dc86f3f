"""A template without end gets its own error; other requests, and the batch that it is in, go on."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
GROWING = "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"
ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


@pytest.fixture(scope="module")
def server(start):
    return start("--kv-cache-memory-bytes", "64MiB", "--served-model-name", "m", "--trust-request-chat-template")


@pytest.mark.parametrize("template", [ENDLESS, GROWING, "{{ 'a'|center(3000000000) }}", ENDLESS + "{{ tools }}"])
def test_a_hostile_template_gets_a_400_that_names_the_field_and_the_limit(server, template):
    for more in ({}, {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}):
        answer = server.post("/v1/chat/completions", {**ASK, "chat_template": template, **more})
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == "chat_template", error
        assert "more than" in error["message"] and "another template" in error["message"]


def test_variables_and_messages_are_named_where_they_are_too_much(start, tmp_path):
    template = tmp_path / "grows.jinja"
    template.write_text("{{ 'a' * (n or 1) }}{% if messages|length > 1 %}" + GROWING + "{% endif %}")
    server = start("--kv-cache-memory-bytes", "64MiB", "--served-model-name", "m", "--chat-template", str(template))
    assert server.post("/v1/chat/completions", ASK).status_code == 200
    for fields, named in (
        ({"chat_template_kwargs": {"n": 10**10}}, "chat_template_kwargs"),
        ({"messages": ASK["messages"] * 2}, "messages"),
    ):
        answer = server.post("/v1/chat/completions", {**ASK, **fields})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, named), answer.text


def test_other_requests_go_on_meanwhile(server):
    with ThreadPoolExecutor() as threads:
        hostile = threads.submit(server.post, "/v1/chat/completions", {**ASK, "chat_template": ENDLESS})
        waits = []
        while not hostile.done():
            before = time.monotonic()
            assert server.get("/health").status_code == 200
            waits.append(time.monotonic() - before)
    assert hostile.result().status_code == 400
    assert len(waits) > 5, waits  # the thread's steps let others in


def test_a_batch_with_a_hostile_template_ends(server):
    client = server.client()
    bodies = {"a": ASK, "b": {**ASK, "chat_template": ENDLESS}, "c": {**ASK, "chat_template": GROWING}, "d": ASK}
    url = "/v1/chat/completions"
    lines = [json.dumps({"custom_id": key, "method": "POST", "url": url, "body": body}) for key, body in bodies.items()]
    source = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=source.id, endpoint=url, completion_window="24h")
    deadline = time.monotonic() + 60
    while batch.status not in ("completed", "failed", "expired"):
        assert time.monotonic() < deadline, batch
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    counts = batch.request_counts
    assert (batch.status, counts.completed, counts.failed) == ("completed", 2, 2)
    errors = [json.loads(line) for line in client.files.content(batch.error_file_id).text.splitlines()]
    assert sorted(entry["custom_id"] for entry in errors) == ["b", "c"]
    assert all("more than" in json.dumps(entry) for entry in errors)
