"""Budgets of thoughts over HTTP: in each client's words, counted as output, and in the metrics."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest
from support.agent_chats import TEMPLATE
from support.reciting import Recital, small_tokenizer, write_reciting_model

CUE = "please search the whole tree"
SAID = "I look at one thing, and at two things; then three, and so on until ten.\n</think>\n\nIt is so."
FIELDS = ["thinking_token_budget", "reasoning_budget", "reasoning_budget_tokens", "thinking_budget_tokens"]
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def begin(start, tmp_path_factory):
    """Starts a server with more flags."""
    folder = tmp_path_factory.mktemp("thinks") / "model"
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    tokenizer = small_tokenizer([SAID, CUE], ("<|im_start|>", "<|im_end|>"), marks)
    write_reciting_model(folder, tokenizer, Recital({CUE: SAID}, TEMPLATE, "<|im_end|>"))
    flags = ("--served-model-name", "reciting", "--kv-cache-memory-bytes", "64MiB", "--max-model-len", "2048")
    message = ("--reasoning-budget-message", " Enough.")
    return lambda *more: start(*flags, *message, "--trust-request-chat-template", *more, model=folder)


@pytest.fixture(scope="module")
def server(begin):
    return begin()


def ask(server: Any, **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": CUE}], "temperature": 0, "max_tokens": 100, **fields}
    return server.post("/v1/chat/completions", body)


@pytest.mark.parametrize("field", [*FIELDS, "chat_template_kwargs"])
def test_each_clients_word_is_a_limit(server: Any, field: str) -> None:
    whole = ask(server).json()
    limited = ask(server, **{field: 5 if field in FIELDS else {"thinking_budget": 5}}).json()
    thoughts = limited["choices"][0]["message"]["reasoning"]
    assert thoughts.endswith(" Enough.") and whole["choices"][0]["message"]["reasoning"].startswith(thoughts[:-8])
    assert limited["usage"]["completion_tokens"] >= 5 + 3  # with the text that ends them
    assert limited["choices"][0]["finish_reason"] == "stop"
    assert "Enough" not in ask(server, **{field: -1 if field in FIELDS else {"thinking_budget": -1}}).text


def test_anthropics_budget_is_a_limit_and_the_metric_counts(server: Any) -> None:
    def reached() -> float:
        lines = server.get("/metrics").text.splitlines()
        name = "octavo:thinking_budget_reached_total"
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    before = reached()
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    asked: list[Any] = [{"role": "user", "content": CUE}]
    with client.messages.stream(
        model="reciting", max_tokens=100, messages=asked, thinking={"type": "enabled", "budget_tokens": 5}
    ) as stream:
        answer = stream.get_final_message()
    assert answer.content[0].type == "thinking" and answer.content[0].thinking.endswith(" Enough.")
    assert reached() == before + 1


def test_tokens_of_thoughts_are_counted_in_every_dialect_whole_and_streamed(server: Any) -> None:
    tokens = server.post("/tokenize", {"prompt": SAID, "add_special_tokens": False, "return_token_strs": True}).json()
    thoughts = tokens["token_strs"].index("</think>")
    asked: list[Any] = [{"role": "user", "content": CUE}]
    whole = ask(server).json()
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": thoughts}
    assert whole["usage"]["completion_tokens"] > thoughts + 3
    hidden = ask(server, include_reasoning=False, n=2).json()
    assert hidden["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2 * thoughts}
    assert ask(server, max_tokens=4).json()["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}
    off = ask(server, reasoning_effort="none", max_tokens=4).json()
    assert off["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    lines = ask(server, stream=True, stream_options={"include_usage": True}).text.split("\n\n")
    streamed = json.loads(lines[-3].removeprefix("data: "))["usage"]
    assert streamed["completion_tokens_details"] == {"reasoning_tokens": thoughts}
    plain = ask(server, chat_template=PLAIN, max_tokens=4).json()
    assert "completion_tokens_details" not in plain["usage"], "nothing tells thoughts from text"
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    fields: dict[str, Any] = {
        "model": "reciting",
        "max_tokens": 100,
        "messages": asked,
        "extra_body": {"temperature": 0},
    }
    answer = client.messages.create(**fields)
    with client.messages.stream(**fields, thinking={"type": "adaptive", "display": "omitted"}) as stream:
        for used in (answer.usage, stream.get_final_message().usage):
            assert used.output_tokens_details is not None
            assert used.output_tokens_details.thinking_tokens == thoughts
    made = server.post("/v1/responses", {"input": CUE, "temperature": 0, "store": False}).json()
    assert made["usage"]["output_tokens_details"] == {"reasoning_tokens": thoughts}


@pytest.mark.parametrize("field", ["both", "reasoning", "reasoning_content"])
def test_thoughts_have_one_name_where_a_client_would_add_two_up(server: Any, begin: Any, field: str) -> None:
    one = server if field == "both" else begin("--reasoning-field", field)
    names = ["reasoning", "reasoning_content"] if field == "both" else [field]
    message = ask(one).json()["choices"][0]["message"]
    assert sorted(name for name in message if name.startswith("reasoning")) == names
    assert all(message[name].startswith("I look at one thing") for name in names)
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in ask(one, stream=True).text.split("\n\n")[:-2]]
    assert sorted({name for delta in deltas for name in delta if name.startswith("reasoning")}) == names


def test_what_nothing_can_hold_is_refused_by_name(server: Any) -> None:
    answer = ask(server, reasoning_budget=5, chat_template=PLAIN)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "reasoning_budget"
    assert "between tags" in answer.json()["error"]["message"]
    assert ask(server, chat_template_kwargs={"thinking_budget": 5}, chat_template=PLAIN).status_code == 200
    answer = ask(server, reasoning_budget=5, thinking_token_budget=6)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "reasoning_budget"
    answer = ask(server, thinking_token_budget=-2)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "thinking_token_budget"
