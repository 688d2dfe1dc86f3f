"""Log-probabilities of the tokens that a request names, whatever their rank."""

from __future__ import annotations

import json
from typing import Any

import pytest

NAMED = [7, 300, 12]
TEXT = {"prompt": "The capital", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
CHAT = {**TEXT, "messages": [{"role": "user", "content": "Hello"}], "prompt": None}
AS_IDS = {"return_tokens_as_token_ids": True}
ASKED = {
    "/v1/completions": {**TEXT, **AS_IDS, "logprobs": 0},
    "/v1/chat/completions": {**CHAT, **AS_IDS, "logprobs": True},
}


def tables(path: str, choice: dict[str, Any]) -> list[dict[str, float]]:
    """By place: the tokens that are told, in their order."""
    if path == "/v1/completions":
        found: list[dict[str, float]] = choice["logprobs"]["top_logprobs"]
        return found
    return [{one["token"]: one["logprob"] for one in at["top_logprobs"]} for at in choice["logprobs"]["content"]]


@pytest.mark.parametrize("path", ASKED)
def test_they_come_in_place_of_the_best_ones_behind_the_sampled_token(shared_server, path):
    """With the log-probabilities that they have among the best, the same text, and the same in pieces."""
    body = {**ASKED[path], "logprob_token_ids": NAMED}
    answer = shared_server.post(path, body).json()["choices"][0]
    told = tables(path, answer)
    content = answer["logprobs"].get("content")
    sampled = [at["token"] for at in content] if content is not None else answer["logprobs"]["tokens"]
    assert [list(at) for at in told] == [[token, *(f"token_id:{i}" for i in NAMED)] for token in sampled]
    name = "top_logprobs" if content is not None else "logprobs"
    best = shared_server.post(path, {**ASKED[path], name: 20}).json()["choices"][0]
    assert best.get("text") == answer.get("text") and best.get("message") == answer.get("message")
    for mine, others in zip(told, tables(path, best), strict=True):
        assert all(others.get(token, value) == pytest.approx(value, abs=1e-5) for token, value in mine.items())
        assert all(value <= min(others.values()) for token, value in mine.items() if token not in others)
    lines = shared_server.post(path, {**body, "stream": True}).text.splitlines()
    pieces = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    assert [at for piece in pieces if piece["logprobs"] for at in tables(path, piece)] == told


def test_the_tokens_of_a_prompt_have_the_best_ones_as_ever(shared_server):
    body = {**ASKED["/v1/completions"], "echo": True, "logprobs": 2}
    plain = shared_server.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    named = shared_server.post("/v1/completions", {**body, "logprob_token_ids": NAMED}).json()["choices"][0]["logprobs"]
    assert named["top_logprobs"][:-3] == plain["top_logprobs"][:-3] and named["tokens"] == plain["tokens"]
    assert all("token_id:300" in at for at in named["top_logprobs"][-3:])
    assert named["text_offset"] == plain["text_offset"] and named["token_logprobs"] == plain["token_logprobs"]


@pytest.mark.parametrize("path", ASKED)
def test_an_empty_list_names_none(shared_server, path):
    answers = [shared_server.post(path, {**ASKED[path], **more}).json() for more in ({}, {"logprob_token_ids": []})]
    assert answers[0]["choices"] == answers[1]["choices"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"logprob_token_ids": [400]}, "between 0 and 399"),
        ({"logprob_token_ids": [-1]}, "greater than or equal to 0"),
        ({"logprob_token_ids": ["x"]}, "integer"),
        ({"logprob_token_ids": [1] * 1_025}, "1024"),
        ({"logprob_token_ids": [1], "logprobs": None}, "needs logprobs"),
        ({"logprob_token_ids": [1], "echo": True, "max_tokens": 0}, "prompt_logprobs"),
    ],
)
@pytest.mark.parametrize("path", ASKED)
def test_what_names_no_token_is_refused_by_name(shared_server, path, more, words):
    if "echo" in more and "chat" in path:
        return  # chats have at least one token
    answer = shared_server.post(path, {**ASKED[path], **more})
    error = answer.json()["error"]
    assert answer.status_code == 400 and (error["param"] or "").startswith("logprob_token_ids"), error
    assert words in error["message"]
