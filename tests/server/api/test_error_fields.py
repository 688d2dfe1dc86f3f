"""An error names the field that the client sent, in every dialect: whatever is wrong, and whatever words the engine has
for it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

PICTURE = "data:image/png;base64,aGk="
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^a+$"}}, "required": ["a"]}
FUNCTION = {"name": "f", "description": "It is called.", "parameters": SCHEMA}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": "a"}'}}
# By route, a valid request that has most of the fields of its dialect.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "tiny",
        "max_completion_tokens": 1,
        "temperature": 0,
        "stop": ["x"],
        "n": 1,
        "seed": 1,
        "top_p": 0.5,
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
            {"role": "assistant", "content": "It is.", "reasoning": "Hm.", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "1"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "parallel_tool_calls": False,
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "logit_bias": {"1": 1},
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    },
    "/v1/completions": {
        "model": "tiny",
        "prompt": ["Hello"],
        "max_tokens": 1,
        "temperature": 0,
        "stop": ["x"],
        "n": 1,
        "best_of": 1,
        "logit_bias": {"1": 1},
        "structured_outputs": {"regex": "a+"},
        "logprobs": 1,
        "echo": True,
    },
    "/v1/responses": {
        "model": "tiny",
        "max_output_tokens": 1,
        "temperature": 0,
        "instructions": "Be kind.",
        "top_p": 0.5,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": "a"}'},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "1"}]},
        ],
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
        "presence_penalty": 1,
        "reasoning": {"effort": "low"},
        "metadata": {"a": "b"},
        "store": False,
    },
    "/v1/messages": {
        "model": "tiny",
        "max_tokens": 1,
        "temperature": 0,
        "stop_sequences": ["x"],
        "top_k": 5,
        "system": "Be kind.",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": "a"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "1"}]},
        ],
        "tools": [{"name": "f", "description": "It is called.", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "f"},
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    },
    "/api/chat": {
        "model": "tiny",
        "stream": False,
        "format": SCHEMA,
        "options": {
            "num_predict": 1,
            "temperature": 0,
            "top_k": 5,
            "top_p": 0.5,
            "repeat_penalty": 1.1,
            "stop": ["x"],
            "presence_penalty": 1,
            "min_p": 0.1,
            "seed": 1,
        },
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "Hello"},
            {
                "role": "assistant",
                "content": "",
                "thinking": "Hm.",
                "tool_calls": [{"function": {"name": "f", "arguments": {"a": "a"}}}],
            },
            {"role": "tool", "tool_name": "f", "content": "1"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
    },
    "/api/generate": {
        "model": "tiny",
        "stream": False,
        "prompt": "Hello",
        "system": "Be kind.",
        "format": "json",
        "context": [5],
        "options": {"num_predict": 1, "temperature": 0, "stop": "x", "frequency_penalty": 1},
    },
}
# What is wrong in most places, also where it is of the right type.
BAD: list[Any] = [
    -7,
    1e300,
    2.5,
    True,
    "bogus",
    "",
    "[]",
    "{",
    [],
    [7],
    {},
    {"a": 7},
    10**12,
    "x" * 2000,
    ["x"] * 200,
    {"type": "nonsense"},
    {"pattern": "("},
    {"$ref": "#none"},
]


def paths(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if path:
        yield path
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield from paths(inner, (*path, str(key)))


def with_value(body: Any, path: tuple[str, ...], value: Any) -> Any:
    changed = json.loads(json.dumps(body))  # nothing in it twice
    at = changed
    for step in path[:-1]:
        at = at[int(step)] if isinstance(at, list) else at[step]
    if isinstance(at, list):
        at[int(path[-1])] = value
    else:
        at[path[-1]] = value
    return changed


def names(body: Any, field: str) -> bool:
    """Whether a field is in the body, or is missing where it would be."""
    at = body
    for step in field.split("."):
        if isinstance(at, dict) and step in at:
            at = at[step]
        elif isinstance(at, list) and step.isdecimal() and int(step) < len(at):
            at = at[int(step)]
        else:
            return at is not body
    return True


@pytest.mark.parametrize("route", BODIES)
def test_the_bodies_are_right(shared_server, route):
    answer = shared_server.post(route, BODIES[route])
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("route", BODIES)
def test_an_error_names_a_field_of_the_request(shared_server, route):
    @settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(path=st.sampled_from([*paths(BODIES[route])]), value=st.sampled_from(BAD))
    def check(path, value):
        body = with_value(BODIES[route], path, value)
        answer = shared_server.post(route, body)
        assert answer.status_code in (200, 400, 404), answer.text
        if answer.status_code != 200:
            check_names(route, body, path, answer.json())

    check()


def check_names(route: str, body: Any, path: tuple[str, ...], answer: Any) -> None:
    error = answer["error"]
    message = error if isinstance(error, str) else error["message"]
    begin = re.split(r"[ :]", message, maxsplit=1)[0]
    assert "truncate_prompt" not in message or route.startswith("/v1/c")
    if re.search(r"(prompt|it) has \d+ tokens", message):  # which is about all texts together
        return
    given = None if isinstance(error, str) else error.get("param")
    named = [given] if given is not None else [begin] if begin in body or "." in begin.strip(".") else []
    if not named:  # an error about the whole, or of the model's: then the value's place is in it, or the value itself
        assert path[0] in message or "chat template" in message or "model" in message, (path, answer)
    for field in named:
        assert names(body, field), (field, answer)
        assert field.split(".")[0] == path[0] or path[0] in ("tools", "tool_choice", "model", "n"), (path, answer)


# What is wrong, and the field that is to be named: those that pass through other dialects' words on their way.
CASES: list[tuple[str, tuple[str, ...], Any, str]] = [
    ("/v1/responses", ("input", "2", "arguments"), "[]", "input.2.arguments"),
    ("/v1/responses", ("input", "2", "arguments"), "{x", "input.2.arguments"),
    ("/v1/responses", ("input", "3", "output"), [{"type": "input_image", "image_url": PICTURE}], "input.3.output.0"),
    ("/v1/responses", ("input", "0", "content"), [{"type": "input_image", "image_url": PICTURE}], "input.0.content.0"),
    ("/v1/responses", ("instructions",), 7, "instructions"),
    ("/v1/responses", ("presence_penalty",), 7, "presence_penalty"),
    ("/v1/responses", ("text", "format", "schema"), {"type": "nonsense"}, "text.format"),
    ("/v1/responses", ("tools", "0", "parameters"), {"$ref": "#none"}, "tools.0.parameters"),
    ("/v1/messages", ("stop_sequences",), [""], "stop_sequences"),
    ("/v1/messages", ("stop_sequences",), ["x" * 2000], "stop_sequences"),
    ("/v1/messages", ("tools", "0", "input_schema"), {"$ref": "#none"}, "tools.0.input_schema"),
    ("/api/chat", ("options", "temperature"), -1, "options.temperature"),
    ("/api/chat", ("options", "repeat_penalty"), -1, "options.repeat_penalty"),
    ("/api/chat", ("options", "stop"), ["x" * 2000], "options.stop"),
    ("/api/chat", ("options", "top_p"), 7, "options.top_p"),
    ("/api/chat", ("messages", "2", "thinking"), 7, "messages.2.thinking"),
    ("/api/chat", ("messages", "3", "tool_name"), 7, "messages.3.tool_name"),
    ("/api/chat", ("format",), {"type": "nonsense"}, "format"),
    ("/v1/completions", ("prompt",), [[-7]], "prompt must"),
    ("/v1/completions", ("prompt",), [10**9], "prompt must"),
    ("/api/generate", ("context",), [10**9], "context must"),
    ("/api/generate", ("options", "frequency_penalty"), 7, "options.frequency_penalty"),
    ("/v1/chat/completions", ("messages", "2", "reasoning"), 7, "messages.2.reasoning"),
    ("/v1/chat/completions", ("max_completion_tokens",), -2, "max_completion_tokens"),
]


@pytest.mark.parametrize(("route", "path", "value", "field"), CASES)
def test_the_fields_own_name_and_place(shared_server, route, path, value, field):
    body = with_value(BODIES[route], path, value)
    if "format" in path:
        body |= {"tools": None, "tool_choice": None} if route.startswith("/v1") else {"tools": None}
    answer = shared_server.post(route, body)
    error = answer.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert answer.status_code == 400 and message.startswith(field), message
    if isinstance(error, dict) and "param" in error:
        assert error["param"].startswith(field.partition(" ")[0]), error


def test_items_are_counted_in_the_request_and_not_in_the_conversation(shared_server):
    first = shared_server.post("/v1/responses", {"input": "Hello", "max_output_tokens": 1}).json()
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "[]"}
    for body in ({"input": [call]}, {"input": [call], "previous_response_id": first["id"]}):
        answer = shared_server.post("/v1/responses", body)
        assert answer.json()["error"]["param"] == "input.0.arguments", answer.text
    many = shared_server.post("/v1/responses", {"input": [{"role": "user", "content": "x"}] * 10_001})
    assert many.json()["error"]["param"] == "input" and "messages" not in json.dumps(many.json()), many.text
