"""Chats with a predicted output: the same answer, and how much of it was predicted."""

from __future__ import annotations

import json
from typing import Any

import pytest

CHAT = {"messages": [{"role": "user", "content": "Say it"}], "max_tokens": 40, "ignore_eos": True}


def content(text: Any) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": text}}


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "seeded"])
def test_the_answer_is_the_same_and_its_predicted_tokens_are_counted(shared_server, sampling):
    body = {**CHAT, **sampling}
    plain = shared_server.post("/v1/chat/completions", body).json()
    assert "completion_tokens_details" not in plain["usage"]
    said = plain["choices"][0]["message"]["content"]
    parts = [{"type": "text", "text": said[:7]}, {"type": "text", "text": said[7:]}]
    for given in (said, said[:20] + "zz" + said[20:], parts):
        text = given if isinstance(given, str) else said
        answer = shared_server.post("/v1/chat/completions", {**body, **content(given)}).json()
        assert answer["choices"] == plain["choices"]
        details = answer["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] > 0, "the text that was said is found"
        whole = len(shared_server.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"])
        rejected = details["rejected_prediction_tokens"]
        assert rejected == whole - details["accepted_prediction_tokens"] >= 0, "all others"
        assert text == said or rejected > 0, "what was not said"
    nothing = shared_server.post("/v1/chat/completions", {**body, **content("")}).json()
    assert nothing["choices"] == plain["choices"] and "completion_tokens_details" not in nothing["usage"]


def test_a_stream_counts_them_with_its_usage(shared_server):
    body = {**CHAT, "temperature": 0, **content("no such text 1234567")}
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    lines = shared_server.post("/v1/chat/completions", streamed).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    whole = shared_server.post("/v1/chat/completions", body).json()
    assert chunks[-1]["usage"]["completion_tokens_details"] == whole["usage"]["completion_tokens_details"]


@pytest.mark.parametrize(
    ("given", "field", "words"),
    [
        ("text", "prediction", "object"),
        ({"type": "file", "content": "x"}, "prediction.type", "content"),
        ({"type": "content"}, "prediction.content", "required"),
        ({"type": "content", "content": 3}, "prediction.content", "array"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content.0", "text"),
    ],
)
def test_what_is_no_prediction_is_refused_by_name(shared_server, given, field, words):
    answer = shared_server.post("/v1/chat/completions", {**CHAT, "prediction": given})
    error = answer.json()["error"]
    assert answer.status_code == 400 and (error["param"] or "").startswith(field) and words in error["message"], error
    body = {"model": "tiny", "prompt": "x", **content("x")}
    assert "prediction is not supported" in shared_server.post("/v1/completions", body).json()["error"]["message"]
