"""Tokens of thoughts are counted the same however an answer is cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from octavo.chat.thought_tokens import ThoughtTokens

OPEN, CLOSE = 1, 2


def counted(pieces: list[list[int]], inside: bool, closings: set[int], goes_on: bool) -> int:
    """The count of thoughts. Each token is the letter a; tags have no text."""
    counter = ThoughtTokens(inside, {OPEN}, closings, list)
    for ids in pieces:
        counter.take(ids, "a" * sum(token not in (OPEN, CLOSE) for token in ids))
    return counter.total(goes_on)


@given(
    st.lists(st.sampled_from([3, 4, 5]), min_size=1),
    st.lists(st.sampled_from([3, OPEN, CLOSE])),
    st.booleans(),
    st.data(),
)
def test_thoughts_count_without_tags_and_without_the_answer(
    thoughts: list[int], answer: list[int], inside: bool, data: st.DataObject
) -> None:
    ids = [*([] if inside else [OPEN]), *thoughts, CLOSE, *answer]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(ids) - 1)))) if len(ids) > 1 else []
    pieces = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    assert counted(pieces, inside, {CLOSE}, goes_on=False) == len(thoughts)
    cut = [ids[: len(ids) - 1 - len(answer)]]
    assert counted(cut, inside, {CLOSE}, goes_on=True) == len(thoughts), "a limit has ended them"
    assert counted(cut, inside, {CLOSE}, goes_on=False) == len(thoughts), "a call has ended them: their text counts"


def test_without_a_token_for_the_tag_the_text_counts() -> None:
    assert counted([[3, 3], [4]], True, set(), goes_on=True) == 3
    empty = ThoughtTokens(True, {OPEN}, {CLOSE}, list)
    empty.take([3, CLOSE, 3], "")
    assert empty.total(False) == 0, "space alone is no thought"


def test_thoughts_that_come_again_count() -> None:
    counter = ThoughtTokens(False, {OPEN}, {CLOSE}, list, again=True)
    counter.take([OPEN, 3, 3, CLOSE, 4, OPEN, 3, 3, 3, CLOSE, 4], "aaaaa")
    assert counter.total(False) == 5
    counter.take([OPEN, 3, 4], "a")
    assert counter.total(False) == 6, "a call has ended them: their text counts"
