"""Tool calls are counted by format, in every dialect, whole and streamed, once an answer."""

from __future__ import annotations

import json

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.agent_chats import FULL_TEMPLATE
from support.reciting import Recital, small_tokenizer, write_reciting_model

from octavo.chat.tools.formats.table import TOOL_FORMATS
from octavo.chat.tools.parsers import reader_of

SCHEMA = {"type": "object", "properties": {"zone": {"type": "string"}}}
COMMON = {"model": "scripted", "temperature": 0}
ASKED = [{"role": "user", "content": "Time? [open]"}]


def body(route: str, name: str) -> dict:
    function = {"name": name, "parameters": SCHEMA}
    if route == "/v1/messages":
        return {**COMMON, "messages": ASKED, "tools": [{"name": name, "input_schema": SCHEMA}], "max_tokens": 2000}
    if route == "/v1/responses":
        return {**COMMON, "input": ASKED, "tools": [{"type": "function", **function}], "max_output_tokens": 20}
    asked = {**COMMON, "messages": ASKED, "tools": [{"type": "function", "function": function}]}
    return {**asked, "options": {"temperature": 0}} if route == "/api/chat" else {**asked, "max_tokens": 20}


def counts(server) -> tuple[float, float]:
    """Calls in Hermes' format, and calls of unknown names."""
    samples = [s for family in text_string_to_metric_families(server.get("/metrics").text) for s in family.samples]
    calls = [s.value for s in samples if s.name == "octavo:tool_calls_total" and s.labels["format"] == "hermes"]
    (unknown,) = (s.value for s in samples if s.name == "octavo:tool_calls_unknown_total")
    return sum(calls), unknown


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"])
def test_calls_of_every_dialect_are_counted(scripted, route):
    for name, stream in (("now", False), ("now", True), ("later", False), ("later", True)):
        calls, unknown = counts(scripted)
        answer = scripted.post(route, {**body(route, name), "stream": stream})
        assert answer.status_code == 200 and '"now"' in answer.text, answer.text
        assert counts(scripted) == (calls + 1, unknown + (name == "later"))


@pytest.mark.parametrize(
    ("text", "malformed"),
    [
        ('<tool_call>\n{"name": "now", "arguments": {"zone": oops}}\n</tool_call>', 1),
        ('<tool_call>\n{"name": "now", "arguments": "no object"}\n</tool_call>', 1),
        ("A <tool_call> is how I would write it.", 0),
        ('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', 0),
    ],
)
def test_what_began_as_a_call_with_a_name_is_malformed(text, malformed):
    reader = reader_of(TOOL_FORMATS["hermes"], ["now"])
    reader.feed(text)
    reader.finish()
    assert reader.num_malformed == malformed


BROKEN = "<tool_call>\n<function=now>\nzone: UTC, I think.\n</function>\n</tool_call>"
BEGUN = "<tool_call>\n<function=now"
WHOLE = "<tool_call>\n<function=later>\n<parameter=zone>\nUTC\n</parameter>\n</function>\n</tool_call>"
# By what the user says, the answer behind its thoughts, its text as clients see it, and the number of its calls.
SAID = {
    "please say what cannot be read as one": (BROKEN, BROKEN, 0),
    "now begin a call and break it off": (f"{BEGUN}\n{WHOLE}", BEGUN, 1),
    "and then one that is well made": (WHOLE, "", 1),
}


@pytest.fixture(scope="module")
def reciting(start, tmp_path_factory):
    folder = tmp_path_factory.mktemp("malformed") / "model"
    scripts = {cue: f"Hm.\n</think>\n\n{said}" for cue, (said, *_) in SAID.items()}
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    backend = small_tokenizer([*scripts, *scripts.values()], ("<|im_start|>", "<|im_end|>"), marks)
    write_reciting_model(folder, backend, Recital(scripts, FULL_TEMPLATE, "<|im_end|>"))
    return start("--served-model-name", "scripted", "--kv-cache-memory-bytes", "64MiB", model=folder)


def texts(found: object) -> str:
    """Every text in an answer, or in a line of a stream, that is neither thoughts nor of a call, joined."""
    if isinstance(found, list):
        return "".join(map(texts, found))
    if not isinstance(found, dict) or found.get("type") in ("reasoning", "thinking", "response.completed"):
        return ""
    if str(found.get("type")).endswith((".done", "reasoning_text.delta", "arguments.delta")):
        return ""
    own = [value for name in ("content", "text", "delta") if isinstance(value := found.get(name), str)]
    return "".join(own) + "".join(texts(value) for value in found.values() if not isinstance(value, str))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"])
def test_malformed_calls_are_shown_as_they_were_written_and_counted(reciting, route, stream):
    def total() -> tuple[float, float]:
        samples = [
            s for family in text_string_to_metric_families(reciting.get("/metrics").text) for s in family.samples
        ]
        named = ("octavo:tool_calls_malformed_total", "octavo:tool_calls_total")
        malformed, calls = (
            sum(s.value for s in samples if s.name == name and s.labels["format"] == "qwen3_xml") for name in named
        )
        return malformed, calls

    for cue, (_, shown, calls) in SAID.items():
        before = total()
        asked = body(route, "later")
        asked["input" if "input" in asked else "messages"] = [{"role": "user", "content": cue}]
        asked |= {name: 200 for name in ("max_tokens", "max_output_tokens") if name in asked}
        answer = reciting.post(route, {**asked, "stream": stream})
        assert answer.status_code == 200, answer.text
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
        events = [json.loads(line) for line in lines if line.startswith("{")]
        assert "".join(map(texts, events)).strip() == shown
        assert total() == (before[0] + (shown != ""), before[1] + calls)
