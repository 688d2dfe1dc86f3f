"""What models do in every dialect: they reason, call tools, are cut off or say nothing; streamed and whole, strictly in
the types of the SDKs, and whatever the request is."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from anthropic.types import ErrorResponse, Message, RawMessageStreamEvent
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from support.examples import examples_of
from support.folded import PATHS, body_for, fold_responses, streamed, whole
from support.scripted_model import SCRIPTS
from support.sdk_types import fits, named_events

from octavo.entrypoints.generation.logprobs import ChatLogprob
from octavo.entrypoints.responses.logprobs import TextLogprobs

ZONE = {"type": "object", "properties": {"zone": {"type": "string"}}}
NOW = {"name": "now", "description": "the time", "parameters": ZONE}
AGENT = [
    {"type": "function", **NOW, "strict": False},
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
    },
    {"type": "namespace", "name": "mcp__clock__", "description": "A clock.", "tools": [{"type": "function", **NOW}]},
    {"type": "web_search", "external_web_access": False},
    {"type": "image_generation", "output_format": "png"},
    {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": ZONE},
]
# (reasoning, text, calls) of each script
SAID: dict[str, tuple[str, str, list[tuple[str, str]]]] = {
    "[reason]": ("Is it so?", "It is so é 日.", []),
    "[call]": ("I need the time.", "Let me look.", [("now", '{"zone": "UTC"}')]),
    "[cut]": ("", "Look:", [("now", '{"zone": "UTUTUT')]),
    "[endless]": ("on and onon and onon and onon", "", []),
    "[empty]": ("", "", []),
    "[lines]": ("", "a\u2028bc\x85de\u2029f", []),
    "[plain]": ("", "One two STOP three", []),
}


@pytest.mark.parametrize("dialect", PATHS)
def test_unicode_line_separators_end_no_line_of_a_stream(scripted, dialect):
    """httpx's `iter_lines`, with which Ollama's client reads, ends lines where `str.splitlines` does."""
    body = body_for(dialect, "[lines]", 8, [], None) | {"stream": True}
    with httpx.stream("POST", scripted.url + PATHS[dialect], json=body, timeout=90) as answer:
        lines = list(answer.iter_lines())
        assert answer.status_code == 200
    data = [line.removeprefix("data: ") for line in lines if line and not line.startswith("event: ")]
    said = json.dumps([json.loads(line) for line in data if line != "[DONE]"], ensure_ascii=False)
    assert "\x85" in said and "\u2028" in said and "\u2029" in said


@pytest.mark.parametrize("script", SAID)
def test_answers_of_any_script_fit_the_types(scripted, script):
    tool = NOW if script in ("[call]", "[cut]") else None
    for dialect in PATHS:
        body = body_for(dialect, script, 8, [], tool)
        reasoning, text, calls, _ = whole(scripted.url, dialect, body)
        as_text = [(name, args if isinstance(args, str) else json.dumps(args)) for name, args in calls]
        expected = SAID[script]
        if script == "[cut]" and dialect != "responses" and dialect != "chat":  # these have objects
            as_text = as_text and expected[2]
            expected = (*expected[:2], [] if dialect == "ollama" else expected[2])
        assert (reasoning, text.strip(), as_text) == expected, dialect
        assert streamed(scripted.url, dialect, body) == whole(scripted.url, dialect, body)
    for dialect, kind, event_kind in (
        ("messages", Message, RawMessageStreamEvent),
        ("responses", Response, ResponseStreamEvent),
    ):
        body = body_for(dialect, script, 8, ["STOP"], tool)
        answer = fits(kind, scripted.post(PATHS[dialect], body).text)
        for name, data in named_events(scripted.url + PATHS[dialect], body):
            if name != "ping":
                fits(event_kind, data)
        if dialect == "messages":
            ends = {"[call]": "tool_use", "[cut]": "max_tokens", "[endless]": "max_tokens", "[plain]": "stop_sequence"}
            assert answer.stop_reason == ends.get(script, "end_turn")
            assert answer.stop_sequence == ("STOP" if script == "[plain]" else None)
        else:
            assert answer.status == ("incomplete" if script in ("[cut]", "[endless]") else "completed")


def test_a_strict_tool_is_called_as_the_model_spells_it(scripted):
    """With line breaks that its template does not write."""
    for dialect in ("chat", "messages", "responses"):
        *_, calls, _ = whole(scripted.url, dialect, body_for(dialect, "[call]", 20, [], {**NOW, "strict": True}))
        assert [name for name, _ in calls] == ["now"], dialect


# An agent's loop: what is sent back is read as what was said.


def test_reasoning_comes_back_in_every_form(scripted):
    """Text, a summary, encrypted_content, an id: the prompt of the next turn is the same, and longer than without."""
    asked: dict[str, Any] = {"temperature": 0, "include": ["reasoning.encrypted_content"]}
    user = {"role": "user", "content": "[reason]"}

    def tokens(items: list[Any], **more: Any) -> int:
        count = scripted.post("/v1/responses/input_tokens", {"input": [*items, user], **more})
        assert count.status_code == 200, count.text
        return count.json()["input_tokens"]

    for summary in (None, "auto"):
        body = {**asked, "input": [user], "reasoning": {"summary": summary}}
        answer = scripted.post("/v1/responses", body).json()
        fits(Response, json.dumps(answer))
        events = named_events(scripted.url + "/v1/responses", body)
        for _, data in events:
            fits(ResponseStreamEvent, data)
        folded = fold_responses(events)
        thoughts, said = answer["output"]
        assert [thoughts[key] for key in ("summary", "content", "encrypted_content")] == [
            folded["output"][0][key] for key in ("summary", "content", "encrypted_content")
        ]
        shown = thoughts["summary"] if summary else thoughts["content"]
        assert [part["text"] for part in shown] == ["Is it so?"] and answer["reasoning"]["summary"] == summary
        sealed = {"type": "reasoning", "summary": [], "encrypted_content": thoughts["encrypted_content"]}
        counts = {
            tokens([user, thoughts, said]),
            tokens([user, sealed, said]),
            tokens([], previous_response_id=answer["id"]),
            tokens([user, {"type": "item_reference", "id": thoughts["id"]}, said]),
        }
        assert len(counts) == 1 and counts.pop() > tokens([user, {**sealed, "encrypted_content": "gAAAA"}, said])
        items = scripted.get(f"/v1/responses/{answer['id']}/input_items").text
        fits(ResponseItemList, items)
    body = {"max_tokens": 60, "temperature": 0, "messages": [user]}
    message = scripted.post("/v1/messages", body).json()
    said = [user, {"role": "assistant", "content": message["content"]}, user]
    bare = [user, {"role": "assistant", "content": message["content"][1:]}, user]
    counts = [scripted.post("/v1/messages/count_tokens", {"messages": one}).json() for one in (said, bare)]
    assert counts[0]["input_tokens"] > counts[1]["input_tokens"]
    hidden = scripted.post("/v1/messages", {**body, "thinking": {"type": "adaptive", "display": "omitted"}}).json()
    thinking, text = hidden["content"]
    assert (thinking["type"], thinking["thinking"], text) == ("thinking", "", message["content"][1])
    sealed = [user, {"role": "assistant", "content": hidden["content"]}, user]
    assert scripted.post("/v1/messages/count_tokens", {"messages": sealed}).json() == counts[0]
    thinking["signature"] = "EqQB" + thinking["signature"]
    assert scripted.post("/v1/messages/count_tokens", {"messages": sealed}).json() == counts[1], "a foreign one"


def test_an_agents_tools(scripted):
    """Functions, custom tools and namespaces have the client's names; hosted tools beside them are left out."""
    body: dict[str, Any] = {"tools": AGENT, "temperature": 0, "text": {"verbosity": "low"}, "parallel_tool_calls": True}
    items: list[dict[str, Any]] = []
    for script, kind, said in (
        ("[patch]", "custom_tool_call", {"name": "apply_patch", "input": '*** Begin\n+é "x"'}),
        ("[remote]", "function_call", {"name": "now", "namespace": "mcp__clock__", "arguments": "{}"}),
    ):
        items.append({"role": "user", "content": script})
        asked = {**body, "input": items}
        answer = fits(Response, scripted.post("/v1/responses", asked).text)
        events = named_events(scripted.url + "/v1/responses", asked)
        for _, data in events:
            fits(ResponseStreamEvent, data)
        (call,) = [item for item in fold_responses(events)["output"] if item["type"] == kind]
        assert {key: call[key] for key in said} == said
        (same,) = [item.to_dict() for item in answer.output if item.type == kind]
        assert {key: same[key] for key in said} == said
        result = {
            "type": f"{kind}_output",
            "call_id": call["call_id"],
            "output": [{"type": "input_text", "text": "ok"}],
        }
        items += [call, result]
        kept = scripted.post("/v1/responses", {**body, "input": [result], "previous_response_id": answer.id})
        assert kept.status_code == 200, kept.text
        fits(ResponseItemList, scripted.get(f"/v1/responses/{kept.json()['id']}/input_items").text)
    assert [tool.type for tool in answer.tools] == ["function", "custom", "namespace", "tool_search"]
    later = [{"type": "additional_tools", "role": "developer", "tools": AGENT}, items[0]]
    assert scripted.post("/v1/responses", {"input": later}).status_code == 200
    named = scripted.post("/v1/responses", {**asked, "tool_choice": {"type": "custom", "name": "apply_patch"}}).json()
    assert [item["type"] for item in named["output"]][-1] == "custom_tool_call"
    alone = scripted.post("/v1/responses", {"input": "x", "tools": AGENT[3:5]})
    assert alone.status_code == 400 and alone.json()["error"]["param"] == "tools.0.type"


def test_logprobs_of_texts(scripted):
    body: dict[str, Any] = {
        "input": "[reason]",
        "temperature": 0,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    answer = fits(Response, scripted.post("/v1/responses", body).text)
    (content,) = answer.output[1].content
    assert b"".join(bytes(one.bytes) for one in content.logprobs).decode().lstrip() == content.text == "It is so é 日."
    assert all(len(one.top_logprobs) == 2 and one.top_logprobs[0].token == one.token for one in content.logprobs)
    events = named_events(scripted.url + "/v1/responses", body)
    deltas = [json.loads(data) for kind, data in events if kind == "response.output_text.delta"]
    fold_responses(events)
    assert [one["token"] for delta in deltas for one in delta["logprobs"]] == [one.token for one in content.logprobs]
    assert json.loads(events[-1][1])["response"]["top_logprobs"] == 2
    none = scripted.post("/v1/responses", {**body, "include": [], "top_logprobs": 0}).json()
    assert none["output"][1]["content"][0]["logprobs"] == []


@given(
    st.lists(st.tuples(st.binary(max_size=3), st.booleans()), max_size=12),
    st.lists(st.integers(1, 6), min_size=1, max_size=12),
)
def test_each_token_belongs_to_the_text_that_it_begins_in(tokens, sizes):
    """Tokens of tags are nobody's; a token that two texts share is that of the first."""
    data = "".join(f"{i:03}" for i in range(20))
    finder, at = TextLogprobs(), 0
    given_tokens = []
    for piece, _ in tokens:
        size = len(piece) + 1
        given_tokens.append(ChatLogprob(str(at), 0.0, list(data[at : at + size].encode()), []))
        at += size
    finder.add(given_tokens)
    found, start = [], 0
    for size in sizes:
        if start + size > at:
            break
        found += finder.take(data[start : start + size])
        start += size
    assert [int(one.token) for one in found] == [int(one.token) for one in given_tokens if int(one.token) < start]


def test_a_token_that_ends_a_tag_belongs_to_the_text_behind_it():
    finder = TextLogprobs()
    finder.add([ChatLogprob(piece, 0.0, list(piece.encode()), []) for piece in ("</t", "> It", " is", " so")])
    assert [one.token for one in finder.take("It is")] == ["> It", " is"]
    assert [one.token for one in finder.take(" so")] == [" so"]


def test_a_conversation_that_is_too_long_loses_its_beginning(scripted):
    turns = [{"role": "user" if i % 2 == 0 else "assistant", "content": f"{i} " + "fox " * 40} for i in range(40)]
    asked = {"input": [*turns, {"role": "user", "content": "[reason]"}], "temperature": 0, "max_output_tokens": 60}
    cut = fits(Response, scripted.post("/v1/responses", {**asked, "truncation": "auto"}).text)
    assert cut.truncation == "auto" and 600 < cut.usage.input_tokens <= 1024 - 60
    assert cut.output_text == "It is so é 日."
    refused = scripted.post("/v1/responses", asked)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    assert "truncate_prompt_tokens" not in error["message"]
    alone = {**asked, "input": "fox " * 2_000, "truncation": "auto"}
    assert scripted.post("/v1/responses", alone).json()["error"]["code"] == "context_length_exceeded"
    for route, body in (("chat/completions", {"messages": turns}), ("completions", {"prompt": "fox " * 2_000})):
        error = scripted.post(f"/v1/{route}", body).json()["error"]
        assert error["code"] == "context_length_exceeded" and "truncate_prompt_tokens" in error["message"]


@settings(max_examples=examples_of(12), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_stream_is_the_whole_answer(scripted, shared_server, data):
    """Whatever the prompt, tools, limit and stop strings are, at temperature 0."""
    server = data.draw(st.sampled_from((scripted, shared_server)))
    prompt = data.draw(st.sampled_from(sorted(SCRIPTS)) if server is scripted else st.text("the fox 日{}<", max_size=9))
    pieces = [piece[:4].strip() for script in SCRIPTS.values() for piece in script if piece.strip()]
    stop = data.draw(st.lists(st.sampled_from([*pieces, "e", "a", " "]), max_size=3))
    tool = data.draw(st.sampled_from((None, NOW)))
    limit = data.draw(st.integers(1, 25))
    for dialect in PATHS:
        body = body_for(dialect, prompt, limit, [one for one in stop if one], tool)
        assert streamed(server.url, dialect, body) == whole(server.url, dialect, body), (dialect, body)


@pytest.mark.slow
def test_a_stream_whose_engine_dies_ends_with_the_dialects_error(start_scripted):
    server = start_scripted("--attention-backend", "reference")  # which takes its time
    with httpx.Client(base_url=server.url, timeout=90) as client, contextlib.ExitStack() as stack:

        def begin(dialect: str) -> tuple[Iterator[str], str]:
            body = {**body_for(dialect, "[endless]", 900, [], None), "stream": True}
            lines = stack.enter_context(client.stream("POST", PATHS[dialect], json=body)).iter_lines()
            return lines, next(lines)

        with ThreadPoolExecutor() as pool:  # at once: none is to end before the kill
            streams = dict(zip(PATHS, pool.map(begin, PATHS), strict=True))
        os.kill(server.core_pid, signal.SIGKILL)
        last = {}
        for dialect, (lines, _) in streams.items():
            rest = [line.removeprefix("data: ") for line in lines if line and not line.startswith("event: ")]
            last[dialect] = next(line for line in reversed(rest) if line != "[DONE]")
    assert fits(ErrorResponse, last["messages"]).error.type in ("api_error", "overloaded_error")
    failed = fits(ResponseStreamEvent, last["responses"])
    assert failed.type == "response.failed" and failed.response.error.code == "server_error"
    assert json.loads(last["ollama"]).keys() == {"error"} and json.loads(last["chat"]).keys() == {"error"}


# Adversaries

FULL: dict[str, dict[str, Any]] = {
    "/v1/messages": {
        "model": "scripted",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "Be brief."}],
        "stream": False,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "[call]"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                    {"type": "tool_use", "id": "toolu_1", "name": "now", "input": {"zone": "UTC"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "12"}]},
                    {"type": "text", "text": "[plain]"},
                ],
            },
        ],
        "tools": [{"name": "now", "description": "time", "input_schema": ZONE}],
        "tool_choice": {"type": "auto"},
        "temperature": 0,
        "top_p": 1,
        "top_k": 5,
        "stop_sequences": ["zzz"],
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "low"},
        "metadata": {"user_id": "x"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
    },
    "/v1/responses": {
        "model": "scripted",
        "max_output_tokens": 5,
        "instructions": "Be brief.",
        "stream": False,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "[call]"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], "encrypted_content": "octavo:"},
            {"type": "function_call", "call_id": "c", "name": "now", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "12"}]},
            {"type": "custom_tool_call", "call_id": "d", "name": "apply_patch", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "d", "output": "ok"},
            {"type": "message", "role": "user", "content": "[plain]"},
        ],
        "tools": AGENT,
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]},
        "temperature": 0,
        "top_p": 1,
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "truncation": "auto",
        "metadata": {"a": "b"},
        "top_logprobs": 1,
        "store": False,
    },
    "/api/chat": {
        "model": "scripted",
        "stream": False,
        "think": True,
        "format": "",
        "keep_alive": "5m",
        "logprobs": False,
        "messages": [
            {"role": "user", "content": "[call]"},
            {
                "role": "assistant",
                "content": "",
                "thinking": "Hm.",
                "tool_calls": [{"function": {"name": "now", "arguments": {"zone": "UTC"}}}],
            },
            {"role": "tool", "tool_name": "now", "content": "12"},
            {"role": "user", "content": "[plain]"},
        ],
        "tools": [{"type": "function", "function": NOW}],
        "truncate": True,
        "options": {"num_predict": 5, "temperature": 0, "top_k": 5, "top_p": 1, "seed": 1, "num_ctx": 900},
    },
    "/v1/chat/completions": {
        "model": "scripted",
        "stream": False,
        "max_tokens": 5,
        "temperature": 0,
        "stop": ["zzz"],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "[call]"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "12"},
            {"role": "user", "content": "[plain]"},
        ],
        "tools": [{"type": "function", "function": NOW}],
        "tool_choice": "auto",
        "logprobs": True,
        "top_logprobs": 1,
        "response_format": {"type": "text"},
        "reasoning_effort": "low",
        "stream_options": None,
    },
}
JUNK = st.one_of(
    st.sampled_from(
        [
            None,
            True,
            False,
            0,
            -1,
            1,
            0.5,
            2**63,
            2**70,
            -(2**70),
            1e308,
            -0.0,
            "",
            " ",
            "x",
            "\x00",
            "x" * 9_000,
            [],
            {},
            [None],
            [[]],
            [{}],
            {"type": "x"},
            {"type": "text"},
            {"type": None},
            {"": ""},
            [1] * 500,
            "auto",
            "image",
        ]
    ),
    st.text(max_size=5),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.recursive(st.none(), lambda inner: st.lists(inner, max_size=1) | st.dictionaries(st.just("a"), inner)),
)
FOREIGN = {  # words of other dialects
    "/v1/messages": ("truncate_prompt", "response_format", "function", "max_completion"),
    "/api/chat": ("truncate_prompt", "response_format", "max_tokens", "max_completion"),
}


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, inner in entries for found in _paths(inner, (*path, key)))]


@pytest.mark.parametrize("route", FULL)
@settings(max_examples=examples_of(20), deadline=None, suppress_health_check=list(HealthCheck), print_blob=False)
@given(data=st.data())
def test_no_body_is_too_strange(scripted, route, data):
    """One value or two are replaced, or fields added: an answer or a 4xx in the dialect's form that names the field."""
    body = json.loads(json.dumps(FULL[route]))
    changed = []
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(_paths(body)[1:]))
        owner = body
        for key in path[:-1]:
            owner = owner[key]
        if isinstance(owner, dict) and data.draw(st.integers(0, 5)) == 0:
            path = (
                *path[:-1],
                data.draw(st.sampled_from(("n", "stop", "zzz", "images", "logit_bias", "cache_control"))),
            )
        owner[path[-1]] = copy.deepcopy(data.draw(JUNK))
        changed.append(path)
    answer = scripted.post(route, body)
    assert answer.status_code in (200, 400, 404, 413), (answer.status_code, answer.text, body)
    if answer.status_code == 200:
        return
    if route == "/v1/messages":
        message = fits(ErrorResponse, answer.text).error.message
    elif route == "/api/chat":
        assert answer.json().keys() == {"error"}
        message = answer.json()["error"]
    else:
        message = answer.json()["error"]["message"]
        assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
    assert "\n" not in message and len(message) < 2_000
    assert not any(word in message for word in FOREIGN.get(route, ())) or "tools" in message, message
    names = {str(key) for path in changed for key in path if isinstance(key, str)}
    too_long = message.startswith("prompt is too long")  # of all fields together, in Anthropic's words
    assert too_long or any(name in message for name in names), (message, changed)
