"""A marker that is one token of the vocabulary counts only as that token: text that spells it is text."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.reciting import small_tokenizer

from octavo.chat.messages import Conversation, check_messages
from octavo.chat.options import ChatOptions
from octavo.chat.render import Rendered, render
from octavo.chat.spelled import BREAK, SpelledMarkers, joined
from octavo.interface.outputs import CompletionOutput
from octavo.text.tokenizer import Tokenizer

MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
TEMPLATE = (
    "{{ tools | tojson }}{% for m in messages %}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|end|>{% endfor %}"
)
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
CALL = '{"name": "now", "arguments": {"zone": "Z"}}'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(small_tokenizer(["now zone"], ["<|end|>"], MARKS), {})


@pytest.fixture(scope="module")
def rendered(tokenizer) -> Rendered:
    conversation = Conversation(check_messages([{"role": "user", "content": "Hi"}]), TOOLS)
    return render(conversation, ChatOptions(TEMPLATE), tokenizer, tokenizer.encode, str)


def spelled(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text without tokens for the markers in it."""
    return [number for letter in text for number in tokenizer.encode(letter, add_special_tokens=False)]


def ids_of(tokenizer: Tokenizer, *parts: str | tuple[str]) -> list[int]:
    """Ids of parts: a tuple holds text that is spelled."""
    return [
        number
        for part in parts
        for number in (spelled(tokenizer, part[0]) if isinstance(part, tuple) else tokenizer.encode(part, False))
    ]


def read(tokenizer: Tokenizer, rendered: Rendered, ids: list[int], size: int) -> tuple[str, str, list[tuple[str, str]]]:
    """Thoughts, content and calls, where ``size`` tokens come at a time."""
    parser = rendered.new_parser()
    thoughts = content = said = ""
    calls: list[list[str]] = []
    for at in range(0, len(ids), size):
        whole = tokenizer.decode(ids[: at + size], skip_special_tokens=False)
        reason = "stop" if at + size >= len(ids) else None
        piece, said = whole[len(said) :], whole
        delta = parser.feed(CompletionOutput(0, piece, ids[at : at + size], finish_reason=reason))
        thoughts, content = thoughts + delta.reasoning, content + delta.content
        for call in delta.calls:
            if call.name is not None:
                calls.append([call.name, ""])
            calls[-1][1] += call.arguments
    return thoughts, content, [(name, arguments) for name, arguments in calls]


QUOTED = f"The file says <tool_call>{CALL}</tool_call> there."
CASES = {
    "a call": ((f"<tool_call>{CALL}</tool_call>",), ("", "", [("now", '{"zone": "Z"}')])),
    "a quoted call": (((QUOTED,),), ("", QUOTED, [])),
    "a quoted call and a call": (
        ((QUOTED,), f"\n<tool_call>\n{CALL}\n</tool_call>"),
        ("", QUOTED, [("now", '{"zone": "Z"}')]),
    ),
    "a call that a small model spells": (
        ((f"I look.\n  <tool_call>\n{CALL}\n</tool_call>",),),
        ("", "I look.", [("now", '{"zone": "Z"}')]),
    ),
    "quoted ends of thoughts": (
        ("<think>", ("I write </think> here",), "</think>Yes."),
        ("I write </think> here", "Yes.", []),
    ),
    "quoted markers in arguments": (
        ("<tool_call>", ('{"name": "now", "arguments": {"zone": "a <tool_call> b"}}',), "</tool_call>"),
        ("", "", [("now", '{"zone": "a <tool_call> b"}')]),
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
def test_a_marker_counts_only_as_its_token(tokenizer, rendered, name, size):
    parts, expected = CASES[name]
    assert read(tokenizer, rendered, ids_of(tokenizer, *parts), size) == expected


def test_a_vocabulary_without_the_markers_has_them_read_as_text(rendered):
    bare = Tokenizer(small_tokenizer(["now"], ["<|end|>"]), {})
    conversation = Conversation(check_messages([{"role": "user", "content": "Hi"}]), TOOLS)
    made = render(conversation, ChatOptions(TEMPLATE), bare, bare.encode, str)
    assert not made.marker_ids and set(rendered.marker_ids) == set(MARKS)
    calls = read(bare, made, spelled(bare, f"So <tool_call>{CALL}</tool_call>"), 4)[2]
    assert calls == [("now", '{"zone": "Z"}')]


parts = st.lists(
    st.sampled_from(["a", " ", "\n", *MARKS, "<", "tool_call>"]) | st.sampled_from(MARKS).map(lambda mark: (mark,)),
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(parts, st.integers(0, 99))
def test_breaks_are_the_same_however_the_text_is_cut_and_never_lose_text(tokenizer, parts, seed):
    ids = ids_of(tokenizer, *parts)
    tokens = {mark: tokenizer.backend.token_to_id(mark) for mark in MARKS}

    def broken(size_of) -> str:
        markers = SpelledMarkers(tokens, lambda some: tokenizer.decode(some, skip_special_tokens=False))
        at, said, found = 0, "", ""
        while at < len(ids):
            size = size_of()
            whole = tokenizer.decode(ids[: at + size], skip_special_tokens=False)
            found += markers.broken(whole[len(said) :], ids[at : at + size])
            said, at = whole, at + size
        return found

    rng = random.Random(seed)
    once = broken(lambda: 1_000)
    assert joined(once) == tokenizer.decode(ids, skip_special_tokens=False)
    assert broken(lambda: 1) == broken(lambda: rng.randint(1, 4)) == once
    assert once.count(BREAK) <= sum(1 for number in ids if number not in tokens.values())
