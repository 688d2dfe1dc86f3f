"""The answer to a message says what kept the cache from having more of its prompt."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from anthropic.types.beta import BetaMessage
from support.sdk_types import fits, named_events

from octavo.entrypoints.admission import retry_after
from octavo.entrypoints.anthropic import diagnostics
from octavo.entrypoints.anthropic.diagnostics import Fingerprint, compare

TOOL = {"name": "now", "description": "the time", "input_schema": {"type": "object", "properties": {}}}
FIRST: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 4,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=1;"},
        {"type": "text", "text": "Be brief. " * 20},
    ],
    "tools": [TOOL],
    "messages": [{"role": "user", "content": "Hello"}],
    "diagnostics": {"previous_message_id": None},
}


def ask(server: Any, body: dict[str, Any]) -> dict[str, Any]:
    answer = server.post("/v1/messages", body)
    assert answer.status_code == 200, answer.text
    fits(BetaMessage, answer.text)
    found: dict[str, Any] = answer.json()
    return found


def reason(server: Any, body: dict[str, Any]) -> dict[str, Any] | None:
    found: dict[str, Any] | None = ask(server, body)["diagnostics"]["cache_miss_reason"]
    return found


@pytest.fixture(scope="module")
def second(shared_server) -> dict[str, Any]:
    """The next turn, behind an answer; places that end what is cached and lines for billing are others."""
    first = ask(shared_server, FIRST)
    assert first["diagnostics"] == {"cache_miss_reason": None}
    body = copy.deepcopy(FIRST)
    body["diagnostics"]["previous_message_id"] = first["id"]
    body["system"][0]["text"] = "x-anthropic-billing-header: cc_version=1; cch=2;"
    said = [{"type": "text", "text": "More", "cache_control": {"type": "ephemeral"}}]
    body["messages"] += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": said}]
    body["messages"][0] = {"role": "user", "content": [{"type": "text", "text": "Hello"}]}
    return body


def test_a_conversation_that_goes_on_has_no_reason(shared_server, second):
    assert reason(shared_server, second) is None
    events = dict(named_events(shared_server.url + "/v1/messages", second))
    assert '"diagnostics":{"cache_miss_reason":null}' in events["message_start"]
    assert "diagnostics" not in ask(shared_server, {k: v for k, v in second.items() if k != "diagnostics"})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model": "also-tiny"}, None),  # another name of the same
        ({"system": "Be long."}, "system_changed"),
        ({"tools": [TOOL, {**TOOL, "name": "then"}]}, "tools_changed"),
        ({"messages": [{"role": "user", "content": "Hallo"}] * 3}, "messages_changed"),
        ({"messages": [{"role": "user", "content": "Bye"}]}, "messages_changed"),
    ],
    ids=str,
)
def test_what_differs_first_is_named(shared_server, second, change, why):
    found = reason(shared_server, {**second, **change})
    assert (found and found["type"]) == why
    assert why is None or found["cache_missed_input_tokens"] >= 0


def test_messages_that_nobody_knows_are_not_found(shared_server, second):
    for previous in ("msg_unknown", "resp_other"):
        asked = {**second, "diagnostics": {"previous_message_id": previous}}
        assert reason(shared_server, asked) == {"type": "previous_message_not_found"}


def test_a_model_is_the_first_that_may_differ_and_tokens_are_those_that_were_missed():
    one, other = (Fingerprint(name, name, "t", ["m"], 90) for name in "ab")
    told = compare(one, other).told(30).cache_miss_reason
    assert told is not None and (told.type, told.cache_missed_input_tokens) == ("model_changed", 60)
    assert compare(one, Fingerprint("a", "a", "t", ["m", "n"], 99)).told(0).cache_miss_reason is None
    assert diagnostics.KEPT_SECONDS == 24 * 3600


@pytest.mark.parametrize(
    ("seconds", "headers"), [(0.2, ("1", "200")), (0.001, ("1", "50")), (1.0, ("1", None)), (7.2, ("8", None))]
)
def test_less_than_a_second_is_said_in_milliseconds(seconds, headers):
    found = retry_after(seconds)
    assert (found["retry-after"], found.get("retry-after-ms")) == headers
