"""Old results of tools are cleared where a prompt has become long, as Anthropic's client asks for it."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest
from anthropic.types.beta import BetaMessage, BetaMessageTokensCount
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from support.reciting import Recital, small_tokenizer, write_reciting_model
from support.sdk_types import fits, named_events

from octavo.entrypoints.anthropic.editing import CLEARED, clear_tool_uses
from octavo.entrypoints.anthropic.protocol import ClearToolUses, InputMessage

READ = {"name": "read", "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}}}
KIND = "clear_tool_uses_20250919"


def call(number: int, name: str = "read") -> dict[str, Any]:
    content = [{"type": "tool_use", "id": f"toolu_{number}", "name": name, "input": {"path": f"{number}.py"}}]
    return {"role": "assistant", "content": content}


def result(number: int, text: str = "fox ") -> dict[str, Any]:
    content = [{"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": f"{number}: {text * 120}"}]
    return {"role": "user", "content": content}


def conversation(calls: int) -> list[dict[str, Any]]:
    turns = [message for number in range(calls) for message in (call(number), result(number))]
    return [{"role": "user", "content": "Mend it."}, *turns]


def edit(**fields: Any) -> dict[str, Any]:
    return {"edits": [{"type": KIND, **fields}]}


def at_least(kind: str, value: int) -> dict[str, Any]:
    return {"type": kind, "value": value}


TEMPLATE = (
    "{% set last = namespace(user=0) %}{% for m in messages if m.role == 'user' %}"
    "{% set last.user = messages.index(m) %}{% endfor %}{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content and (preserve_thinking or loop.index0 > last.user) %}<think>{{ m.reasoning_content }}"
    "</think>{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "({{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def server(start, tmp_path_factory):
    """A model that takes 4,096 tokens."""
    folder = tmp_path_factory.mktemp("edited") / "model"
    scripts = {"Mend all that fails.": "It is mended."}
    special = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
    backend = small_tokenizer([*scripts, *scripts.values(), CLEARED, "fox "], special)
    write_reciting_model(folder, backend, Recital(scripts, TEMPLATE, "<|end|>", context=4096))
    return start("--served-model-name", "tiny", "--kv-cache-memory-bytes", "256MiB", model=folder)


@pytest.fixture(scope="module")
def client(server):
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def ask(client: anthropic.Anthropic, calls: int, management: dict[str, Any] | None) -> BetaMessage:
    more = {} if management is None else {"context_management": management, "betas": ["context-management-2025-06-27"]}
    return client.beta.messages.create(model="tiny", max_tokens=2, messages=conversation(calls), tools=[READ], **more)


def prompt_of(message: BetaMessage) -> int:
    return message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def test_what_was_cleared_is_told_and_is_not_read(client):
    whole = ask(client, 5, None)
    cut = ask(client, 5, edit(trigger=at_least("input_tokens", 100), keep=at_least("tool_uses", 2)))
    assert whole.context_management is None
    assert cut.context_management is not None
    (applied,) = cut.context_management.applied_edits
    assert applied.type == KIND and applied.cleared_tool_uses == 3
    assert applied.cleared_input_tokens == prompt_of(whole) - prompt_of(cut) > 0


def test_a_stream_tells_it_as_well(server):
    body = {
        "model": "tiny",
        "max_tokens": 2,
        "messages": conversation(5),
        "tools": [READ],
        "context_management": edit(trigger=at_least("tool_uses", 4)),
    }
    told = next(data for name, data in named_events(f"{server.url}/v1/messages", body) if name == "message_delta")
    assert json.loads(told)["context_management"]["applied_edits"][0]["cleared_tool_uses"] == 2


def test_counting_says_what_it_would_be_without(server):
    body = {"model": "tiny", "messages": conversation(5), "tools": [READ]}
    edited = {**body, "context_management": edit(trigger=at_least("input_tokens", 100))}
    plain = server.post("/v1/messages/count_tokens", body).json()
    answer = server.post("/v1/messages/count_tokens", edited)
    count = fits(BetaMessageTokensCount, answer.text)
    assert count.input_tokens < plain["input_tokens"] and "context_management" not in plain
    assert answer.json()["context_management"] == {"original_input_tokens": plain["input_tokens"]}


@pytest.mark.parametrize(
    "fields",
    [
        {},  # 100,000 tokens
        {"trigger": at_least("input_tokens", 3000)},
        {"trigger": at_least("tool_uses", 5)},
        {"trigger": at_least("input_tokens", 100), "clear_at_least": at_least("input_tokens", 3000)},
        {"trigger": at_least("input_tokens", 100), "keep": at_least("tool_uses", 5)},
        {"trigger": at_least("input_tokens", 100), "exclude_tools": ["read"]},
    ],
    ids=["default", "short", "few calls", "too little", "all kept", "excluded"],
)
def test_nothing_is_cleared_where_that_is_not_asked(client, fields):
    answer = ask(client, 5, edit(**fields))
    assert answer.context_management is not None and answer.context_management.applied_edits == []
    assert prompt_of(answer) == prompt_of(ask(client, 5, None))


def test_a_conversation_that_is_too_long_fits_once_it_is_cleared(client):
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        ask(client, 30, None)
    answer = ask(client, 30, edit(trigger=at_least("input_tokens", 500), clear_tool_inputs=True))
    assert answer.context_management is not None
    (applied,) = answer.context_management.applied_edits
    assert applied.cleared_tool_uses == 27 and applied.cleared_input_tokens > 500


def thinks(thought: str, text: str = "So.") -> dict[str, Any]:
    blocks = [{"type": "thinking", "thinking": thought, "signature": ""}, {"type": "text", "text": text}]
    return {"role": "assistant", "content": blocks}


THOUGHTFUL = [
    {"role": "user", "content": "One?"},
    thinks("fox " * 50),
    {"role": "user", "content": "Two?"},
    thinks("fox " * 30),
    {"role": "user", "content": "Mend all that fails."},
]


def think_edit(keep: Any) -> dict[str, Any]:
    return {"edits": [{"type": "clear_thinking_20251015", **({} if keep is None else {"keep": keep})}]}


def test_earlier_thoughts_go_where_a_request_wants_it(client):
    def ask(keep: Any, **more: Any) -> BetaMessage:
        management = {"context_management": think_edit(keep), **more}
        return client.beta.messages.create(model="tiny", max_tokens=2, messages=THOUGHTFUL, **management)

    plain = client.beta.messages.create(model="tiny", max_tokens=2, messages=THOUGHTFUL)
    for keep in ("all", {"type": "all"}, {"type": "thinking_turns", "value": 2}):
        answer = ask(keep)
        assert prompt_of(answer) == prompt_of(plain), "they stay by default"
        assert not (answer.context_management and answer.context_management.applied_edits)
    for keep in (None, {"type": "thinking_turns", "value": 1}):
        answer = ask(keep)
        (applied,) = answer.context_management.applied_edits
        assert (applied.type, applied.cleared_thinking_turns) == ("clear_thinking_20251015", 2)
        assert applied.cleared_input_tokens == prompt_of(plain) - prompt_of(answer) > 80
    count = client.beta.messages.count_tokens(model="tiny", messages=THOUGHTFUL, context_management=think_edit(None))
    assert count.input_tokens == prompt_of(answer)
    assert count.context_management.original_input_tokens == prompt_of(plain)
    many = think_edit(None)["edits"] + edit(trigger=at_least("tool_uses", 0))["edits"]
    both = ask(None, context_management={"edits": many})
    assert both.context_management.applied_edits == answer.context_management.applied_edits


@pytest.mark.parametrize("keep", ["some", {"type": "turns"}, {"type": "thinking_turns", "value": 0}, 3], ids=str)
def test_other_words_for_kept_thoughts_are_refused(server, keep):
    body = {"model": "tiny", "max_tokens": 2, "messages": THOUGHTFUL, "context_management": think_edit(keep)}
    answer = server.post("/v1/messages", body)
    assert answer.status_code == 400 and "context_management.edits.0" in answer.json()["error"]["message"]


MESSAGES = TypeAdapter(list[InputMessage])
NAMES = st.sampled_from(["read", "write", "search"])


@given(
    st.lists(NAMES, max_size=8),
    st.integers(0, 9),
    st.sets(NAMES),
    st.one_of(st.booleans(), st.lists(NAMES, max_size=2)),
)
def test_the_last_calls_and_excluded_tools_keep_their_results(names, keep, excluded, inputs):
    raw = [message for number, name in enumerate(names) for message in (call(number, name), result(number))]
    asked = ClearToolUses(
        type=KIND,
        keep={"type": "tool_uses", "value": keep},
        exclude_tools=sorted(excluded),
        clear_tool_inputs=inputs,
    )
    before = MESSAGES.validate_python(raw)
    cleared = clear_tool_uses(before, asked)
    assert before == MESSAGES.validate_python(raw), "the request's own messages stay as they are"
    for number, name in enumerate(names):
        goes = number < len(names) - keep and name not in excluded
        asking, answering = cleared.messages[2 * number], cleared.messages[2 * number + 1]
        assert (answering.content[0].content[0].text == CLEARED) == goes
        gone = goes and (inputs is True or (inputs is not False and name in inputs))
        assert (asking.content[0].input == {}) == gone
    again = clear_tool_uses(cleared.messages, asked)
    assert not again.texts, "what is cleared is not counted twice"


def test_tools_that_a_search_has_found_stay():
    found = {"type": "tool_reference", "tool_name": "write"}
    searched = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_0", "content": [found]}]}
    messages = MESSAGES.validate_python([call(0, "ToolSearch"), searched])
    kept = clear_tool_uses(messages, ClearToolUses(type=KIND, keep={"type": "tool_uses", "value": 0}))
    assert kept.messages == messages and not kept.texts
