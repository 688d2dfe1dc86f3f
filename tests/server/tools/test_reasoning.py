"""Thoughts are told from the answer the same however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.chat.reasoning import ReasoningParser
from octavo.chat.thought_tags import THINK, THOUGHT_TAGS, ThoughtTags
from octavo.chat.thoughts import thoughts_of
from octavo.chat.tools.formats.table import ROWS, TOOL_FORMATS
from octavo.chat.tools.formats.writer import write_calls
from octavo.chat.tools.parsers import CallPiece, Reasoning, reader_of


def split(chunks: list[str], inside: bool, tags: ThoughtTags = THINK) -> tuple[str, str]:
    parser = ReasoningParser(inside, tags=tags)
    parts = [parser.feed(chunk) for chunk in chunks] + [parser.finish()]
    return "".join(thoughts for thoughts, _ in parts), "".join(answer for _, answer in parts)


def every_cut(text: str, inside: bool, tags: ThoughtTags = THINK) -> tuple[str, str]:
    whole = split([text], inside, tags)
    assert split(list(text), inside, tags) == whole
    for i in range(len(text) + 1):
        assert split([text[:i], text[i:]], inside, tags) == whole, f"cut at {i}"
    return whole


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("<think>\nSo 2 < 3.\n</think>\n\nYes.\n", False, ("So 2 < 3.", "Yes.\n")),
        ("\n <think>a</think>b", False, ("a", "b")),
        ("So.\n</think>\n\nYes.", True, ("So.", "Yes.")),
        ("<think>So.</think>Yes.", True, ("So.", "Yes.")),
        ("<think>\n\n</think>\n\nYes.", False, ("", "Yes.")),
        ("</think>Yes.", True, ("", "Yes.")),
        ("Yes. <think>no</think>", False, ("", "Yes. <think>no</think>")),
        ("  Yes.", False, ("", "  Yes.")),
        ("<think>never ends ", False, ("never ends", "")),
        ("never ends </thin", True, ("never ends </thin", "")),
        ("<thin", False, ("", "<thin")),
        ("a </think> b </think> c", True, ("a", "b </think> c")),
        ("", True, ("", "")),
        ("", False, ("", "")),
    ],
)
def test_thoughts_and_answer(text, inside, expected):
    assert every_cut(text, inside) == expected


@pytest.mark.parametrize("tags", THOUGHT_TAGS, ids=lambda tags: tags.names[0])
def test_every_family_s_tags_are_told_from_the_answer(tags):
    for opening, closing in (tags.around, *tags.also):
        said = f"So {opening[:2]}."
        assert every_cut(f"{opening}\n{said}\n{closing}\n\nYes.", False, tags) == (said, "Yes.")
        assert every_cut(f"So.{closing}Yes. {closing}", True, tags) == ("So.", f"Yes. {closing}")
        assert every_cut(f"{opening}never ends {closing[:3]}", False, tags) == (f"never ends {closing[:3]}", "")
        assert every_cut(f"Yes. {opening}", False, tags) == ("", f"Yes. {opening}")


def test_a_thought_s_first_word_is_no_part_of_its_tag():
    tags = next(tags for tags in THOUGHT_TAGS if "gemma4" in tags.names)
    for gap in ("\n", " \n\n"):
        assert every_cut(f"<|channel>{gap}thoughts<channel|>Yes", False, tags) == ("thoughts", "Yes")


pieces = st.sampled_from(["<think>", "</think>", "<", "</", "think", ">", " ", "\n", "a", "日本 "])


@settings(max_examples=200, deadline=None)
@given(st.lists(pieces, max_size=10).map("".join), st.booleans())
def test_any_text_is_split_alike_however_it_is_cut(text, inside):
    every_cut(text, inside)


def test_thoughts_come_as_they_are_written():
    parser = ReasoningParser(inside=False)
    assert parser.feed("<think>I wonder") == ("I wonder", "")
    assert parser.feed(" about </th") == (" about", "")
    assert parser.feed("ree") == (" </three", "")
    assert parser.feed("</think> Ye") == ("", "Ye")


@pytest.mark.parametrize(
    ("name", "prompt", "inside"),
    [
        ("qwen3", "<|im_start|>assistant\n", False),
        ("qwen3", "<|im_start|>assistant\n<think>\n", True),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("deepseek_r1", "<｜Assistant｜>", True),
        ("deepseek_r1", "<｜Assistant｜><think>\n", True),
        ("deepseek_r1", "<｜Assistant｜></think>", False),
    ],
)
def test_the_prompt_may_open_or_close_the_thoughts(name, prompt, inside):
    assert thoughts_of("", name).inside(prompt) is inside


# Calls that begin inside reasoning.

CALLS = {
    "hermes": '<tool_call>\n{"name": "now", "arguments": {"zone": "a</think>b"}}\n</tool_call>',
    "qwen3_xml": "<tool_call>\n<function=now>\n<parameter=zone>\na</think>b\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>now<arg_key>zone</arg_key><arg_value>a</think>b</arg_value></tool_call>",
    "mistral": '[TOOL_CALLS]now[ARGS]{"zone": "a</think>b"}',
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{"zone": "a</think>b"}'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="now">\n<parameter name="zone">a</think>b</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "cohere_command3": '<|START_ACTION|>[{"tool_name": "now", "parameters": {"zone": "a</think>b"}}]<|END_ACTION|>',
    "hunyuan_a13b": '<tool_calls>[{"name": "now", "arguments": {"zone": "a</think>b"}}]</tool_calls>',
    "llama3_json": '<|python_tag|>{"name": "now", "parameters": {"zone": "a</think>b"}}',
    "lfm2": "<|tool_call_start|>[now(zone='a</think>b')]<|tool_call_end|>",
}


def with_calls(kind: str, text: str, cut: bool = False) -> tuple[str, str]:
    """Thoughts and answer, the same for every way to cut the text in two."""

    def split(chunks: list[str]) -> tuple[str, str]:
        parser = ReasoningParser(True, lambda: reader_of(TOOL_FORMATS[kind], ["now"]))
        parts = [parser.feed(chunk) for chunk in chunks] + [parser.finish(cut)]
        return "".join(thoughts for thoughts, _ in parts), "".join(answer for _, answer in parts)

    whole = split([text])
    assert split(list(text)) == whole
    for i in range(len(text) + 1):
        assert split([text[:i], text[i:]]) == whole, f"cut at {i}"
    return whole


@pytest.mark.parametrize("kind", CALLS)
def test_a_call_that_begins_inside_open_thoughts_ends_them(kind):
    call = CALLS[kind]
    assert with_calls(kind, f"I need it.\n{call}") == ("I need it.", call)
    assert with_calls(kind, f"I need it. {call}\n{call}") == ("I need it.", f"{call}\n{call}")
    assert with_calls(kind, f"<think>{call}") == ("", call)
    assert with_calls(kind, f"I need it.{call}\n</think>\n") == ("I need it.", f"{call}\n")


@pytest.mark.parametrize("kind", CALLS)
def test_a_call_that_closed_thoughts_only_draft_stays_thought(kind):
    call = CALLS[kind]
    assert with_calls(kind, f"Perhaps {call}?</think>\n\nNo.") == (f"Perhaps {call}?", "No.")
    assert with_calls(kind, f"So: {call}\n</think>\n{call}") == (f"So: {call}", call)


@pytest.mark.parametrize("kind", CALLS)
def test_a_marker_that_thoughts_only_mention_begins_no_call(kind):
    marker = TOOL_FORMATS[kind].markers[0]
    for text in (f"I could write {marker} now", f"{marker}", f"{marker}{marker} </thin"):
        assert with_calls(kind, text) == (text, "")
        assert with_calls(kind, f"{text}</think>Yes.") == (text, "Yes.")
    call = CALLS[kind]
    assert with_calls(kind, f"As {marker}! says: {call}") == (f"As {marker}! says:", call)


@pytest.mark.parametrize("kind", CALLS)
def test_a_call_that_is_cut_off_inside_thoughts_keeps_what_is_known(kind):
    call = CALLS[kind]
    for end in range(call.index("zone") + 1, len(call)):
        assert with_calls(kind, f"I need it.\n{call[:end]}", cut=True) == ("I need it.", call[:end])


def test_commands_thoughts_end_at_a_call():
    parser = reader_of(TOOL_FORMATS["cohere_command3"], ["now"])
    pieces = [*parser.feed("<|START_THINKING|>I need it." + CALLS["cohere_command3"]), *parser.finish()]
    assert pieces == [Reasoning("I need it."), CallPiece(0, "now", '{"zone": "a</think>b"}')]


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.thoughts[0] and not row.addressed], ids=lambda row: row.name
)
def test_drafts_stay_thoughts_in_families_with_marks_of_their_own(row):
    tags = next(tags for tags in THOUGHT_TAGS if row.name in tags.names)
    call = write_calls(row, [("now", {"zone": f"a{tags.closing}b"})])
    parser = ReasoningParser(True, lambda: reader_of(row, {"now": {"properties": {"zone": {"type": "string"}}}}), tags)
    parts = [parser.feed(piece) for piece in f"Perhaps {call}?{tags.closing}No."] + [parser.finish()]
    assert "".join(thoughts for thoughts, _ in parts) == f"Perhaps {call}?"
    assert "".join(answer for _, answer in parts) == "No."
