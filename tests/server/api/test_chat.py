"""/v1/chat/completions through OpenAI's own client."""

from __future__ import annotations

import pytest

USER = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def client(shared_server):
    return shared_server.client()


def chat(client, messages=USER, **options):
    return client.chat.completions.create(
        model="tiny", messages=messages, **{"max_tokens": 8, "temperature": 0, **options}
    )


def test_an_answer(client):
    answer = chat(client)
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.role == "assistant"
    assert isinstance(answer.choices[0].message.content, str)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_the_chat_template_makes_the_prompt(client):
    """The rendered template sent as a plain prompt gives the same answer."""
    answer = chat(client, extra_body={"return_token_ids": True, "ignore_eos": True})
    plain = client.completions.create(
        model="tiny",
        prompt="<|user|>Hello<|end|><|assistant|>",
        max_tokens=8,
        temperature=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    assert answer.prompt_token_ids == plain.choices[0].prompt_token_ids
    assert answer.choices[0].token_ids == plain.choices[0].token_ids


def test_streamed_pieces_add_up(client):
    whole = chat(client, max_tokens=30, n=2, seed=1, temperature=1)
    texts = {0: "", 1: ""}
    roles, finishes = [], []
    for chunk in chat(
        client, max_tokens=30, n=2, seed=1, temperature=1, stream=True, stream_options={"include_usage": True}
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles += [choice.delta.role] if choice.delta.role else []
            finishes += [choice.finish_reason] if choice.finish_reason else []
        last = chunk
    assert texts == {c.index: c.message.content for c in whole.choices}
    assert roles == ["assistant"] * 2 and len(finishes) == 2
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_without_max_tokens_the_answer_may_fill_the_model(client):
    answer = client.chat.completions.create(model="tiny", messages=USER, temperature=0, extra_body={"ignore_eos": True})
    assert answer.usage.total_tokens == 1024
    assert answer.choices[0].finish_reason == "length"


def test_max_completion_tokens_goes_before_max_tokens(client):
    answer = chat(client, max_completion_tokens=3, max_tokens=9, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 3


def test_logprobs_in_chat_shape(client):
    answer = chat(client, logprobs=True, top_logprobs=2, extra_body={"return_token_ids": True})
    content = answer.choices[0].logprobs.content
    assert len(content) == len(answer.choices[0].token_ids)
    for entry in content:
        assert len(entry.top_logprobs) == 2
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob)
        assert bytes(entry.bytes).decode("utf-8", "replace") == entry.token
    plain = chat(client, logprobs=True)
    assert plain.choices[0].logprobs.content[0].top_logprobs == []


def test_streamed_logprobs_cover_every_token(client):
    chunks = list(chat(client, logprobs=True, top_logprobs=1, stream=True, extra_body={"ignore_eos": True}))
    entries = [e for chunk in chunks for choice in chunk.choices if choice.logprobs for e in choice.logprobs.content]
    assert len(entries) == 8


@pytest.mark.parametrize("stream", [False, True])
def test_the_tier_that_serves_is_told_to_who_asks_for_one(client, stream):
    """There is one tier, so whatever is asked for, its name comes, as OpenAI's does where another cannot be had."""
    for asked in ("auto", "default", "flex", "priority"):
        answer = chat(client, service_tier=asked, stream=stream)
        assert {one.service_tier for one in (answer if stream else [answer])} == {"default"}
        assert client.responses.create(model="tiny", input="x", service_tier=asked).service_tier == "default"
    answer = chat(client, stream=stream)
    assert {one.service_tier for one in (answer if stream else [answer])} == {None}


def test_all_roles_and_text_parts(client):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "noon", "tool_call_id": "1"},
        {"role": "user", "content": "Thanks"},
    ]
    answer = chat(client, messages, extra_body={"return_token_ids": True})
    plain = client.completions.create(
        model="tiny",
        max_tokens=1,
        prompt="<|system|>Be brief.<|end|><|system|>Be kind.<|end|><|user|>Hel\nlo<|end|><|assistant|><|end|>"
        "<|tool|>noon<|end|><|user|>Thanks<|end|><|assistant|>",
        extra_body={"return_token_ids": True},
    )
    assert answer.prompt_token_ids == plain.choices[0].prompt_token_ids


def test_template_variables_may_have_any_name(shared_server):
    for name in ("template", "self", "loop", "range", "bos_token", "not a name", ""):
        body = {"messages": USER, "max_tokens": 1, "chat_template_kwargs": {name: 1}}
        assert shared_server.post("/v1/chat/completions", body).status_code == 200, name


def test_assistant_messages_without_content(shared_server):
    """As OpenAI's API answers them: a refusal has its text elsewhere, and calls or thoughts may be all there is."""

    def prompt(**message: object) -> str:
        body = {"messages": [*USER, {"role": "assistant", **message}, *USER]}
        assert shared_server.post("/v1/chat/completions", {**body, "max_tokens": 1}).status_code == 200
        tokens = shared_server.post("/tokenize", body).json()["tokens"]
        return shared_server.post("/detokenize", {"tokens": tokens}).json()["prompt"]

    empty = prompt(content="")
    assert "<|assistant|><|end|>" in empty
    for message in ({}, {"content": None}, {"content": None, "tool_calls": []}, {"refusal": None}, {"content": []}):
        assert prompt(**message) == empty
    assert "<|assistant|>No.<|end|>" in prompt(content=None, refusal="No.")
    assert prompt(content="Yes.", refusal=None) == prompt(content="Yes.")


def test_the_last_message_can_be_continued(client):
    messages = [*USER, {"role": "assistant", "content": "Once upon"}]
    body = {"continue_final_message": True, "return_token_ids": True}
    answer = chat(client, messages, extra_body=body)
    plain = client.completions.create(
        model="tiny",
        prompt="<|user|>Hello<|end|><|assistant|>Once upon",
        max_tokens=8,
        temperature=0,
        extra_body={"return_token_ids": True},
    )
    assert answer.choices[0].token_ids == plain.choices[0].token_ids
    echoed = chat(client, messages, extra_body={**body, "echo": True})
    assert echoed.choices[0].message.content == "Once upon" + answer.choices[0].message.content


def test_models(client, shared_server):
    assert [card.id for card in client.models.list()] == ["tiny", "also-tiny"]
    assert client.models.retrieve("also-tiny").id == "also-tiny"
    assert shared_server.get("/v1/models/tiny").json()["max_model_len"] == 1024


def test_request_ids_are_kept(shared_server):
    body = {"prompt": "x", "max_tokens": 1}
    answer = shared_server.post("/v1/completions", body, headers={"X-Request-Id": "my-id.7"})
    assert answer.headers["x-request-id"] == "my-id.7" and answer.json()["id"] == "cmpl-my-id.7"
    made_up = shared_server.post("/v1/completions", body)
    assert len(made_up.headers["x-request-id"]) == 32
    hostile = shared_server.post("/v1/completions", body, headers={"X-Request-Id": "a" * 500})
    assert hostile.headers["x-request-id"] != "a" * 500
