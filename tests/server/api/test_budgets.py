"""Budgets of thoughts over HTTP: in each client's words, counted as output, and in the metrics."""

from __future__ import annotations

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
def server(start, tmp_path_factory):
    folder = tmp_path_factory.mktemp("thinks") / "model"
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    tokenizer = small_tokenizer([SAID, CUE], ("<|im_start|>", "<|im_end|>"), marks)
    write_reciting_model(folder, tokenizer, Recital({CUE: SAID}, TEMPLATE, "<|im_end|>"))
    flags = ("--served-model-name", "reciting", "--kv-cache-memory-bytes", "64MiB", "--max-model-len", "2048")
    message = ("--reasoning-budget-message", " Enough.")
    return start(*flags, *message, "--trust-request-chat-template", model=folder)


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


def test_what_nothing_can_hold_is_refused_by_name(server: Any) -> None:
    answer = ask(server, reasoning_budget=5, chat_template=PLAIN)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "reasoning_budget"
    assert "between tags" in answer.json()["error"]["message"]
    assert ask(server, chat_template_kwargs={"thinking_budget": 5}, chat_template=PLAIN).status_code == 200
    answer = ask(server, reasoning_budget=5, thinking_token_budget=6)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "reasoning_budget"
    answer = ask(server, thinking_token_budget=-2)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "thinking_token_budget"
