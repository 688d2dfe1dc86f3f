"""OpenAI's Responses API: every answer and event fits its SDK's types, and the SDK's clients work unmodified."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from support.sdk_types import fits, named_events

from octavo.chat.answer import AnswerParser
from octavo.chat.messages import check_messages
from octavo.chat.parts import PartSplitter
from octavo.chat.reasoning import ReasoningParser
from octavo.entrypoints.responses.answers import ItemWriter
from octavo.entrypoints.responses.events import ItemEvents
from octavo.entrypoints.responses.prepare import conversation_of, messages_of
from octavo.entrypoints.responses.protocol import ResponsesRequest
from octavo.entrypoints.responses.tools import toolbox_of
from octavo.entrypoints.transport.responses import encode_json
from octavo.interface.outputs import CompletionOutput

NOW = {
    "type": "function",
    "name": "now",
    "description": "the time",
    "strict": False,
    "parameters": {"type": "object", "properties": {}},
}
PLACE = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TURN = [
    {"role": "user", "content": "What time is it?"},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
    {"type": "function_call", "call_id": "call_1", "name": "now", "arguments": "{}", "id": "fc_1"},
    {"type": "function_call_output", "call_id": "call_1", "output": "12:00"},
]
BODIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "items": {
        "instructions": "Be brief.",
        "input": [
            {"role": "developer", "content": "Answer in English."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        ],
    },
    "a call": {"tools": [NOW], "tool_choice": "required", "max_output_tokens": 100},
    "that call": {"tools": [NOW], "tool_choice": {"type": "function", "name": "now"}, "parallel_tool_calls": False},
    "one of the allowed calls": {
        "tools": [NOW],
        "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]},
    },
    "a form": {"text": {"format": {"type": "json_schema", "name": "place", "schema": PLACE, "strict": True}}},
    "an object": {"text": {"format": {"type": "json_object"}}},
    "results": {"tools": [NOW], "input": TURN},
    "all that is echoed": {
        "metadata": {"a": "b"},
        "user": "me",
        "safety_identifier": "x",
        "reasoning": {"effort": "low", "summary": "auto"},
        "max_tool_calls": 2,
        "top_p": 0.9,
        "temperature": 0.5,
        "truncation": "disabled",
        "service_tier": "auto",
    },
    # The fields that Codex sends, and no others, with the functions among its tools.
    "what an agent sends": {
        "instructions": "You are a coding agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment_context>"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "run it"}]},
            {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
            {"type": "function_call", "name": "exec_command", "arguments": '{"cmd":"ls"}', "call_id": "call_7"},
            {"type": "function_call_output", "call_id": "call_7", "output": "a.py"},
        ],
        "tools": [
            {
                **NOW,
                "name": "exec_command",
                "parameters": {
                    "type": "object",
                    "properties": {"cmd": {"type": "string"}},
                    "required": ["cmd"],
                    "additionalProperties": False,
                },
            }
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "thread-1",
        "client_metadata": {"x-codex-installation-id": "1"},
    },
}

ORDER = {
    "message": (
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ),
    "function_call": (
        "response.output_item.added",
        "response.function_call_arguments.done",
        "response.output_item.done",
    ),
}


def body_of(name: str) -> dict[str, Any]:
    return {"model": "tiny", "input": "Hello", "max_output_tokens": 40, "seed": 1, "temperature": 0, **BODIES[name]}


@pytest.mark.parametrize("name", BODIES)
def test_answers_and_events_fit_the_types(shared_server, name):
    """The events build the same response as the answer that is not streamed."""
    body = body_of(name)
    answer = shared_server.post("/v1/responses", {**body, "stream": False})
    assert answer.status_code == 200, answer.text
    whole = fits(Response, answer.text)
    assert whole.status == ("incomplete" if whole.usage.output_tokens == body["max_output_tokens"] else "completed")
    events = named_events(shared_server.url + "/v1/responses", body)
    kinds = [kind for kind, _ in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == f"response.{whole.status}"
    items: list[dict[str, Any]] = []
    texts: dict[str, str] = {}
    for number, (kind, data) in enumerate(events):
        fits(ResponseStreamEvent, data)
        event = json.loads(data)
        assert event["sequence_number"] == number
        item_id = event.get("item_id", event.get("item", {}).get("id"))
        if kind == "response.output_item.added":
            assert event["output_index"] == len(items) and event["item"]["status"] == "in_progress"
            items.append(event["item"])
        elif kind.endswith(".delta"):
            texts[item_id] = texts.get(item_id, "") + event["delta"]
        elif kind.endswith((".text.done", "_text.done")):
            assert event["text"] == texts[item_id]
        elif kind.endswith("arguments.done"):
            assert event["arguments"] == texts.get(item_id, "")
        elif kind == "response.output_item.done":
            assert items[event["output_index"]]["id"] == event["item"]["id"]
            items[event["output_index"]] = event["item"]
    middle = list(dict.fromkeys((kind, json.loads(data)["output_index"]) for kind, data in events[2:-1]))
    assert [kind for kind, _ in middle if not kind.endswith(".delta")] == [
        kind for item in items for kind in ORDER[item["type"]]
    ]
    assert [at for _, at in middle] == sorted(at for _, at in middle)
    last = json.loads(events[-1][1])["response"]
    assert last["output"] == items
    if "temperature" not in BODIES[name]:
        assert [_said(item) for item in items] == [_said(item.model_dump()) for item in whole.output]
    assert last["usage"]["total_tokens"] == last["usage"]["input_tokens"] + last["usage"]["output_tokens"]
    for field in ("metadata", "user", "safety_identifier", "max_tool_calls", "top_p", "temperature", "instructions"):
        if field in body:
            assert last[field] == body[field]


def _said(item: dict[str, Any]) -> Any:
    return item["type"], item.get("arguments"), [part["text"] for part in item.get("content") or []], item.get("name")


def test_one_way_into_generation(shared_server):
    """The same conversation gives the same text as /v1/chat/completions."""
    user = [{"role": "user", "content": "Hello"}]
    shared = {"model": "tiny", "temperature": 0}
    chat = shared_server.post("/v1/chat/completions", {**shared, "messages": user, "max_tokens": 12}).json()
    answer = fits(
        Response, shared_server.post("/v1/responses", {**shared, "input": user, "max_output_tokens": 12}).text
    )
    assert answer.output_text == chat["choices"][0]["message"]["content"]
    assert answer.usage.output_tokens == chat["usage"]["completion_tokens"]


def test_conversations_that_are_kept(shared_server):
    client = shared_server.client()
    asked: dict[str, Any] = {"model": "tiny", "max_output_tokens": 6, "temperature": 0}
    first = client.responses.create(**asked, input="Hello", instructions="Be brief.", store=True)
    assert client.responses.retrieve(first.id) == first
    second = client.responses.create(**asked, input="And then?", previous_response_id=first.id)
    said = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": first.output_text}]
    by_hand = client.responses.create(**asked, input=[*said, {"role": "user", "content": "And then?"}], store=False)
    assert second.output_text == by_hand.output_text and second.usage.input_tokens == by_hand.usage.input_tokens
    referred = [said[0], {"type": "item_reference", "id": first.output[0].id}, {"role": "user", "content": "And then?"}]
    assert client.responses.create(**asked, input=referred).output_text == second.output_text
    raw = shared_server.get(f"/v1/responses/{second.id}/input_items?limit=2").text
    page = fits(ResponseItemList, raw)
    assert page.has_more and [item.role for item in page.data] == ["user", "assistant"]
    listed = list(client.responses.input_items.list(second.id, order="asc", limit=1))
    assert [item.content[0].text for item in listed] == ["Hello", first.output_text, "And then?"]
    call = {"tools": [NOW], "tool_choice": {"type": "function", "name": "now"}, "max_output_tokens": 60}
    with client.responses.stream(**{**asked, **call}, input="Hello") as stream:
        *_, (snapshot, last) = [(getattr(event, "snapshot", None), event) for event in stream if "delta" in event.type]
        streamed = stream.get_final_response()
    assert snapshot == streamed.output[last.output_index].arguments
    assert client.responses.retrieve(streamed.id).output[0].call_id == streamed.output[0].call_id
    client.responses.delete(first.id)
    for forgotten in (first.id, by_hand.id, "resp_none"):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(forgotten)
        with pytest.raises(openai.BadRequestError) as raised:
            client.responses.create(**asked, input="x", previous_response_id=forgotten)
        assert raised.value.code == "previous_response_not_found"
    assert client.responses.create(**asked, input="x", previous_response_id=second.id).status  # stands on its own


def test_stored_responses_of_a_gateways_tenant_are_no_other_tenants(shared_server):
    """Whoever reaches the engine beside the gateway needs the id, which nobody can guess."""
    client = shared_server.client()
    one, other = ({"x-octavo-tenant": name, "x-octavo-tenant-id": f"{name}'s secret"} for name in ("one", "other"))
    asked: dict[str, Any] = {"model": "tiny", "max_output_tokens": 9}
    made = client.responses.create(**asked, input="mine", extra_headers=one)
    for headers in (other, {**one, "x-octavo-tenant-id": "made up"}):
        for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                call(made.id, extra_headers=headers)
        for going_on in (
            {"previous_response_id": made.id, "input": "x"},
            {"input": [{"type": "item_reference", "id": made.output[0].id}]},
        ):
            with pytest.raises(openai.BadRequestError, match="is not found"):
                client.responses.create(**asked, **going_on, extra_headers=headers)
    assert client.responses.create(**asked, input="x", previous_response_id=made.id, extra_headers=one).status
    assert client.responses.retrieve(made.id).id == client.responses.retrieve(made.id, extra_headers=one).id == made.id


def test_a_response_in_all_its_states(shared_server):
    """in_progress, completed, incomplete; failed is in test_dialects.py, queued and cancelled are in
    test_background.py."""
    client = shared_server.client()
    asked: dict[str, Any] = {"model": "tiny", "input": "Hello", "temperature": 0}
    cut = client.responses.create(**asked, max_output_tokens=3)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"
    assert cut.completed_at is None and client.responses.retrieve(cut.id) == cut
    one_of = {"type": "json_schema", "name": "x", "schema": {"enum": ["a"]}, "strict": True}
    whole = client.responses.create(**asked, text={"format": one_of}, max_output_tokens=60)
    assert whole.status == "completed" and whole.completed_at >= whole.created_at and whole.incomplete_details is None
    with client.responses.stream(**asked, max_output_tokens=9) as stream:
        begun = next(iter(stream)).response
        assert (begun.status, begun.output, begun.usage, begun.error) == ("in_progress", [], None, None)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_none")
    with pytest.raises(openai.BadRequestError, match="is completed and cannot be cancelled") as raised:
        client.responses.cancel(whole.id)
    assert raised.value.param == "response_id"


def test_tokens_are_counted_as_they_are_used(shared_server):
    for name in ("plain", "items", "results", "a call"):
        body = body_of(name)
        used = shared_server.post("/v1/responses", body).json()["usage"]["input_tokens"]
        asked = {key: body[key] for key in ("model", "input", "instructions", "tools", "tool_choice") if key in body}
        counted = shared_server.post("/v1/responses/input_tokens", asked).json()
        assert counted == {"object": "response.input_tokens", "input_tokens": used}


def test_a_round_trip_with_tools_and_a_form(shared_server):
    client = shared_server.client()
    tools: dict[str, Any] = {"model": "tiny", "tools": [NOW], "temperature": 0, "max_output_tokens": 60}
    first = client.responses.create(**tools, input="The time?", tool_choice={"type": "function", "name": "now"})
    (call,) = [item for item in first.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "12:00"}
    by_id = client.responses.create(**tools, input=[result], previous_response_id=first.id, tool_choice="none")
    sent = [{"role": "user", "content": "The time?"}, *(item.model_dump(exclude_none=True) for item in first.output)]
    by_hand = client.responses.create(**tools, input=[*sent, result], tool_choice="none")
    assert by_id.output_text == by_hand.output_text and by_id.usage.input_tokens == by_hand.usage.input_tokens


def test_penalties_and_what_is_kept_are_told(shared_server):
    asked = {"input": "x", "max_output_tokens": 1, "presence_penalty": 1.5, "frequency_penalty": -1, "store": False}
    answer = shared_server.post("/v1/responses", asked).json()
    assert {name: answer[name] for name in ("presence_penalty", "frequency_penalty", "store")} == {
        "presence_penalty": 1.5,
        "frequency_penalty": -1,
        "store": False,
    }
    compacted = shared_server.post("/v1/responses/compact", {"input": "x"})
    assert compacted.status_code == 404 and "not supported" in compacted.json()["error"]["message"]


WRONG: dict[str, dict[str, Any]] = {
    "max_output_tokens": {"max_output_tokens": 2.5},
    "input.0.content.0": {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
    "input.0": {"input": [{"type": "computer_call", "id": "x"}]},
    "call_id": {"input": [{"type": "function_call_output", "call_id": 5, "output": "x"}]},
    "input.0: item": {"input": [{"type": "item_reference", "id": "msg_none"}]},
    "tools.0.type": {"tools": [{"type": "web_search"}]},
    "tools": {"tools": [NOW, NOW]},
    "tool_choice": {"tool_choice": "required"},
    "background": {"background": 1},
    "chat_template_kwargs": {"chat_template_kwargs": {"messages": []}},
    "enable_response_messages": {"enable_response_messages": True},
    "conversation": {"conversation": 1},
    "truncation": {"truncation": "left"},
    "max_tokens": {"max_tokens": 5},
    "previous_response_id": {"previous_response_id": "resp_none"},
    "text.format": {"text": {"format": {"type": "grammar"}}},
    "include": {"include": ["all"]},
    "top_logprobs": {"top_logprobs": 5_000},
    "tools.0.name": {"tools": [{**NOW, "name": ""}]},
    "tools.0.parameters must not": {"tools": [{**NOW, "parameters": {"x-guidance": {}}}]},
    "tools.2.parameters must not": {
        "tools": [NOW, {"type": "web_search"}, {**NOW, "name": "then", "parameters": {"x-guidance": {}}}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "then"}]},
    },
    "tools.1.tools.0": {"tools": [NOW, {"type": "namespace", "name": "a", "tools": [{"type": "mcp"}]}]},
    "tool_choice.name": {"tools": [NOW], "tool_choice": {"type": "function", "name": "then"}},
    "tool_choice.tools": {
        "tools": [NOW],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "then"}]},
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_field(shared_server, name):
    for stream in (False, True):
        answer = shared_server.post("/v1/responses", {"model": "tiny", "input": "x", "stream": stream, **WRONG[name]})
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["type"] == "invalid_request_error"
        assert name in error["message"], error["message"]


def test_an_integer_may_have_a_point(shared_server):
    answer = shared_server.post("/v1/responses", {"model": "tiny", "input": "x", "max_output_tokens": 2.0})
    assert answer.status_code == 200 and answer.json()["usage"]["output_tokens"] <= 2
    too_many = shared_server.post("/v1/responses", {"model": "tiny", "input": "x", "max_output_tokens": 5_000})
    assert too_many.status_code == 400 and too_many.json()["error"]["code"] == "context_length_exceeded"


def test_reasoning_and_text_are_items_however_they_are_cut():
    text = "<think>Is it so?</think>\n\nIt is."
    for size in (1, 3, 100):
        parser, splitter = AnswerParser(ReasoningParser(False), None, None), PartSplitter()
        writer, events = ItemWriter("resp_abc"), []
        for at in range(0, len(text), size):
            last = at + size >= len(text)
            output = CompletionOutput(0, text[at : at + size], [1], finish_reason="length" if last else None)
            for step in splitter.feed(parser.feed(output)):
                events += ItemEvents(writer).of_step(step)
        for step in splitter.finish():
            events += ItemEvents(writer).of_step(step, cut=True)
        for number, event in enumerate(events):
            fits(ResponseStreamEvent, encode_json({**event, "sequence_number": number}))
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert [item.content[0].text for item in done] == ["Is it so?", "It is."]
        assert [item.status for item in done] == ["completed", "incomplete"]
        (message,) = messages_of([writer.kept(part) for part in splitter.parts])
        assert (message["reasoning_content"], message["content"]) == ("Is it so?", "It is.")


def test_items_of_one_answer_are_one_message():
    body = ResponsesRequest.model_validate_json(json.dumps(body_of("results")))
    messages = check_messages(conversation_of(body, body.input, toolbox_of(body.tools, body.input)).messages)
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[1]["reasoning_content"] == "Hm." and messages[1]["tool_calls"][0]["id"] == "call_1"
    assert messages[2] == {"role": "tool", "tool_call_id": "call_1", "content": "12:00"}
    body = ResponsesRequest.model_validate_json(json.dumps(body_of("what an agent sends")))
    messages = conversation_of(body, body.input, toolbox_of(body.tools, body.input)).messages
    assert messages[0] == {"role": "system", "content": "You are a coding agent.\n\n<permissions>"}
    assert [message["role"] for message in messages] == ["system", "user", "user", "assistant", "tool"]


def test_tools_that_come_later_are_told_of_there_and_not_listed():
    def brings(kind: str, *names: str, **more: Any) -> dict[str, Any]:
        return {"type": kind, "tools": [{**NOW, "name": name} for name in names], **more}

    user = {"type": "message", "role": "user", "content": "Hi"}
    searched = brings("tool_search_output", "c", "now", call_id="s")
    asked = {"type": "tool_search_call", "call_id": "s", "arguments": {"q": 1}}
    given = [brings("additional_tools", "a"), user, asked, searched, user, brings("additional_tools", "d", "c")]
    body = ResponsesRequest.model_validate_json(json.dumps({"model": "m", "input": given, "tools": [NOW]}))
    names = lambda functions: [function["function"]["name"] for function in functions]  # noqa: E731
    tools = toolbox_of(body.tools, body.input)
    assert names(tools.listed) == ["now", "a"] and names(tools.functions) == ["now", "a", "c", "d"]
    assert tools.paths == ["tools.0", "input.0.tools.0", "input.3.tools.0", "input.5.tools.0"]
    conversation = conversation_of(body, body.input, tools)
    assert names(conversation.listed) == ["now", "a"]
    _, call, result, _, told = check_messages(conversation.messages)
    assert call["tool_calls"][0]["function"] == {"name": "tool_search", "arguments": {"q": 1}}
    assert result["tool_call_id"] == "s" and result["content"].count('"name": ') == 1 and '"c"' in result["content"]
    assert told["role"] == "developer" and '"name": "d"' in told["content"] and '"name": "c"' not in told["content"]
    top = toolbox_of(body.tools, body.input, lists_all=True)
    assert names(top.listed) == ["now", "a", "c", "d"] and not any(top.told.values())
    result = messages_of(body.input, told=top.told)[2]
    assert result["content"] == "c, now"
