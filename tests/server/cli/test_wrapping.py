"""Lines of an answer on a terminal: broken between words, whatever the pieces in which it comes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wcwidth import wcswidth

from octavo.cli.wrapping import Wrap

WORDS = st.text("abcdefgh.,!-é漢字。「」（）ab🙂", min_size=1, max_size=30)
TEXTS = st.lists(st.one_of(WORDS, st.sampled_from([" ", "  ", "\n", "\n\n", "\n    "])), max_size=60).map("".join)


def wrapped(pieces: list[str], width: int) -> str:
    shown: list[str] = []
    wrap = Wrap(shown.append, lambda: width)
    for piece in pieces:
        wrap.feed(piece)
    wrap.end()
    return "".join(shown)


@given(TEXTS, st.integers(16, 60), st.data())
def test_the_pieces_do_not_matter_and_no_line_is_too_long(text, width, data):
    pieces, rest = [], text
    while rest:
        length = data.draw(st.integers(1, 12))
        pieces.append(rest[:length])
        rest = rest[length:]
    shown = wrapped(pieces, width)
    assert shown == wrapped([text], width)
    assert "".join(shown.split()) == "".join(text.split()), "every letter comes, in its order"
    if all(wcswidth(word) <= width for word in text.split()):  # what has no place to break may be longer
        assert all(wcswidth(line.rstrip()) <= width for line in shown.split("\n"))


@given(st.lists(st.text("abc", min_size=1, max_size=12), min_size=1, max_size=40), st.integers(16, 60))
def test_words_stay_whole_and_lines_are_full(words, width):
    lines = wrapped([" ".join(words)], width).split("\n")
    assert " ".join(lines).split() == words
    for line, following in pairwise(lines):
        assert len(line) <= width < len(line) + 1 + len(following.split()[0])


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("漢" * 20, ["漢" * 10, "漢" * 10]),
        ("漢" * 10 + "。漢", ["漢" * 9, "漢。漢"]),
        ("漢" * 9 + "「漢」", ["漢" * 9, "「漢」"]),
        ("x" * 19 + "👩\u200d💻 x", ["x" * 19, "👩\u200d💻 x"]),
        ("  a list\n  - of things", ["  a list", "  - of things"]),
        (
            "```\n" + "code " * 6 + "\n```\n" + "word " * 6,
            ["```", "code " * 6, "```", "word word word word", "word word "],
        ),
        ("https://example.org/a/long/address and more", ["https://example.org/a/long/address and", "more"]),
    ],
)
def test_what_keeps_together(text, lines):
    assert wrapped([text], 20).split("\n") == lines
