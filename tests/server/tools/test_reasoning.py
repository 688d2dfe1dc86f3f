"""Thoughts are told from the answer the same however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.entrypoints.generation.reasoning import ReasoningParser, begins_inside_reasoning


def split(chunks: list[str], inside: bool) -> tuple[str, str]:
    parser = ReasoningParser(inside)
    parts = [parser.feed(chunk) for chunk in chunks] + [parser.finish()]
    return "".join(thoughts for thoughts, _ in parts), "".join(answer for _, answer in parts)


def every_cut(text: str, inside: bool) -> tuple[str, str]:
    whole = split([text], inside)
    assert split(list(text), inside) == whole
    for i in range(len(text) + 1):
        assert split([text[:i], text[i:]], inside) == whole, f"cut at {i}"
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
    assert begins_inside_reasoning(name, prompt) is inside
