"""Calls of earlier turns as clients send them back: their arguments are an object, or an error names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

USER = {"role": "user", "content": "x"}
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": FUNCTION}]  # else the prompt shows no calls


def chat(arguments: Any) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {
        "messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}],
        "tools": TOOLS,
        "max_tokens": 1,
    }


def responses(arguments: Any) -> dict[str, Any]:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
    return {"input": [USER, call], "tools": [{"type": "function", **FUNCTION}], "max_output_tokens": 1}


def messages(arguments: Any) -> dict[str, Any]:
    call = {"type": "tool_use", "id": "c", "name": "f", "input": arguments}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "12"}
    said = [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    return {"messages": said, "tools": [{"name": "f", "input_schema": {"type": "object"}}], "max_tokens": 1}


def ollama(arguments: Any) -> dict[str, Any]:
    call = {"function": {"name": "f", "arguments": arguments}}
    said = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    return {"model": "tiny", "messages": said, "tools": TOOLS, "stream": False, "options": {"num_predict": 1}}


# By route: the body of a request whose history has a call, and the field of its arguments.
ROUTES = {
    "/v1/chat/completions": (chat, "messages.1.tool_calls.0.function.arguments"),
    "/v1/responses": (responses, "input.1.arguments"),
    "/v1/messages": (messages, "messages.1.content.0.input"),
    "/api/chat": (ollama, "messages.1.tool_calls.0.function.arguments"),
}
NO_OBJECTS = ["x", "5", "[1]", '"{}"', "true", "{} x", "[" * 100_000, [1], [["a", 1]], 5, 2.5, True, False]


def prompt_tokens(server: Any, path: str, arguments: Any) -> int:
    answer = server.post(path, ROUTES[path][0](arguments))
    assert answer.status_code == 200, answer.text
    told = answer.json()
    if path == "/api/chat":
        return int(told["prompt_eval_count"])
    used = told["usage"]
    return int(used.get("prompt_tokens") or used["input_tokens"] + used.get("cache_read_input_tokens", 0))


@pytest.mark.parametrize("arguments", NO_OBJECTS, ids=lambda value: repr(value)[:12])
@pytest.mark.parametrize("path", ROUTES)
def test_arguments_that_are_no_object_are_refused_by_their_place(shared_server, path, arguments):
    make, field = ROUTES[path]
    answer = shared_server.post(path, make(arguments))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert field in message and len(message) < 500


@pytest.mark.parametrize("path", ROUTES)
def test_an_object_may_be_a_text_and_nothing_is_the_empty_one(shared_server, path):
    """But for Anthropic's, whose own clients send an object always."""
    given: dict[str, Any] = {"a": 1}
    whole, none = (
        prompt_tokens(shared_server, path, value if "responses" not in path else json.dumps(value))
        for value in (given, {})
    )
    assert whole > none
    if path == "/v1/messages":
        return
    assert prompt_tokens(shared_server, path, json.dumps(given)) == whole
    for empty in ("", " ", "null", *([None] if "responses" not in path else [])):
        assert prompt_tokens(shared_server, path, empty) == none, empty
