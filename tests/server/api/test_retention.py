"""Prompts that clients want found again stay in the cache while others pass; usage says what was read and written."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
from openai.types import CompletionUsage
from openai.types.responses import Response
from support.sdk_types import fits

HOUR, MINUTES = ({"cache_control": {"type": "ephemeral", "ttl": ttl}} for ttl in ("1h", "5m"))
EXPLICIT = {"prompt_cache_breakpoint": {"mode": "explicit"}}
BLOCKS, SHARE = 120, 0.8  # blocks of 16 tokens, and how many of them may be kept


@pytest.fixture(scope="module")
def server(start):
    return start(
        "--served-model-name",
        "tiny",
        "--num-gpu-blocks-override",
        str(BLOCKS),
        "--max-model-len",
        "1000",
        "--prefix-retention-share",
        str(SHARE),
        "--prefix-retention-max",
        "1800",
    )


def words(name: str, count: int) -> str:
    return " ".join(f"{name}{number}" for number in range(count))


def message(server: Any, system: list[dict[str, Any]], said: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    body = {
        "model": "tiny",
        "max_tokens": 1,
        "system": system,
        "messages": [{"role": "user", "content": said}],
        **more,
    }
    answer = server.post("/v1/messages", body)
    assert answer.status_code == 200, answer.text
    used: dict[str, Any] = answer.json()["usage"]
    count = server.post("/v1/messages/count_tokens", {k: v for k, v in body.items() if k != "max_tokens"}).json()
    assert (
        sum(used[f"{name}_input_tokens"] for name in ("cache_read", "cache_creation")) + used["input_tokens"]
        == (count["input_tokens"])
    )
    return used


def flood(server: Any, times: int = 10) -> None:
    """Others come, with as many times the tokens as the cache holds."""
    for number in range(times * BLOCKS * 16 // 300):
        prompt = [(number * 7 + place) % 300 + 10 for place in range(400)]
        assert server.post("/v1/completions", {"model": "tiny", "prompt": prompt, "max_tokens": 1}).status_code == 200


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def test_a_prefix_is_found_after_ten_times_the_cache_and_usage_counts_it(server):
    system = [text(words("rule", 30), **HOUR), text(words("hint", 10), **MINUTES), text(words("now", 5))]
    first = message(server, system, [text("go")])
    created = first["cache_creation"]
    assert first["cache_read_input_tokens"] == 0
    assert created["ephemeral_1h_input_tokens"] > 3 * created["ephemeral_5m_input_tokens"] > 100
    assert 0 < first["input_tokens"] < 40
    flood(server)
    kept = re.search(r"^octavo:retained_blocks\{.*?\} (\S+)$", server.get("/metrics").text, re.MULTILINE)
    assert kept is not None and BLOCKS * SHARE >= float(kept[1]) >= first["cache_creation_input_tokens"] // 16
    again = message(server, [*system[:2], text("later")], [text("go on")])
    assert again["cache_read_input_tokens"] >= first["cache_creation_input_tokens"]
    assert again["cache_creation"] == {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0}


def test_a_tenant_who_wants_most_makes_room_for_others(server):
    one, other = ({"x-octavo-tenant": name, "x-octavo-tenant-id": f"{name}'s secret"} for name in ("one", "other"))

    def ask(name: str, headers: dict[str, str]) -> int:
        body = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": words(name, 40)}]}
        asked = {**body, "prompt_cache_retention": "24h"}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=asked, headers=headers, timeout=60)
        return int(answer.raise_for_status().json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert ask("mine", one) == 0
    for number in range(12):  # more than may be kept of all
        ask(f"theirs{number}", other)
    flood(server)
    assert ask("mine", one) > 100
    assert ask("theirs0", other) < 16, "what was not used for the longest time"


def test_who_wants_nothing_finds_nothing(server):
    system = [text(words("plain", 30))]
    used = message(server, system, [text("go")])
    assert used["cache_creation_input_tokens"] == 0
    flood(server)
    assert message(server, system, [text("go")])["cache_read_input_tokens"] < 16


def test_the_whole_prompt_tools_calls_and_results_are_kept(server):
    tools = [
        {"name": name, "description": words(name, 4), "input_schema": {"type": "object"}} for name in ("abba", "beta")
    ]
    assert message(server, [], [text("go")], **HOUR)["input_tokens"] == 0
    call = {"type": "tool_use", "id": "toolu_1", "name": "abba", "input": {"first": words("arguments", 4)}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": words("found", 20)}
    rest = []
    for place in range(4):  # of the one block that ends what is kept: from the last to the first
        marks = [HOUR if place == number else {} for number in range(4)]
        messages = [
            {"role": "user", "content": f"{place} go"},
            {"role": "assistant", "content": [{**call, **marks[2]}]},
            {"role": "user", "content": [{**result, **marks[1]}, text("and then", **marks[0])]},
        ]
        body = {"model": "tiny", "max_tokens": 1, "tools": [tools[0], {**tools[1], **marks[3]}], "messages": messages}
        answer = server.post("/v1/messages", body)
        assert answer.status_code == 200, answer.text
        used = answer.json()["usage"]
        rest.append(used["input_tokens"])
    assert rest == sorted(rest) and 0 < rest[0] < 20 < rest[1] < 40 < rest[2] < rest[3], rest


def chat(server: Any, **more: Any) -> CompletionUsage:
    body = {"model": "tiny", "max_tokens": 1, **more}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    return CompletionUsage.model_validate(answer.json()["usage"])


@pytest.mark.parametrize(
    ("more", "is_kept"),
    [
        ({"prompt_cache_options": {"ttl": "30m"}}, True),
        ({"prompt_cache_options": {"mode": "implicit", "ttl": "12h"}}, True),
        ({"prompt_cache_options": {"mode": "explicit"}}, False),
        ({"prompt_cache_retention": "24h"}, True),
        ({"prompt_cache_retention": "in_memory"}, False),
        ({"prompt_cache_key": "a"}, True),
        ({}, False),
    ],
    ids=str,
)
def test_prompts_of_chats_and_responses_are_kept_as_options_say(server, more, is_kept):
    name = f"w{len(str(more))}"
    prompt = words(name, 25)
    used = chat(server, messages=[{"role": "user", "content": prompt}], **more)
    details = used.prompt_tokens_details
    assert details.cache_write_tokens == (used.prompt_tokens - details.cached_tokens if is_kept else 0)
    flood(server, 2)
    answer = server.post("/v1/responses", {"model": "tiny", "max_output_tokens": 1, "input": prompt, **more})
    told = fits(Response, answer.text).usage
    assert told is not None
    assert (told.input_tokens_details.cached_tokens > used.prompt_tokens - 17) == is_kept
    assert told.input_tokens_details.cached_tokens + told.input_tokens_details.cache_write_tokens == (
        told.input_tokens if is_kept else told.input_tokens_details.cached_tokens
    )


def test_explicit_breakpoints_end_what_is_kept(server):
    options = {"prompt_cache_options": {"mode": "explicit"}}
    parts = [text(words("one", 20), **EXPLICIT), text(words("two", 20))]
    used = chat(server, messages=[{"role": "user", "content": parts}], **options)
    written = used.prompt_tokens_details.cache_write_tokens
    assert used.prompt_tokens * 0.4 < written < used.prompt_tokens * 0.6
    said = [{**part, "type": "input_text", "text": f"{part['text']} x"} for part in parts]
    body = {"model": "tiny", "max_output_tokens": 1, "input": [{"role": "user", "content": said}], **options}
    told = fits(Response, server.post("/v1/responses", body).text).usage
    assert told is not None and told.input_tokens_details.cached_tokens == pytest.approx(written, abs=17)
    assert told.input_tokens_details.cache_write_tokens == pytest.approx(2, abs=2)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("messages", {"system": [text("a", **HOUR)] * 5}, "cache_control takes at most 4 places in a request, got 5"),
        ("messages", {"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl"),
        ("messages", {"cache_control": {"type": "lasting"}}, 'cache_control.type: type "lasting" is not supported'),
        ("chat/completions", {"prompt_cache_options": {"ttl": "long"}}, "prompt_cache_options.ttl"),
        ("chat/completions", {"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [text("a", prompt_cache_breakpoint="yes")]}]},
            'messages.0.content.0.prompt_cache_breakpoint must be {"mode": "explicit"}',
        ),
        ("chat/completions", {"prompt_cache_retention": "forever"}, "prompt_cache_retention"),
    ],
)
def test_wishes_that_cannot_be_read_are_refused_by_name(server, path, body, words):
    full = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}], **body}
    answer = server.post(f"/v1/{path}", full)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text
