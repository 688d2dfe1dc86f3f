"""Tool calls are counted by format, in every dialect, whole and streamed, once an answer."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

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
