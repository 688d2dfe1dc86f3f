"""Streams put together again, in the form of the answer that is not streamed; ids that are random left out. All of an
answer, each event and line is strictly of its SDK's type."""

from __future__ import annotations

import json
from typing import Any

import httpx
from anthropic.types import Message, RawMessageStreamEvent
from ollama import ChatResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from support.sdk_types import fits, named_events

from octavo.text.messages import object_of

PATHS = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
    "ollama": "/api/chat",
}

WHOLE = {"chat": ChatCompletion, "messages": Message, "responses": Response, "ollama": ChatResponse}
# vLLM's in chats, and Ollama's own of calls
EXTRAS = (
    "stop_reason",
    "token_ids",
    "prompt_token_ids",
    "prompt_logprobs",
    "kv_transfer_params",
    "reasoning",
    "reasoning_content",
    "id",
    "index",
)


def body_for(dialect: str, prompt: str, max_tokens: int, stop: list[str], function: dict[str, Any] | None) -> Any:
    """One request in every dialect. ``function``: name, description and parameters."""
    messages = [{"role": "user", "content": prompt}]
    if dialect == "responses":  # which has no stop strings
        tools = [{"type": "function", **function}] if function else None
        return {"input": messages, "max_output_tokens": max_tokens, "temperature": 0, "tools": tools, "store": False}
    if dialect == "messages":
        tools = [{"name": function["name"], "input_schema": function["parameters"]}] if function else None
        shared = {"stop_sequences": stop, "max_tokens": max_tokens, "temperature": 0}
        return {"messages": messages, "tools": tools, **shared}
    tools = [{"type": "function", "function": function}] if function else None
    if dialect == "ollama":
        options = {"num_predict": max_tokens, "temperature": 0, "stop": stop}
        return {"messages": messages, "tools": tools, "options": options, "stream": False}
    return {"messages": messages, "tools": tools, "stop": stop, "max_tokens": max_tokens, "temperature": 0}


def whole(url: str, dialect: str, body: dict[str, Any]) -> Any:
    """The answer that is not streamed, without random ids and times."""
    answer = httpx.post(url + PATHS[dialect], json={**body, "stream": False}, timeout=60)
    assert answer.status_code == 200, answer.text
    fits(WHOLE[dialect], answer.text, EXTRAS)
    return _plain(dialect, answer.json())


def streamed(url: str, dialect: str, body: dict[str, Any]) -> Any:
    """The same of a stream."""
    if dialect == "messages":
        return _plain(dialect, fold_messages(named_events(url + PATHS[dialect], body)))
    if dialect == "responses":
        return _plain(dialect, fold_responses(named_events(url + PATHS[dialect], body)))
    with httpx.stream("POST", url + PATHS[dialect], json={**body, "stream": True}, timeout=60) as response:
        text = response.read().decode()
        assert response.status_code == 200, text
    return _plain(dialect, _fold_ollama(text) if dialect == "ollama" else _fold_chat(text))


def fold_messages(events: list[tuple[str, str]]) -> dict[str, Any]:
    """Anthropic's message."""
    message: dict[str, Any] = {}
    pieces: list[str] = []
    for kind, data in events:
        if kind != "ping":  # which the SDK drops before its types
            fits(RawMessageStreamEvent, data)
        event = json.loads(data)
        if kind == "message_start":
            message = event["message"]
        elif kind == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            pieces = []
        elif kind == "content_block_delta":
            block = message["content"][event["index"]]
            name, text = next((key, value) for key, value in event["delta"].items() if key != "type")
            if name == "partial_json":
                pieces.append(text)
            else:
                block[name] += text
        elif kind == "content_block_stop" and pieces:
            message["content"][event["index"]]["input"] = object_of("".join(pieces))
        elif kind == "message_delta":
            message |= {**event["delta"], "usage": event["usage"]}
    assert events[-1][0] == "message_stop"
    return message


def fold_responses(events: list[tuple[str, str]]) -> dict[str, Any]:
    """OpenAI's response, its items made of the deltas: clients add those to what was there when an item was added."""
    items: list[dict[str, Any]] = []
    texts: dict[str, str] = {}
    for _, data in events:
        fits(ResponseStreamEvent, data)
    for kind, data in events[2:-1]:
        event = json.loads(data)
        if kind.endswith(".added"):
            empty = event.get("part") or event["item"]
            assert not any(empty.get(name) for name in ("text", "arguments", "input", "content", "summary")), empty
        if kind.endswith(".delta"):
            texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
        elif kind == "response.output_item.done":
            item = event["item"]
            said = item.get("arguments", item.get("input"))
            if said is None:
                (part,) = item["content"] or item["summary"]
                said = part["text"]
            assert said == texts.get(item["id"], ""), (item, texts)
            items.append(item)
    last = json.loads(events[-1][1])["response"]
    assert last["output"] == items
    return last


def _fold_chat(text: str) -> dict[str, Any]:
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    reason = None
    for line in text.split("\n\n")[:-2]:
        fits(ChatCompletionChunk, line.removeprefix("data: "), EXTRAS)
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            delta, reason = choice["delta"], choice["finish_reason"] or reason
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for call in delta.get("tool_calls") or []:
                if call["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
                message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    calls = [{"function": call} for call in message["tool_calls"]]
    return {"choices": [{"message": {**message, "tool_calls": calls}, "finish_reason": reason}]}


def _fold_ollama(text: str) -> dict[str, Any]:
    message: dict[str, Any] = {"content": "", "thinking": "", "tool_calls": []}
    answer: dict[str, Any] = {}
    for line in text.splitlines():
        fits(ChatResponse, line, EXTRAS)
        answer = json.loads(line)
        for name in message:
            message[name] += answer["message"].get(name) or type(message[name])()
    assert answer["done"]
    return {**answer, "message": message}


def _plain(dialect: str, answer: dict[str, Any]) -> Any:
    """(reasoning, text, calls as (name, arguments), why it ended)"""
    if dialect == "messages":
        blocks = answer["content"]
        calls = [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
        found = [block.get("thinking", "") for block in blocks], [block.get("text", "") for block in blocks]
        return *map("".join, found), calls, (answer["stop_reason"], answer["stop_sequence"])
    if dialect == "responses":
        items = answer["output"]
        texts = {"reasoning": "", "message": ""}
        for item in items:
            if item["type"] in texts:
                texts[item["type"]] += (item["content"] or item["summary"])[0]["text"]
        calls = [(item["name"], item["arguments"]) for item in items if item["type"] == "function_call"]
        return texts["reasoning"], texts["message"], calls, (answer["status"], answer["incomplete_details"])
    if dialect == "ollama":
        message = answer["message"]
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]
        return message.get("thinking") or "", message["content"], calls, answer["done_reason"]
    (choice,) = answer["choices"]
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]
    return message.get("reasoning_content") or "", message["content"] or "", calls, choice["finish_reason"]
