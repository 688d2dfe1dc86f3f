"""A model's own response_template makes a row of the table of formats: it reads what transformers reads by it, and no
regular expression of a model's repository is ever run."""

from __future__ import annotations

import json
import logging
import time
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.server.tools.test_format_rows import SCHEMAS, read_in_all_cuts
from tests.support.reciting import small_tokenizer
from transformers.utils.chat_parsing import parse_response

from octavo.chat.messages import Conversation, check_messages
from octavo.chat.options import ChatOptions
from octavo.chat.own_format import with_response_template
from octavo.chat.render import render
from octavo.chat.tools.formats.response_template import parts_of, response_format
from octavo.chat.tools.formats.writer import write_calls
from octavo.errors import ConfigError
from octavo.interface.outputs import CompletionOutput
from octavo.text.tokenizer import Tokenizer

FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
THINKING = {"open": "<think>", "close": "</think>", "content": "text"}
XML = {
    "open_pattern": r"<tool_call>\s*<function=(?P<name>\w+)>",
    "close": "</tool_call>",
    "repeats": True,
    "content": "xml-inline",
    "content_args": {
        "tag_pattern": r"<parameter=(?P<key>\w+)>\s*(?P<value>.*?)\s*</parameter>",
        "value_parser": {"name": "json", "args": {"allow_non_json": True}},
    },
    "transform": FUNCTION,
}
TAGGED = {
    "open_pattern": r"\[call\](?P<name>[^\[]+)\[with\]",
    "close": "[/call]",
    "repeats": True,
    "content": "xml-inline",
    "content_args": {
        "tag_pattern": "<key>(?P<key>[^<]+)</key><value>(?P<value>.*?)</value>",
        "value_parser": {"name": "json", "args": {"allow_non_json": True}},
    },
    "transform": FUNCTION,
}
KEYED = {
    **TAGGED,
    "content_args": {
        **TAGGED["content_args"],
        "tag_pattern": r"<key>(?P<key>[^<]+)</key>\s*<value>(?P<value>.*?)</value>",
    },
}
TYPED = {
    "open_pattern": r"<\|calls>call:(?P<name>\w+)",
    "close": "<calls|>",
    "repeats": True,
    "content": "json",
    "content_args": {"unquoted_keys": True, "string_delims": [["<'>", "<'>"]]},
    "transform": FUNCTION,
}
NAMED = {
    "open_pattern": r"<\|use\|>(?P<name>\w+)<\|with\|>",
    "close_pattern": r"<\|done\|>|$",
    "repeats": True,
    "content": "json",
    "transform": FUNCTION,
}
OBJECTS = {
    "open": "<use>",
    "close": "</use>",
    "repeats": True,
    "content": "json",
    "transform": {
        "type": "function",
        "function": {"name": "{content.tool}", "arguments": "{content.given}"},
    },
}
LISTED = {
    "open": "<actions>",
    "close": "</actions>",
    "content": "json",
    "transform": {"type": "function", "function": {"name": "{tool}", "arguments": "{given}"}},
    "transform_each": True,
}
PYTHON = {
    "open": "<|py|>",
    "close": "<|/py|>",
    "content": "python-call-list",
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
    "transform_each": True,
}
KINDS = {
    "xml": XML, "tagged": TAGGED, "keyed": KEYED, "typed": TYPED, "named": NAMED, "objects": OBJECTS, "listed": LISTED,
    "python": PYTHON,
}  # fmt: skip


def whole(calls: dict[str, Any]) -> dict[str, Any]:
    return {
        "start_anchor": "<|assistant|>",
        "fields": {"thinking": THINKING, "content": {"content": "text"}, "tool_calls": calls},
    }


texts = st.sampled_from(["Oslo", "it's", "<b>x</b>", "a\n  b", "日 🙂", "x, y: {z}"])
values = st.fixed_dictionaries(
    {},
    optional={
        "text": texts,
        "count": st.integers(-1000, 1000),
        "exact": st.booleans(),
        "tags": st.lists(texts, min_size=1, max_size=2),
    },
)
calls = st.lists(st.tuples(st.just("write"), values) | st.just(("now", {})), min_size=1, max_size=3)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(calls)
def test_a_row_reads_the_calls_that_transformers_reads_however_they_are_cut(kind, made):
    row = response_format(whole(KINDS[kind])).row
    text = "Let me look." + write_calls(row, made)
    if not row.listed and kind != "python":
        text = text.replace("}<|use|>", "}<|done|><|use|>")
    tools = [{"type": "function", "function": {"name": name, "parameters": one}} for name, one in SCHEMAS.items()]
    expected = parse_response(text, whole(KINDS[kind]), prefix="", tools=tools)["tool_calls"]
    found = read_in_all_cuts(row, text)
    assert found == ("Let me look.", "", made)
    assert [(one["function"]["name"], one["function"]["arguments"]) for one in expected] == made


@pytest.mark.parametrize(
    ("pattern", "parts"),
    [
        (r"<a>\s*<b=(?P<name>\w+)>", ("<a>", " ", "<b=", "{name}", ">")),
        (r"<\|a\|>[\s\n]*x\.y", ("<|a|>", " ", "x.y")),
        ("<a>\n(?P<name>[^<]+?)\n?", ("<a>", " ", "{name}", " ")),
    ],
)
def test_patterns_of_literals_names_and_spaces_are_read(pattern, parts):
    assert parts_of(pattern) == parts


@pytest.mark.parametrize("pattern", ["(a+)+$", "(?:x|y)", "a*b", "x{3}", ".*", r"\w+", r"(?P<name>(a+)+)", "a" * 1001])
def test_a_pattern_that_says_more_is_refused_at_once(pattern):
    begin = time.process_time()
    with pytest.raises(ValueError, match="pattern"):
        parts_of(pattern)
    with pytest.raises(ValueError, match="pattern"):
        response_format(whole({**XML, "open_pattern": pattern + "(?P<name>x)"}))
    assert time.process_time() - begin < 5, "it was run"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ([], "fields"),
        ({"version": 2, "fields": {}}, "version 2"),
        ({"fields": {"mood": {"open": "<mood>"}}}, "mood"),
        (whole({**OBJECTS, "content": "kv-lines"}), "kv-lines"),
        (whole({"close": "x", "content": "json"}), "open"),
        (whole({**NAMED, "close_pattern": r"</a>\s*</b>"}), "close.*white space"),
        (whole({**OBJECTS, "close_pattern": r"</(?P<name>\w+)>"}), "close.*no names"),
        (whole({**OBJECTS, "open_pattern": r"<a>\s*<b>"}), "open.*white space"),
        (whole({**XML, "open_pattern": r"<a>\s*<b>\s*<c>(?P<name>\w+)>"}), "open.*white space"),
        (whole({**XML, "open_pattern": r"<c>(?P<name>\w+)<d>\s*<e>"}), "open.*white space"),
        (whole({**OBJECTS, "open_pattern": r"\s*"}), "begin"),
        (whole({**OBJECTS, "close": ["</a>", "</b>"]}), 'one "close"'),
        ({"fields": {"thinking": {"open_pattern": r"<a>\s*<b>", "close": "</a>"}}}, "open.*white space"),
        (whole({**TYPED, "content_args": {"unquoted_keys": True, "string_delims": [[1, 1]]}}), "string_delims"),
        ({"fields": {"thinking": {"open": "<think>"}}}, "close"),
        (whole({**OBJECTS, "transform": {"function": {"name": "f", "arguments": "{content.x}"}}}), "name"),
    ],
)
def test_what_no_row_can_say_is_refused_in_words(template, why):
    with pytest.raises(ValueError, match=why):
        response_format(template)


any_json = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2) | st.sampled_from(["", " ", "<a>", "json", "{name}", r"\s*", "x|$"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["name", "arguments", "function", "open"]), inner, max_size=2)
    ),
    max_leaves=4,
)


any_arguments = st.fixed_dictionaries(
    {},
    optional={
        "unquoted_keys": any_json,
        "string_delims": st.lists(st.lists(any_json, max_size=2) | any_json, max_size=2) | any_json,
        "tag_pattern": any_json,
    },
)
any_changes = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(("open", "open_pattern", "close", "close_pattern", "content", "transform"), any_json),
)
any_field = any_json | st.builds(
    lambda own, changes, arguments: {**own, **changes, "content_args": {**own.get("content_args", {}), **arguments}},
    st.sampled_from([*KINDS.values(), THINKING]),
    any_changes | st.just({}),
    any_arguments | st.just({}),
)
any_fields = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("tool_calls", "thinking", "reasoning", "content"), any_field)
)


@settings(max_examples=300, deadline=None)
@given(
    any_json
    | st.fixed_dictionaries({"fields": any_fields | any_json}, optional={"version": any_json})
    | st.fixed_dictionaries({"fields": any_fields})
)
@example(whole({**TYPED, "content_args": {"unquoted_keys": True, "string_delims": 1}}))
@example(whole({**TYPED, "content_args": {"unquoted_keys": True, "string_delims": {"a": "b"}}}))
def test_no_json_is_more_than_refused(template):
    with suppress(ValueError):
        response_format(template)


KNOWS = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}<|assistant|>"
TOOLS = [{"type": "function", "function": {"name": name, "parameters": one}} for name, one in SCHEMAS.items()]


def answered(told: Any, flags: dict[str, Any], text: str, template: str = KNOWS) -> tuple[str, str, list[Any]]:
    tokenizer = Tokenizer(
        small_tokenizer(["Is it so?"], ["<|end|>"]), {} if told is None else {"response_template": told}
    )
    options = with_response_template(ChatOptions(template, **flags), tokenizer)
    conversation = Conversation(check_messages([{"role": "user", "content": "Hi"}]), tools=TOOLS)
    parser = render(conversation, options, tokenizer, tokenizer.encode, str).new_parser()
    thoughts, content, found = "", "", []
    for at in range(len(text) + 1):
        ends = at == len(text)
        delta = parser.feed(CompletionOutput(0, text[at : at + 1], [], finish_reason="stop" if ends else None))
        thoughts, content = thoughts + delta.reasoning, content + delta.content
        for call in delta.calls:
            found += [] if call.name is None else [[call.name, ""]]
            found[-1][1] += call.arguments
    return thoughts, content, [(name, json.loads(arguments)) for name, arguments in found]


SPOKEN = '<think>I wonder.</think>\n\nLook.<use>{"tool": "write", "given": {"text": "Oslo"}}</use>'
READ = ("I wonder.", "Look.", [("write", {"text": "Oslo"})])


@pytest.mark.parametrize(
    "flags", [{}, {"tool_call_parser": "hf"}, {"tool_call_parser": "hf", "reasoning_parser": "hf"}]
)
def test_a_template_that_shows_no_format_has_that_of_its_response_template(flags):
    assert answered(whole(OBJECTS), flags, SPOKEN) == READ


def test_the_format_that_a_template_shows_comes_before_its_response_template():
    hermes = (
        "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}'
        "{% endfor %}"
    )
    own = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert answered(whole(OBJECTS), {}, own, hermes) == ("", "", [("now", {})])
    assert answered(whole(OBJECTS), {"tool_call_parser": "hf"}, SPOKEN, hermes) == READ


@pytest.mark.parametrize("flag", ["tool_call_parser", "reasoning_parser"])
@pytest.mark.parametrize(
    ("told", "why"),
    [
        (None, "tokenizer_config.json has none"),
        (whole({**XML, "open_pattern": "(a+)+"}), "more than literals"),
        ({"fields": {"content": {"content": "text"}}}, "no field"),
    ],
)
def test_hf_is_refused_for_a_model_whose_answers_are_not_told(flag, told, why):
    with pytest.raises(ConfigError, match=f"{flag} hf .*{why}.*name another format"):
        answered(told, {flag: "hf"}, "")


def test_a_response_template_that_cannot_be_used_is_logged(caplog):
    with caplog.at_level(logging.WARNING):
        assert answered(whole({**XML, "open_pattern": "(a+)+"}), {}, "Hi")[1] == "Hi"
    assert "response_template in tokenizer_config.json is not used: the pattern" in caplog.text


def test_an_older_response_schema_is_not_used_and_the_log_says_so(caplog):
    tokenizer = Tokenizer(small_tokenizer(["Is it so?"], ["<|end|>"]), {"response_schema": {"type": "object"}})
    with caplog.at_level(logging.INFO):
        assert with_response_template(ChatOptions(KNOWS), tokenizer).response is None
    assert "response_schema in tokenizer_config.json is not used: only response_template is" in caplog.text
    with pytest.raises(ConfigError, match=r"tool_call_parser hf .*older response_schema"):
        with_response_template(ChatOptions(KNOWS, tool_call_parser="hf"), tokenizer)
