"""Anthropic's Messages API: every answer and event fits its SDK's types, and the SDK's clients work unmodified."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any

import anthropic
import httpx
import msgspec
import pytest
from anthropic.types import ErrorResponse, Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent
from support.sdk_types import fits, named_events

from octavo.chat.answer import AnswerParser
from octavo.chat.messages import Conversation, check_messages
from octavo.chat.parts import PartSplitter
from octavo.chat.reasoning import ReasoningParser
from octavo.entrypoints.anthropic.answers import BlockWriter, stop_of
from octavo.entrypoints.anthropic.events import events_of
from octavo.entrypoints.anthropic.prepare import conversation_of
from octavo.entrypoints.anthropic.protocol import MessagesRequest
from octavo.entrypoints.errors import APIError, in_anthropic_form
from octavo.entrypoints.sealing import Seal
from octavo.interface.outputs import CompletionOutput

SEAL = Seal(b"of tests")
BLOCKS = BlockWriter(SEAL)
USER = [{"role": "user", "content": "Hello"}]
NOW = {"name": "now", "description": "the time", "input_schema": {"type": "object", "properties": {}}}
PLACE = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
BODIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "blocks": {
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]}],
    },
    "stopped": {"stop_sequences": ["e", "a", "o"], "max_tokens": 60},
    "sampled": {"temperature": 0.7, "top_p": 0.9, "top_k": 20},
    "a call": {"tools": [NOW], "tool_choice": {"type": "any"}, "max_tokens": 60},
    "that call": {
        "tools": [NOW],
        "tool_choice": {"type": "tool", "name": "now", "disable_parallel_tool_use": True},
        "max_tokens": 60,
    },
    "no call": {"tools": [NOW], "tool_choice": {"type": "none"}},
    "a form": {"output_config": {"format": {"type": "json_schema", "schema": PLACE}}, "max_tokens": 30},
    "results": {
        "tools": [NOW],
        "messages": [
            *USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                    {"type": "text", "text": "Let me look."},
                    {"type": "tool_use", "id": "toolu_1", "name": "now", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "12:00"}]},
                    {"type": "text", "text": "Thanks"},
                ],
            },
        ],
    },
    "what an agent sends": {
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.37; cch=1d2a4;"},
            {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}
        ],
        "tools": [{**NOW, "cache_control": {"type": "ephemeral"}, "eager_input_streaming": True}],
        "metadata": {"user_id": "user_1_account__session_2"},
        "thinking": {"type": "enabled", "budget_tokens": 31999},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "betas": ["interleaved-thinking-2025-05-14"],
        "temperature": 1,
    },
    "a tool of Anthropic's servers beside others": {
        "tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}, NOW],
    },
}


def body_of(name: str) -> dict[str, Any]:
    return {"model": "tiny", "messages": USER, "max_tokens": 6, **BODIES[name]}


def prompt_of(used: dict[str, Any]) -> int:
    """The tokens of a prompt: computed, read from the cache, and written to it for a while."""
    if (created := used.get("cache_creation")) is not None:
        assert used["cache_creation_input_tokens"] == sum(created.values())
    return used["input_tokens"] + used["cache_read_input_tokens"] + used["cache_creation_input_tokens"]


def text_of(content: list[dict[str, Any]]) -> str:
    return "".join(block.get("text", "") for block in content)


@pytest.mark.parametrize("name", BODIES)
def test_answers_and_events_fit_the_types(shared_server, name):
    """The events build the same message as the answer that is not streamed."""
    body = {"seed": 1, "temperature": 0, **body_of(name)}
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}
    answer = shared_server.post("/v1/messages?beta=true", body, headers=headers)
    assert answer.status_code == 200, answer.text
    whole = fits(Message, answer.text)
    assert whole.id.startswith("msg_")
    assert all(block.id.startswith("toolu_") for block in whole.content if block.type == "tool_use")
    events = named_events(shared_server.url + "/v1/messages", body)
    assert [name for name, _ in events[:2]] == ["message_start", "ping"]
    assert [name for name, _ in events[-2:]] == ["message_delta", "message_stop"]
    blocks: list[dict[str, Any]] = []
    open_block = None
    for kind, data in events:
        event = json.loads(data)
        if kind == "ping":
            assert event == {"type": "ping"}  # the SDK drops it before its types
            continue
        fits(RawMessageStreamEvent, data)
        if kind == "content_block_start":
            assert open_block is None and event["index"] == len(blocks)
            open_block = event["index"]
            blocks.append({**event["content_block"], "json": ""})
        elif kind == "content_block_delta":
            assert event["index"] == open_block
            delta = {key: value for key, value in event["delta"].items() if key != "type"}
            for key, value in delta.items():
                key = "json" if key == "partial_json" else key
                blocks[-1][key] += value
        elif kind == "content_block_stop":
            assert event["index"] == open_block
            open_block = None
    assert open_block is None
    streamed = [
        (block["type"], block.get("text"), json.loads(block["json"] or "{}") if block["type"] == "tool_use" else None)
        for block in blocks
    ]
    expected = [(b.type, getattr(b, "text", None), getattr(b, "input", None)) for b in whole.content]
    ends = [json.loads(events[0][1])["message"]["usage"], json.loads(events[-2][1])]
    if "temperature" not in BODIES[name]:
        assert streamed == expected
        assert ends[1]["delta"] == {"stop_reason": whole.stop_reason, "stop_sequence": whole.stop_sequence}
        assert ends[1]["usage"]["output_tokens"] == whole.usage.output_tokens
    for used in (ends[0], ends[1]["usage"], whole.usage.model_dump()):
        prompt = prompt_of(used)
        assert prompt == prompt_of(whole.usage.model_dump())


@pytest.mark.parametrize("name", BODIES)
def test_tokens_are_counted_as_they_are_used(shared_server, name):
    body = body_of(name)
    used = shared_server.post("/v1/messages", body).json()["usage"]
    asked = {
        key: body[key] for key in ("model", "messages", "system", "tools", "tool_choice", "thinking") if key in body
    }
    count = fits(MessageTokensCount, shared_server.post("/v1/messages/count_tokens", asked).text)
    assert count.input_tokens == prompt_of(used)


def test_one_way_into_generation(shared_server):
    """The same conversation gives the same text as /v1/chat/completions."""
    shared = {"model": "tiny", "max_tokens": 12, "temperature": 0, "messages": USER}
    chat = shared_server.post("/v1/chat/completions", shared).json()["choices"][0]["message"]["content"]
    assert text_of(shared_server.post("/v1/messages", shared).json()["content"]) == chat
    begun = {**shared, "messages": [*USER, {"role": "assistant", "content": "The capital"}]}
    continued = {**begun, "continue_final_message": True, "add_generation_prompt": False}
    chat = shared_server.post("/v1/chat/completions", continued).json()["choices"][0]["message"]["content"]
    assert text_of(shared_server.post("/v1/messages", begun).json()["content"]) == chat


def test_the_official_clients(shared_server):
    client = anthropic.Anthropic(
        base_url=shared_server.url, api_key="none", max_retries=0, _strict_response_validation=True
    )
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 6, "messages": USER}
    assert client.messages.create(**asked).usage.output_tokens <= 6
    with client.messages.stream(**asked) as stream:
        assert stream.get_final_message().stop_reason in ("max_tokens", "end_turn")
    with client.messages.stream(**asked, tools=[NOW], tool_choice={"type": "tool", "name": "now"}) as stream:
        assert stream.get_final_message().content[0].name == "now"
    assert client.messages.count_tokens(model="tiny", messages=USER).input_tokens > 0
    models = client.models.list()
    assert [fits(ModelInfo, model.to_json()).id for model in models] == ["tiny", "also-tiny"]
    assert client.models.retrieve("also-tiny").max_input_tokens == 1023 and not models.has_more
    with pytest.raises(anthropic.NotFoundError) as raised:
        client.models.retrieve("nope")
    fits(ErrorResponse, json.dumps(raised.value.body))
    for wrong, kind in (
        ({"model": "nope"}, anthropic.NotFoundError),
        ({"max_tokens": -1}, anthropic.BadRequestError),
        ({"messages": []}, anthropic.BadRequestError),
    ):
        with pytest.raises(kind) as raised:
            client.messages.create(**{**asked, **wrong})
        fits(ErrorResponse, json.dumps(raised.value.body))
        assert raised.value.request_id == raised.value.response.headers["x-request-id"]

    async def several() -> None:
        async with anthropic.AsyncAnthropic(base_url=shared_server.url, api_key="none", max_retries=0) as many:
            await asyncio.gather(*(many.messages.create(**asked) for _ in range(4)))

    asyncio.run(several())


def test_keys(guarded):
    for key, status in (("secret-key", 200), ("wrong", 401)):
        model = guarded.get("/v1/models", headers={"x-api-key": "secret-key"}).json()["data"][0]["id"]
        body = {"model": model, "max_tokens": 1, "messages": USER}
        for headers in ({"x-api-key": key}, {"authorization": f"Bearer {key}"}):
            answer = guarded.post("/v1/messages", body, headers=headers)
            assert answer.status_code == status, answer.text
            if status == 401:
                assert fits(ErrorResponse, answer.text).error.type == "authentication_error"
        proxied = guarded.post("/llm/v1/messages", body, headers={"x-api-key": key})
        assert proxied.status_code == status and ("error" not in proxied.json() or proxied.json()["type"] == "error")


WRONG: dict[str, dict[str, Any]] = {
    "max_tokens": {"max_tokens": 2.5},
    "messages.0.content.0": {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
    "tool_use_id": {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": 5}]}]},
    "messages.1.content.0": {
        "messages": [*USER, {"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]
    },
    "messages.0": {"messages": [{"role": "robot", "content": "x"}]},
    "tools.0.type": {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
    "tools": {"tools": [NOW, NOW]},
    "tools.1.input_schema must not": {
        "tools": [{"type": "web_search_20250305", "name": "web_search"}, {**NOW, "input_schema": {"x-guidance": {}}}]
    },
    "tool_choice": {"tool_choice": {"type": "any"}},
    "tools.0.input_schema must not": {"tools": [{**NOW, "input_schema": {"x-guidance": {}}}]},
    "tool_choice.name": {"tools": [NOW], "tool_choice": {"type": "tool", "name": "then"}},
    "prompt is too long": {"messages": [{"role": "user", "content": "fox " * 2_000}]},
    "stop is not": {"stop": ["x"]},
    "mcp_servers": {"mcp_servers": [{"type": "url"}]},
    "context_management": {"context_management": {"edits": [{"type": "compact_20260112"}]}},
    "context_management.edits.0.keep": {
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919", "keep": {"type": "input_tokens"}}]}
    },
    "output_format": {
        "output_format": {"type": "json_schema", "schema": PLACE},
        "output_config": {"format": {"type": "json_schema", "schema": PLACE}},
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_have_anthropics_form_and_name_the_field(shared_server, name):
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        if path.endswith("tokens") and name in ("max_tokens", "prompt is too long"):
            continue
        body = {"model": "tiny", "messages": USER, "max_tokens": 2, **WRONG[name]}
        answer = shared_server.post(path, body)
        error = fits(ErrorResponse, answer.text).error
        assert answer.status_code == 400 and error.type == "invalid_request_error"
        assert name in error.message, error.message
        assert not re.search("function|truncate_prompt|response_format|parameters", error.message), error.message


@pytest.mark.parametrize("status", [400, 401, 403, 404, 408, 409, 413, 429, 500, 503])
def test_every_error_has_a_type_that_the_sdk_knows(status):
    error = in_anthropic_form(APIError(status, "why"))
    assert fits(ErrorResponse, msgspec.json.encode(error)).error.message == "why"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/api/chat"])
def test_clients_that_leave_stop_their_work_and_harm_no_other(shared_server, path):
    def body(limit: int, stream: bool) -> dict[str, Any]:
        shared = {"stream": stream, "temperature": 0 if limit < 100 else 1}
        if path == "/api/chat":
            return {"messages": USER, "stream": stream, "options": {**shared, "num_predict": limit}}
        said = {"messages": USER} if path == "/v1/messages" else {"input": "Hello"}
        return {**said, **shared, "max_tokens" if path == "/v1/messages" else "max_output_tokens": limit}

    with httpx.Client(base_url=shared_server.url, timeout=90) as client:
        whole = client.post(path, json=body(12, False)).json()
        with client.stream("POST", path, json=body(900, True)) as stream:
            next(stream.iter_lines())
            assert client.post(path, json={"model": 5}).status_code == 400
            again = client.post(path, json=body(12, False)).json()
        deadline = time.monotonic() + 90
        while client.get("/load").json()["server_load"]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert said_in(whole) == said_in(again)


def said_in(answer: dict[str, Any]) -> str:
    if "message" in answer:
        return answer["message"]["content"]
    parts = answer["content"] if "content" in answer else answer["output"][0]["content"]
    return text_of(parts)


def test_an_integer_may_have_a_point_and_more_than_fits_is_what_fits(shared_server):
    body = {"model": "tiny", "messages": USER, "seed": 3}
    assert shared_server.post("/v1/messages", {**body, "max_tokens": 2.0}).json()["usage"]["output_tokens"] <= 2
    answer = shared_server.post("/v1/messages", {**body, "max_tokens": 32_000, "stop_sequences": ["e"]})
    assert answer.status_code == 200, answer.text
    cut = CompletionOutput(0, "", [], finish_reason="length")
    at_end = stop_of(cut, False, 32_000, 900)
    assert at_end.stop_reason == "model_context_window_exceeded"
    assert stop_of(cut, False, 5, 5).stop_reason == "max_tokens"


def test_reasoning_and_text_are_blocks_however_they_are_cut():
    text = "<think>Is it so?</think>\n\nIt is."
    for size in (1, 3, 100):
        parser, splitter = AnswerParser(ReasoningParser(False), None, None), PartSplitter()
        steps = []
        for at in range(0, len(text), size):
            last = at + size >= len(text)
            output = CompletionOutput(0, text[at : at + size], [1], finish_reason="stop" if last else None)
            steps += splitter.feed(parser.feed(output))
        steps += splitter.finish()
        thinking, answer = map(BLOCKS.block, splitter.parts)
        assert (thinking.thinking, answer.text) == ("Is it so?", "It is.") and thinking.signature
        events = [msgspec.to_builtins(event) for step in steps for _, event in events_of(step, BLOCKS)]
        for event in events:
            fits(RawMessageStreamEvent, json.dumps(event))
        signed = [event["delta"] for event in events if event.get("delta", {}).get("type") == "signature_delta"]
        assert signed == [{"type": "signature_delta", "signature": thinking.signature}]


def test_the_conversation_of_a_round_trip():
    """Results stand behind their calls, text behind the results; the header that changes each time is left out."""
    body = MessagesRequest.model_validate_json(json.dumps(body_of("results")))
    messages = check_messages(conversation_of(body, SEAL).messages)
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "user"]
    assert messages[1]["reasoning_content"] == "Hm." and messages[1]["content"] == "Let me look."
    assert messages[1]["tool_calls"][0]["id"] == messages[2]["tool_call_id"] == "toolu_1"
    assert messages[2]["content"] == "12:00" and messages[3]["content"] == "Thanks"
    agent = conversation_of(MessagesRequest.model_validate_json(json.dumps(body_of("what an agent sends"))), SEAL)
    assert check_messages(agent.messages)[0] == {"role": "system", "content": "You are an agent."}
    assert agent.thinking is True and agent.reasoning_effort == "high"


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "description": f"It is {name}.", "input_schema": {"type": "object"}, **more}


def read(messages: list[dict[str, Any]], tools: list[dict[str, Any]], lists_all: bool = False) -> Conversation:
    body = {"model": "m", "max_tokens": 1, "messages": messages, "tools": tools}
    return conversation_of(MessagesRequest.model_validate_json(json.dumps(body)), SEAL, lists_all)


def names(tools: list[dict[str, Any]] | None) -> list[str]:
    return [given["function"]["name"] for given in tools or []]


def searched(*found: str) -> list[dict[str, Any]]:
    references = [{"type": "tool_reference", "tool_name": name} for name in found]
    use = {"type": "tool_use", "id": "t", "name": "search", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": references}
    return [*USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]


def test_deferred_tools_are_told_of_where_a_search_finds_them_and_once():
    tools = [
        tool("a", defer_loading=True),
        tool("b", defer_loading=True),
        tool("c", defer_loading=True),
        tool("search"),
    ]
    found = read(searched("b", "no such", "a"), tools)
    assert names(found.listed) == ["search"] and names(found.tools) == ["search", "b", "a"]
    line = '{{"name": "{0}", "description": "It is {0}.", "parameters": {{"type": "object"}}}}'
    told = f"no such\n<tools>\n{line.format('b')}\n{line.format('a')}\n</tools>"
    assert found.messages[2]["content"] == told
    assert [found.fields.tool(at) for at in range(3)] == ["tools.3", "tools.1", "tools.0"]
    again = read([*searched("b", "no such", "a"), *searched("a", "c")], tools)
    assert again.messages[: len(found.messages)] == found.messages and again.listed == found.listed
    assert again.messages[-1]["content"] == f"a\n<tools>\n{line.format('c')}\n</tools>"
    top = read(searched("b", "a"), tools, lists_all=True)
    assert names(top.listed) == ["a", "b", "c", "search"] and top.messages[2]["content"] == "b\na"


def change(kind: str, tool: dict[str, Any]) -> dict[str, Any]:
    return {"role": "system", "content": [{"type": f"tool_{kind}", "tool": tool}]}


def test_tools_come_and_go_between_messages_and_the_list_stays():
    tools = [tool("a"), tool("b"), tool("c", defer_loading=True)]
    of = lambda name: {"type": "tool_reference", "name": name}  # noqa: E731
    defined = {"type": "tool_definition", "definition": tool("d", strict=True)}
    later = [change("removal", of("a")), change("addition", of("c")), change("addition", defined), *USER]
    found = read([*USER, *later], tools)
    assert names(found.listed) == ["a", "b"] and names(found.tools) == ["b", "c", "d"]
    texts = [message["content"] for message in check_messages(found.messages)]
    assert "cannot call the tool a" in texts[1] and '"name": "c"' in texts[2] and '"name": "d"' in texts[3]
    back = read([*USER, *later, change("addition", of("a")), change("removal", of("d"))], tools)
    assert names(back.tools) == ["b", "c", "a"] and back.messages[: len(found.messages)] == found.messages
    assert check_messages(back.messages)[-2]["content"] == "From now on you can call the tool a."
    with pytest.raises(APIError, match=r"messages\.1\.content\.0\.tool\.name must be a tool of the request"):
        read([*USER, change("removal", of("z"))], tools)


def test_instructions_for_a_turn_go_with_it():
    told = {
        "role": "system",
        "content": "For now.",
        "clear_at": "next_user_message",
        "output_config": {"effort": "low"},
    }
    now = read([*USER, told], [tool("a")])
    assert [message["content"] for message in check_messages(now.messages)] == ["Hello", "For now."]
    assert now.reasoning_effort == "low"
    answer = {"role": "assistant", "content": "Yes."}
    then = read([*USER, told, answer, *USER], [tool("a")])
    assert [message["content"] for message in then.messages] == ["Hello", "Yes.", "Hello"]
    assert then.reasoning_effort is None
    kept = read([*USER, {**told, "clear_at": "never"}, answer, *USER], [tool("a")])
    assert len(kept.messages) == 4


def test_thinking_between_tools_is_thinking_off():
    for kind, on in (("between_tools", False), ("disabled", False), ("adaptive", True)):
        body = {"model": "m", "max_tokens": 1, "messages": USER, "thinking": {"type": kind}}
        asked = conversation_of(MessagesRequest.model_validate_json(json.dumps(body)), SEAL)
        assert asked.thinking is on


def test_no_tokens_at_all_only_fill_the_cache(shared_server):
    asked = {
        "model": "tiny",
        "max_tokens": 0,
        "messages": [{"role": "user", "content": "The quick brown fox jumps " * 9}],
    }
    message = fits(Message, shared_server.post("/v1/messages", asked).text)
    assert (message.content, message.stop_reason, message.usage.output_tokens) == ([], "max_tokens", 0)
    events = named_events(shared_server.url + "/v1/messages", asked)
    assert [name for name, _ in events] == ["message_start", "ping", "message_delta", "message_stop"]
    for name, data in events:
        if name != "ping":
            fits(RawMessageStreamEvent, data)
    used = shared_server.post("/v1/messages", {**asked, "max_tokens": 1}).json()["usage"]
    assert used["cache_read_input_tokens"] > used["input_tokens"] and used["output_tokens"] == 1


def test_only_seals_of_our_own_are_opened():
    for text in ("", "So. é\ud800", "a" * 100_000):
        sealed = SEAL.close(text)
        assert len(sealed) < 1_000 and SEAL.open(sealed) == text
        assert Seal(b"another").open(sealed) == ""
        for other in (sealed[:-4], sealed + "AAAA", sealed[:30] + "A" * 8 + sealed[38:], sealed[8:], "octavo1.", "é"):
            assert SEAL.open(other) == ""
    huge = SEAL.close("a" * (40 << 20))
    assert len(huge) < 1 << 20 and SEAL.open(huge) == "", "small, and of more text than is read"


def test_a_full_queue_is_no_limit_of_the_client():
    """A router, which counts its attempts, knows no 529: it asks another server after a 429."""
    full = APIError(429, "queue full", headers={"retry-after": "3"}, overloaded=True)

    async def told(error: APIError, path: str, *headers: tuple[bytes, bytes]) -> tuple[int, dict[str, Any]]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
        await error.response()(scope, None, send)  # type: ignore[arg-type]
        assert error is not full or (b"retry-after", b"3") in sent[0]["headers"]
        return sent[0]["status"], json.loads(sent[1]["body"])["error"]

    status, error = asyncio.run(told(full, "/v1/messages"))
    assert (status, error) == (529, {"type": "overloaded_error", "message": "queue full"})
    status, error = asyncio.run(told(full, "/v1/messages", (b"x-envoy-attempt-count", b"1")))
    assert (status, error["type"]) == (429, "overloaded_error")
    assert asyncio.run(told(full, "/v1/chat/completions"))[0] == 429
    status, error = asyncio.run(told(APIError(429, "too many"), "/v1/messages"))
    assert (status, error["type"]) == (429, "rate_limit_error")
