"""Long pastes on their way from a terminal."""

from __future__ import annotations

import re
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from octavo.cli.pastes import END, LONG, START, PasteFilter, Pastes

TEXT = st.text("ab\x1b[20~1\n", max_size=20).filter(lambda text: START not in text and END not in text)


@given(
    parts=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 200), max_size=12),
    last=TEXT,
)
def test_a_paste_is_changed_whole_and_nothing_else_however_it_is_cut(parts, cuts, last):
    whole = "".join(f"{typed}{START}{pasted}{END}" for typed, pasted in parts) + last
    expected = re.sub(
        f"{re.escape(START)}(.*?){re.escape(END)}",
        lambda paste: f"{START}<{len(paste[1])}>{END}",
        whole,
        flags=re.DOTALL,
    )
    ends = sorted({min(cut, len(whole)) for cut in cuts} | {0, len(whole)})
    changes = PasteFilter(lambda text: f"<{len(text)}>")
    left = [changes.feed(whole[start:end]) for start, end in pairwise(ends)]
    assert "".join(left) == expected


@given(before=TEXT, typed=TEXT)
def test_what_is_typed_leaves_at_once(before, typed):
    """A key that begins as a paste does is not held back."""
    changes = PasteFilter(str.upper)
    changes.feed(before)
    assert changes.feed(typed) == typed or changes.pasting


@given(texts=st.lists(st.sampled_from(["short", "x" * LONG, "a\r\nb\r" * LONG]), max_size=4))
def test_a_message_has_the_texts_of_its_marks(texts):
    pastes = Pastes()
    line = " and ".join(pastes.shown(text) for text in texts)
    assert len(line) < 400 and "\r" not in line
    assert pastes.whole(line) == " and ".join(text.replace("\r\n", "\n").replace("\r", "\n") for text in texts)
    assert pastes.whole("[pasted text 9: 1 characters]") == "[pasted text 9: 1 characters]"
