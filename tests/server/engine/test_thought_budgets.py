"""A budget of thoughts is a limit: they end within it and the text that closes them, and the answer follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.agent_chats import TEMPLATE
from support.reciting import Recital, small_tokenizer, write_reciting_model

from octavo import LLM, SamplingParams, StructuredOutputsParams

THOUGHT = "I look at one thing, and at two things; then three, and so on until ten or eleven, no fewer."
SAID = THOUGHT + "\n</think>\n\nIt is so."
CUE = "please search the whole tree"
OTHER, OTHER_SAID = "and then tell me what was found", "So.\n</think>\n\nIt was the other one."
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
WAYS: list[dict[str, Any]] = [
    {},
    {"async_scheduling": True},
    {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    {"enable_prefix_caching": False},
    {"enforce_eager": True},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("thinks")
    tokenizer = small_tokenizer([SAID, CUE, OTHER, OTHER_SAID], ("<|im_start|>", "<|im_end|>"), MARKS)
    write_reciting_model(path, tokenizer, Recital({CUE: SAID, OTHER: OTHER_SAID}, TEMPLATE, "<|im_end|>"))
    return path


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_thoughts_end_within_their_budget_and_the_answer_follows(folder: Path, way: dict[str, Any]) -> None:
    llm = LLM(str(folder), kv_cache_memory_bytes=64 << 20, reasoning_budget_message=" Enough.", **way)
    tokenizer = llm.tokenizer
    closing = tokenizer.encode(" Enough.\n</think>\n\n", add_special_tokens=False)
    thought = tokenizer.encode(THOUGHT, add_special_tokens=False)
    budgets = [0, 1, 3, 8, len(thought) + 5, None]
    chats = [[{"role": "user", "content": CUE}] for _ in budgets]
    beside = [{"role": "user", "content": OTHER}]
    params = [
        SamplingParams(temperature=0, max_tokens=200, skip_special_tokens=False, thinking_token_budget=budget)
        for budget in [*budgets, None]
    ]
    *outputs, other = llm.chat([*chats, beside], params, use_tqdm=False)
    assert other.outputs[0].text == OTHER_SAID  # as if it were alone
    for budget, output in zip(budgets, outputs, strict=True):
        ids = output.outputs[0].token_ids
        if budget is None or budget >= len(thought):
            assert output.outputs[0].text == SAID
            assert output.outputs[0].message["content"] == "It is so."
            continue
        assert ids[:budget] == thought[:budget]
        assert ids[budget : budget + len(closing)] == closing
        assert "</think>" not in tokenizer.decode(ids[budget + len(closing) :], skip_special_tokens=False)
        assert output.outputs[0].message.get("reasoning", "").endswith("Enough.")
        assert output.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_an_answer_in_a_form_follows_in_each_way(folder: Path, way: dict[str, Any]) -> None:
    llm = LLM(str(folder), kv_cache_memory_bytes=64 << 20, reasoning_budget_message=" Enough.", **way)
    form, budgets = StructuredOutputsParams(choice=["yes", "no"]), [0, 1, 3, 8]
    params = [
        SamplingParams(temperature=0, max_tokens=60, structured_outputs=form, thinking_token_budget=budget)
        for budget in budgets
    ]
    outputs = llm.chat([[{"role": "user", "content": CUE}] for _ in budgets], params, use_tqdm=False)
    for budget, output in zip(budgets, outputs, strict=True):
        answer = output.outputs[0]
        assert answer.message["content"] in ("yes", "no") and answer.finish_reason == "stop", budget
        assert answer.message["reasoning"].endswith("Enough.")


def test_a_grammar_goes_on_behind_the_thoughts(folder: Path) -> None:
    llm = LLM(str(folder), kv_cache_memory_bytes=64 << 20)
    form = StructuredOutputsParams(choice=["yes", "no"])
    params = SamplingParams(temperature=0, max_tokens=60, structured_outputs=form, thinking_token_budget=4, logprobs=0)
    (output,) = llm.chat([{"role": "user", "content": CUE}], params, use_tqdm=False)
    answer = output.outputs[0]
    assert answer.message["content"] in ("yes", "no") and answer.finish_reason == "stop"
    assert len(answer.logprobs) == len(answer.token_ids)  # what is appended is certain
    tools = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]
    params = SamplingParams(temperature=0, max_tokens=80, thinking_token_budget=4)
    (output,) = llm.chat(
        [{"role": "user", "content": CUE}], params, use_tqdm=False, tools=tools, tool_choice="required"
    )
    (call, *_) = output.outputs[0].message["tool_calls"]
    assert call["function"] == {"name": "now", "arguments": "{}"}


def test_a_limit_of_tokens_holds_inside_the_closing_text(folder: Path) -> None:
    llm = LLM(str(folder), kv_cache_memory_bytes=64 << 20)
    for most in (3, 4, 5):
        params = SamplingParams(temperature=0, max_tokens=most, thinking_token_budget=3)
        (output,) = llm.chat([{"role": "user", "content": CUE}], params, use_tqdm=False)
        assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (most, "length")


def test_a_budget_needs_a_chat_and_a_model_that_thinks(folder: Path) -> None:
    llm = LLM(str(folder), kv_cache_memory_bytes=64 << 20)
    params = SamplingParams(max_tokens=2, thinking_token_budget=3)
    with pytest.raises(ValueError, match="call LLM"):
        llm.generate("a", params, use_tqdm=False)
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="thinking_token_budget needs a chat template"):
        llm.chat([{"role": "user", "content": "a"}], params, use_tqdm=False, chat_template=plain)
    with pytest.raises(ValueError, match="thinking_token_budget must be"):
        SamplingParams(thinking_token_budget=-2)
