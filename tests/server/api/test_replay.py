"""Loops of thirty turns over HTTP: the cache has all that was computed, however the client writes answers back."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest
from support.agent_chats import FULL_TEMPLATE
from support.reciting import Recital, small_tokenizer, write_reciting_model

NAMES = [f"{first}{second}" for first in ("north", "south", "east", "west", "up") for second in "abcdef"]
# Spoken with more space than the template writes, and with arguments in another order than the client's.
CALL = "<tool_call>\n<function=Read>\n<parameter=path>\n{0}.py\n</parameter>\n<parameter=a>\n{0}\n</parameter>\n"
SCRIPTS = {
    f"the file is read to its last line {before}": f"Next is {name}.\n\n</think>\n\n\n"
    f"{CALL.format(name)}</function>\n</tool_call>\n"
    for before, name in pairwise(["first", *NAMES])
}
CUES = list(SCRIPTS)
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "a": {"type": "string"}}}
BLOCK = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("looping") / "model"
    special, marks = ("<|im_start|>", "<|im_end|>"), ("<think>", "</think>", "<tool_call>", "</tool_call>")
    backend = small_tokenizer([*SCRIPTS, *SCRIPTS.values()], special, marks)
    write_reciting_model(found, backend, Recital(SCRIPTS, FULL_TEMPLATE, "<|im_end|>"))
    return found


FLAGS = (
    "--served-model-name",
    "looping",
    "--kv-cache-memory-bytes",
    "128MiB",
)


@pytest.fixture(scope="module")
def server(start, folder):
    return start(*FLAGS, model=folder)


def sorted_again(arguments: str) -> str:
    return json.dumps(json.loads(arguments), sort_keys=True, separators=(",", ":"))


def chats(server: Any, turns: int) -> list[tuple[int, int]]:
    """The cached tokens of each turn, and those of its prompt and answer; thoughts are not sent back."""
    tools = [{"type": "function", "function": {"name": "Read", "parameters": SCHEMA}}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": CUES[0]}]
    found = []
    for turn in range(turns):
        body = {"model": "looping", "messages": messages, "tools": tools, "temperature": 0, "max_tokens": 200}
        answer = server.post("/v1/chat/completions", body).json()
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        used = answer["usage"]
        found.append((used["prompt_tokens_details"]["cached_tokens"], used["total_tokens"]))
        function = {"name": "Read", "arguments": sorted_again(call["function"]["arguments"])}
        messages.append({"role": "assistant", "content": None, "tool_calls": [{**call, "function": function}]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": CUES[min(turn + 1, len(CUES) - 1)]})
    return found


def responses(server: Any, turns: int) -> list[tuple[int, int]]:
    """The same; nothing is stored."""
    tools = [{"type": "function", "name": "Read", "parameters": SCHEMA, "strict": False}]
    items: list[dict[str, Any]] = [{"role": "user", "content": CUES[0]}]
    found = []
    for turn in range(turns):
        body = {"model": "looping", "input": items, "tools": tools, "temperature": 0, "store": False}
        answer = server.post("/v1/responses", {**body, "max_output_tokens": 200}).json()
        (call,) = [item for item in answer["output"] if item["type"] == "function_call"]
        used = answer["usage"]
        found.append((used["input_tokens_details"]["cached_tokens"], used["total_tokens"]))
        items.append({**call, "arguments": sorted_again(call["arguments"])})
        result = CUES[min(turn + 1, len(CUES) - 1)]
        items.append({"type": "function_call_output", "call_id": call["call_id"], "output": result})
    return found


@pytest.mark.slow
@pytest.mark.parametrize("talk", [chats, responses])
def test_the_cache_has_each_prompt_and_answer_of_the_turn_before(server, talk):
    found = talk(server, 30)
    for (_, known), (cached, _) in pairwise(found):
        assert cached >= known - BLOCK, "all of the last turn, but for a block that was not full"
    text = server.get("/metrics").text
    hits = re.search(r"^octavo:replay_hits_total\{.*?\} (\S+)$", text, re.MULTILINE)
    assert hits is not None and float(hits[1]) >= 29
    assert not re.search(r"^octavo:replay_misses_total\{.*?\} [1-9]", text, re.MULTILINE)


def test_without_replay_a_turn_is_computed_again(start, folder):
    found = chats(start(*FLAGS, "--no-replay", model=folder), 3)
    assert all(cached < known - 2 * BLOCK for (_, known), (cached, _) in pairwise(found))
