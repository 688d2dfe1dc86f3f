"""Harmony, the format of gpt-oss: answers are split the same however they are cut, demanded calls and forms are made in
the format, and earlier thoughts and calls come back as its template wants them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from octavo.chat.messages import check_messages
from octavo.chat.options import ChatOptions
from octavo.chat.tools.formats.table import TOOL_FORMATS
from octavo.chat.tools.grammars import call_grammar
from octavo.chat.tools.harmony import harmony_grammar, harmony_messages, speaks_harmony
from octavo.chat.tools.parsers import CallPiece, HarmonyParser, Reasoning
from octavo.interface.structured_output import StructuredOutputsParams, to_grammar
from octavo.text.chat_template import render

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}<|start|>functions to=assistant<|channel|>commentary<|message|>"
    "{{ m.content|tojson }}<|end|>"
    "{% elif m.tool_calls %}{% if m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments|tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
CALL = "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
Parsed = tuple[str, str, list[tuple[str, str]]]


def parse(chunks: list[str], cut: bool = False, **options: bool) -> Parsed:
    """Thoughts, content and calls; checks that names come first and once."""
    parser = HarmonyParser(("get_weather", "now"), **options)
    thoughts, content, calls = "", "", []
    for piece in [piece for chunk in chunks for piece in parser.feed(chunk)] + parser.finish(cut):
        if isinstance(piece, Reasoning):
            thoughts += piece.text
        elif isinstance(piece, str):
            content += piece
        elif piece.name is not None:
            assert piece.index == len(calls)
            calls.append((piece.name, piece.arguments))
        else:
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.arguments)
    return thoughts, content, calls


def every_cut(text: str, cut: bool = False, **options: bool) -> Parsed:
    whole = parse([text], cut, **options)
    assert parse(list(text), cut, **options) == whole, "one character at a time"
    for i in range(len(text) + 1):
        assert parse([text[:i], text[i:]], cut, **options) == whole, f"cut at {i}"
    return whole


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{ANALYSIS}Two and two.<|end|>{FINAL}4", ("Two and two.", "4", [])),
        (f"{ANALYSIS}Two <|end|>{FINAL} 4 < 5\n<|return|>", ("Two ", " 4 < 5\n", [])),
        ("<|channel|>final<|message|>4", ("", "4", [])),
        (f'{ANALYSIS}a<|end|>{CALL}{{"city": "Paris"}}', ("a", "", [("get_weather", '{"city": "Paris"}')])),
        (f'{ANALYSIS}a<|end|>{CALL} {{"a": "<|x"}} <|call|>', ("a", "", [("get_weather", '{"a": "<|x"}')])),
        # Recipients before the channel, without a space behind them, without arguments, of several calls.
        (" to=functions.now<|channel|>commentary json<|message|>{}<|call|>", ("", "", [("now", "{}")])),
        (
            "<|channel|>commentary to=functions.now<|constrain|>json<|message|><|call|>"
            "<|start|>assistant to=functions.f.g<|channel|>commentary<|message|>{}",
            ("", "", [("now", "{}"), ("f.g", "{}")]),
        ),
        # What is said before calls is content, calls of the model's own tools are thoughts.
        (
            f"{ANALYSIS}a<|end|>{FINAL.replace('final', 'commentary')}I look.<|end|>{ANALYSIS}b<|end|>{FINAL}c",
            ("a\nb", "I look.\nc", []),
        ),
        # Of two channels the last one counts.
        ("<|channel|>commentary to=assistant<|channel|>analysis<|message|>a<|end|>", ("a", "", [])),
        ("<|channel|>commentary to=commentary<|message|>a<|return|>", ("", "a", [])),
        ("<|channel|>analysis to=python code<|message|>print(1)<|call|>", ("print(1)", "", [])),
        # What is no JSON is shown as it is; what has no header is content; messages may lack their ends.
        (f"{CALL}city = Paris<|call|>", ("", "", [("get_weather", "city = Paris")])),
        (f'{CALL}{{"city": Paris}}<|call|>', ("", "", [("get_weather", '{"city": Paris}')])),
        ("Hello <|friend", ("", "Hello <|friend", [])),
        (f"{ANALYSIS}a{FINAL}b", ("a", "b", [])),
        ("<|start|>assistant<|channel|>final<|end|>b", ("", "b", [])),
        ("", ("", "", [])),
    ],
)
def test_an_answer_is_split_into_thoughts_content_and_calls(text: str, expected: Parsed) -> None:
    assert every_cut(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{ANALYSIS}Two a", ("Two a", "", [])),
        (f"{FINAL}4 <", ("", "4 <", [])),
        (f'{CALL}{{"city": "Pa', ("", "", [("get_weather", '{"city": "Pa')])),
        (CALL, ("", "", [("get_weather", "")])),
        ("<|channel|>commentary to=functions.get_we", ("", "", [("get_weather", "")])),
        ("<|channel|>ana", ("", "", [])),
    ],
)
def test_a_cut_answer_shows_what_there_is(text: str, expected: Parsed) -> None:
    assert every_cut(text, cut=True) == expected
    parser = HarmonyParser(("get_weather",))
    parser.feed(text)
    parser.finish(cut=True)
    assert parser.ends_inside_call == bool(expected[2])


def test_nothing_is_a_call_without_tools_and_a_continued_answer_is_content() -> None:
    assert every_cut(f'{CALL}{{"a": 1}}', calls=False) == ("", '{"a": 1}', [])
    assert every_cut(f" and five.<|end|>{ANALYSIS}b", continues=True) == ("b", " and five.", [])


MARKS = ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"]
pieces = st.sampled_from([*MARKS, "assistant", "final", "analysis", " to=functions.now", "{", "}", '"', "a ", "<", "|"])


@settings(max_examples=300, deadline=None)
@given(st.lists(pieces, max_size=14).map("".join), st.booleans())
def test_any_text_is_split_alike_however_it_is_cut(text: str, cut: bool) -> None:
    every_cut(text, cut)


def test_calls_are_shown_as_they_are_written() -> None:
    parser = HarmonyParser(("now",))
    assert parser.feed(CALL.replace("get_weather", "now")) == [CallPiece(0, "now", "")]
    assert parser.feed('{"zone": "U') == [CallPiece(0, None, '{"zone": "U')]
    assert parser.feed('TC"}') == [CallPiece(0, None, 'TC"}')]


# Grammars. Their markers are text here, for the byte tokenizer has no tokens for them.

WEATHER = {
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ANSWER = to_grammar(StructuredOutputsParams(choice=["Paris", "Rome"]))


def no_token(text: str) -> int | None:
    return None


def accepts(grammar: str, text: str) -> bool:
    matcher = LLMatcher(LLTokenizer("byte"), grammar)
    assert not matcher.is_error(), matcher.get_error()
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


def test_demanded_forms_and_calls_are_in_the_format_and_come_behind_thoughts() -> None:
    calls = call_grammar(TOOL_FORMATS["openai"], [WEATHER, {"name": "now"}], None, no_token)
    final, call = FINAL.partition("assistant")[2], CALL.partition("assistant")[2] + '{"city": "Paris"}<|call|>'
    thoughts = f"{ANALYSIS}Let me <think>.<|end|><|start|>assistant"
    both, only_call = harmony_grammar(ANSWER, calls, no_token), harmony_grammar(None, calls, no_token)
    only_answer = harmony_grammar(ANSWER, None, no_token)
    for lead in ("", thoughts):
        assert accepts(both, lead + final + "Rome") and accepts(both, lead + call)
        assert accepts(only_answer, lead + final + "Rome") and not accepts(only_answer, lead + call)
        assert accepts(only_call, lead + call) and not accepts(only_call, lead + final + "Rome")
        assert parse([lead + call])[2] == [("get_weather", '{"city": "Paris"}')]
    assert not accepts(both, final + "London") and not accepts(both, call.replace("city", "town"))
    assert not accepts(both, "Rome")


# Prompts.


def message(role: str, content: str | None = None, **more: object) -> dict:
    return {"role": role, "content": content, **more}


def tool_call(number: int, name: str) -> dict:
    return {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": json.dumps({"n": number})}}


def test_thoughts_of_calls_come_back_and_every_call_is_a_message() -> None:
    chat = [
        message("user", "Weather?"),
        message("assistant", "I look.", reasoning_content="Two.", tool_calls=[tool_call(1, "a"), tool_call(2, "b")]),
        message("tool", "rain", tool_call_id="c2"),
        message("tool", "sun", tool_call_id="c1"),
    ]
    text = render(TEMPLATE, harmony_messages(check_messages(chat)))
    assert text == (
        "<|start|>user<|message|>Weather?<|end|>"
        f"<|start|>assistant{ANALYSIS}Two.\nI look.<|end|>"
        '<|start|>assistant to=functions.a<|channel|>commentary json<|message|>{"n": 1}<|call|>'
        '<|start|>functions to=assistant<|channel|>commentary<|message|>"sun"<|end|>'
        '<|start|>assistant to=functions.b<|channel|>commentary json<|message|>{"n": 2}<|call|>'
        '<|start|>functions to=assistant<|channel|>commentary<|message|>"rain"<|end|>'
        "<|start|>assistant"
    )


def test_thoughts_of_an_answer_stay_apart_from_it() -> None:
    chat = [message("user", "2+2?"), message("assistant", "4", reasoning="Easy."), message("user", "Sure?")]
    found = harmony_messages(check_messages(chat))
    assert found[1] == {"role": "assistant", "content": "4", "thinking": "Easy."}
    assert found[0] == chat[0] and found[2] == chat[2]


def test_the_template_decides_unless_a_flag_names_another_format() -> None:
    assert speaks_harmony(ChatOptions(), TEMPLATE) and not speaks_harmony(ChatOptions(), "{{ messages }}")
    assert speaks_harmony(ChatOptions(reasoning_parser="openai_gptoss"), "{{ messages }}")
    assert speaks_harmony(ChatOptions(tool_call_parser="openai"), "{{ messages }}")
    assert not speaks_harmony(ChatOptions(tool_call_parser="hermes"), TEMPLATE)
    assert not speaks_harmony(ChatOptions(reasoning_parser="qwen3"), TEMPLATE)
