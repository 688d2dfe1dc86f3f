"""Loops of thirty turns over HTTP: the cache has all that was computed, however the client writes answers back."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import ollama
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


def ollama_chats(server: Any, turns: int) -> list[tuple[int, int]]:
    """The same by Ollama's client, streamed, with thoughts sent back as they came and calls that have no ids."""
    client = ollama.Client(server.url)
    tools = [{"type": "function", "function": {"name": "Read", "parameters": SCHEMA}}]
    messages: list[Any] = [{"role": "user", "content": CUES[0]}]
    found = []
    for turn in range(turns):
        before = total(server, "vllm:prefix_cache_hits_total")
        lines = [*client.chat("looping", messages, tools=tools, think=True, stream=True, options={"temperature": 0})]
        (call,) = [call for line in lines for call in line.message.tool_calls or []]
        thinking = "".join(line.message.thinking or "" for line in lines)
        assert (call.function.arguments["path"], thinking) == (f"{NAMES[turn]}.py", f"Next is {NAMES[turn]}.")
        cached = int(total(server, "vllm:prefix_cache_hits_total") - before)
        found.append((cached, lines[-1].prompt_eval_count + lines[-1].eval_count))
        messages.append(ollama.Message(role="assistant", content="", thinking=thinking, tool_calls=[call]))
        messages.append({"role": "tool", "tool_name": "Read", "content": CUES[min(turn + 1, len(CUES) - 1)]})
    return found


def total(server: Any, name: str) -> float:
    found = re.search(rf"^{name}{{.*?}} (\S+)$", server.get("/metrics").text, re.MULTILINE)
    return float(found[1]) if found else 0.0


@pytest.mark.slow
@pytest.mark.parametrize("talk", [chats, responses, ollama_chats])
def test_the_cache_has_each_prompt_and_answer_of_the_turn_before(server, talk):
    found = talk(server, 30)
    for (_, known), (cached, _) in pairwise(found):
        assert cached >= known - BLOCK, "all of the last turn, but for a block that was not full"
    assert total(server, "octavo:replay_hits_total") >= 29
    assert not re.search(r"^octavo:replay_misses_total\{.*?\} [1-9]", server.get("/metrics").text, re.MULTILINE)


def test_without_replay_a_turn_is_computed_again(start, folder):
    found = chats(start(*FLAGS, "--no-replay", model=folder), 3)
    assert all(cached < known - 2 * BLOCK for (_, known), (cached, _) in pairwise(found))


# By dialect: its path, what a request has beside the conversation, and the name of its limit of tokens.
FUNCTION = {"name": "Read", "parameters": SCHEMA}
CHAT = {"tools": [{"type": "function", "function": FUNCTION}]}
ASKED: dict[str, Callable[[list[Any], int], dict[str, Any]]] = {
    "/v1/chat/completions": lambda said, most: {**CHAT, "messages": said, "temperature": 0, "max_tokens": most},
    "/v1/responses": lambda said, most: {
        "tools": [{"type": "function", **FUNCTION, "strict": False}],
        "input": said,
        "temperature": 0,
        "max_output_tokens": most,
    },
    "/v1/messages": lambda said, most: {
        "tools": [{"name": "Read", "input_schema": SCHEMA}],
        "messages": said,
        "temperature": 0,
        "max_tokens": most,
    },
    "/api/chat": lambda said, most: {
        **CHAT,
        "messages": said,
        "options": {"temperature": 0, "num_predict": most},
        "stream": False,
    },
}


def sent_back(path: str, answer: dict[str, Any], cue: str) -> tuple[str, list[Any], list[Any]]:
    """Why an answer ended, the names and arguments of its calls, and what the client says next: the answer as it came,
    and an error, as its calls' result or, where it has none, as the user's."""
    user = {"role": "user", "content": cue}
    if path == "/v1/responses":
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        results = [{"type": "function_call_output", "call_id": call["call_id"], "output": cue} for call in calls]
        return answer["status"], [call["arguments"] for call in calls], [*answer["output"], *(results or [user])]
    if path == "/v1/messages":
        calls = [block for block in answer["content"] if block["type"] == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": cue, "is_error": True} for call in calls
        ]
        said = {"role": "assistant", "content": answer["content"]}
        return (
            answer["stop_reason"],
            [call["input"] for call in calls],
            [said, {"role": "user", "content": results or cue}],
        )
    if path == "/api/chat":
        message, reason, extra = answer["message"], answer["done_reason"], {"tool_name": "Read"}
    else:
        (choice,) = answer["choices"]
        message, reason, extra = choice["message"], choice["finish_reason"], {}
    calls = message.get("tool_calls") or []
    results = [{"role": "tool", "tool_call_id": call.get("id"), "content": cue, **extra} for call in calls]
    return reason, [call["function"]["arguments"] for call in calls], [message, *(results or [user])]


@pytest.mark.parametrize("path", ASKED)
def test_an_answer_that_was_cut_in_its_call_can_be_sent_back(server, path):
    """Wherever it was cut: the conversation goes on, the prompt before the answer is in the cache, and the next call is
    whole. Ollama's form has no place for a call that is not."""
    name, seen = NAMES[1], set()
    for most in (4, 14, 22, 26, 32, 38):
        said: list[Any] = [{"role": "user", "content": f"{CUES[0]}"}]
        answer = server.post(path, {"model": "looping", **ASKED[path](said, most)}).json()
        reason, cut, more = sent_back(path, answer, f"The answer was cut: {CUES[1]}")
        assert reason in ("length", "incomplete", "max_tokens")
        seen.add(json.dumps(cut))
        hits = total(server, "vllm:prefix_cache_hits_total")
        again = server.post(path, {"model": "looping", **ASKED[path]([*said, *more], 200)})
        assert again.status_code == 200, again.text
        assert total(server, "vllm:prefix_cache_hits_total") > hits + 2 * BLOCK
        reason, (arguments,), _ = sent_back(path, again.json(), "")
        assert reason in ("tool_calls", "completed", "tool_use", "stop")
        whole = json.loads(arguments) if isinstance(arguments, str) else arguments
        assert whole == {"path": f"{name}.py", "a": name}
    assert seen == {"[]"} if path == "/api/chat" else len(seen) > 3


def test_a_miss_says_why(server):
    """Each answer is remembered with its prompt: behind another prompt it is changed, one that nobody said unknown."""

    def misses(why: str) -> float:
        found = re.search(
            rf'^octavo:replay_misses_total{{.*why="{why}".*}} (\S+)$', server.get("/metrics").text, re.MULTILINE
        )
        return float(found[1]) if found else 0.0

    path = "/v1/chat/completions"
    asked = {"role": "user", "content": CUES[0]}
    answer = server.post(path, {"model": "looping", **ASKED[path]([asked], 200)}).json()
    _, _, more = sent_back(path, answer, CUES[1])
    other = [{"role": "assistant", "content": "Nobody said this."}, {"role": "user", "content": CUES[1]}]
    changed = {"role": "user", "content": f"Please: {CUES[0]}"}
    for said, added in (([asked, *more], (0, 0)), ([changed, *more], (1, 0)), ([asked, *other], (0, 1))):
        before = misses("changed"), misses("unknown")
        assert server.post(path, {"model": "looping", **ASKED[path](said, 1)}).status_code == 200
        assert (misses("changed") - before[0], misses("unknown") - before[1]) == added
