"""A call that begins inside thoughts which the model never closes is a call, in every dialect, whole and streamed."""

from __future__ import annotations

import json

import pytest

SCHEMA = {"type": "object", "properties": {"zone": {"type": "string"}}}
FUNCTION = {"name": "now", "parameters": SCHEMA}
ASKED = {"role": "user", "content": "Time? [open]"}
OPENAI = {
    "model": "scripted",
    "messages": [ASKED],
    "tools": [{"type": "function", "function": FUNCTION}],
    "max_tokens": 20,
    "temperature": 0,
}
ANTHROPIC = {
    "model": "scripted",
    "messages": [ASKED],
    "tools": [{"name": "now", "input_schema": SCHEMA}],
    "max_tokens": 2000,
    "temperature": 0,
    "thinking": {"type": "enabled", "budget_tokens": 1024},
}
RESPONSES = {
    "model": "scripted",
    "input": [ASKED],
    "tools": [{"type": "function", **FUNCTION}],
    "max_output_tokens": 20,
    "temperature": 0,
}
OLLAMA = {
    "model": "scripted",
    "messages": [ASKED],
    "tools": OPENAI["tools"],
    "think": True,
    "options": {"temperature": 0},
}
ROUTES = {
    "/v1/chat/completions": OPENAI,
    "/v1/messages": ANTHROPIC,
    "/v1/responses": RESPONSES,
    "/api/chat": OLLAMA,
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_inside_open_thoughts_is_a_call(scripted, route, stream):
    answer = scripted.post(route, {**ROUTES[route], "stream": stream})
    assert answer.status_code == 200, answer.text
    text = answer.text
    assert "<tool_call>" not in text and "No time" in text
    assert '"now"' in text and "zone" in text
    if route == "/v1/chat/completions" and not stream:
        (choice,) = answer.json()["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["reasoning_content"] == "No time yet."
        (call,) = choice["message"]["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("now", {"zone": "Z"})
