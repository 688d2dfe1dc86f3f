"""Flags for agents' servers: one started with them all answers otherwise than one without."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.scripted_model import TEMPLATE

KEEPS = "{% if m.reasoning_content and (preserve_thinking or loop.last) %}"
DROPPING = TEMPLATE.replace("{% if m.reasoning_content %}", KEEPS)
ZONE = {"type": "object", "properties": {"zone": {"enum": [7]}}, "required": ["zone"], "additionalProperties": False}


@pytest.fixture(scope="module")
def flagged(start_scripted, tmp_path_factory):
    assert DROPPING != TEMPLATE
    template = tmp_path_factory.mktemp("flags") / "template"
    template.write_text(DROPPING)
    return start_scripted(
        "--seal-key",
        "a secret of two servers",
        "--tool-strict-level",
        "parameter",
        "--preserve-reasoning",
        "never",
        "--prefix-retention-max",
        "0",
        "--chat-template",
        str(template),
    )


def test_seals_open_where_the_key_is_the_same(scripted, flagged):
    """Thoughts that a client sends back are in the prompt of a server with the key, and in no other's."""
    asked = {"role": "user", "content": "Is it? [reason]"}
    body = {
        "model": "scripted",
        "max_tokens": 50,
        "temperature": 0,
        "thinking": {"type": "enabled", "budget_tokens": 40},
    }

    def told(server: Any, block: dict[str, Any]) -> int:
        said = [asked, {"role": "assistant", "content": [block, {"type": "text", "text": "It is."}]}]
        answer = server.post("/v1/messages/count_tokens", {"model": "scripted", "messages": said})
        assert answer.status_code == 200, answer.text
        return int(answer.json()["input_tokens"])

    for server, other in ((scripted, flagged), (flagged, scripted)):
        (thought, _) = server.post("/v1/messages", {**body, "messages": [asked]}).json()["content"]
        empty = {**thought, "thinking": ""}
        assert thought["thinking"] == "Is it so?"
        assert told(server, empty) == told(server, {**thought, "signature": ""})
        assert told(other, empty) == told(other, {**empty, "signature": ""}) < told(other, {**thought, "signature": ""})


def test_a_strict_level_holds_the_arguments_of_tools_that_ask_for_nothing(scripted, flagged):
    tools = [{"type": "function", "function": {"name": "now", "parameters": ZONE}}]
    body = {
        "messages": [{"role": "user", "content": "Time? [call]"}],
        "tools": tools,
        "max_tokens": 40,
        "temperature": 0,
        "parallel_tool_calls": False,
    }
    found = []
    for server in (scripted, flagged):
        answer = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]
        (call,) = answer["tool_calls"]
        found.append(json.loads(call["function"]["arguments"]))
    assert found == [{"zone": "UTC"}, {"zone": 7}]


def test_reasoning_of_earlier_turns_is_left_out_unless_a_request_keeps_it(flagged):
    said = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y", "reasoning_content": "I wonder about it."},
        {"role": "user", "content": "z"},
    ]

    def prompt(**more: Any) -> str:
        tokens = flagged.post("/tokenize", {"messages": said, **more}).json()["tokens"]
        text: str = flagged.post("/detokenize", {"tokens": tokens}).json()["prompt"]
        return text

    assert "wonder" not in prompt()
    assert "wonder" in prompt(chat_template_kwargs={"preserve_thinking": True})


def test_the_longest_time_that_prompts_are_kept_may_be_none(scripted, flagged):
    """And usage says that nothing was written."""
    found = []
    for server in (scripted, flagged):
        asked = {"messages": [{"role": "user", "content": "kept " * 40 + "[empty]"}], "max_tokens": 1}
        used = server.post("/v1/chat/completions", {**asked, "prompt_cache_options": {"ttl": "30m"}}).json()["usage"]
        found.append(used["prompt_tokens_details"]["cache_write_tokens"])
    assert found[0] > 0 and found[1] == 0
