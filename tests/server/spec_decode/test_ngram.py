"""Prompt lookup: what it guesses, on what that rests, and how much it keeps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from octavo.spec_decode.ngram import NgramDrafter
from octavo.spec_decode.places import MAX_PLACES, MAX_TOKENS_PER_CALL, Places, evidence

texts = st.lists(st.integers(0, 3), min_size=1, max_size=80)


def lookup(text: list[int], shortest: int, longest: int, most: int) -> list[int]:
    """The same by search: of the last places where the shortest end stood before, the one with the longest end."""
    ends = [p for p in range(shortest, len(text)) if text[p - shortest : p] == text[len(text) - shortest :]]
    lengths = {
        p: max(n for n in range(shortest, min(longest, p) + 1) if text[p - n : p] == text[len(text) - n :])
        for p in ends[-MAX_PLACES:]
    }
    if not lengths:
        return []
    best = max(lengths, key=lambda p: (lengths[p], p))
    found = list(text)
    for i in range(most):
        found.append(found[best + i])  # also what has just been guessed
    return found[len(text) :]


@given(texts, st.integers(1, 4), st.integers(0, 4), st.integers(1, 9), st.lists(st.integers(1, 20), max_size=9))
def test_the_longest_end_that_stood_before_goes_on_as_it_did(
    text: list[int], shortest: int, more: int, most: int, parts: list[int]
) -> None:
    drafter = NgramDrafter(shortest, shortest + more)
    drafter.start("r", b"", 1)
    grown: list[int] = []
    for part in [*parts, len(text)]:
        grown += text[len(grown) : len(grown) + part]
        assert drafter.propose("r", grown, most) == lookup(grown, shortest, shortest + more, most)
        assert len(drafter.evidence) in (0, most) and all(kind > 0 for kind in drafter.evidence)
    places = drafter._places["r"]
    assert len(places._last) + len(places._before) <= len(text), "an entry for a token that was read, no more"
    drafter.forget("r")
    assert not drafter._places


def test_evidence_tells_lengths_and_whether_places_agree() -> None:
    def rests_on(text: list[int], most: int = 2) -> list[int]:
        drafter = NgramDrafter(1, 8)
        drafter.start("r", b"", 1)
        drafter.propose("r", text, most)
        return drafter.evidence

    assert rests_on([1, 2, 3, 9, 1, 2]) == [evidence(2, 0, 0), evidence(3, 0, 0)]
    assert rests_on([1, 2, 3, 8, 1, 2, 3, 9, 1, 2]) == [evidence(2, 1, 1), evidence(3, 1, 0)]
    assert rests_on([1, 2, 4, 8, 1, 2, 3, 9, 1, 2]) == [evidence(2, 1, 0), evidence(3, 0, 0)]
    assert len({evidence(n, *others) for n in range(1, 99) for others in ((0, 0), (2, 2), (2, 1))}) == 24


def test_a_long_prompt_is_read_in_parts() -> None:
    places, text = Places(2), list(range(3 * MAX_TOKENS_PER_CALL))
    for part in range(1, 4):
        places.read(text)
        assert len(places._last) <= part * MAX_TOKENS_PER_CALL
    assert list(places.find((7, 8))) == [9]
