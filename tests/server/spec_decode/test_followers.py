"""Pairs of tokens, and how probable a guess seems: against counting by hand."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from octavo.spec_decode.followers import Followers, evidence_of, most_probable
from octavo.spec_decode.places import MAX_TOKENS_PER_CALL

texts = st.lists(st.integers(-1, 4), max_size=60)  # -1: no token


def followers_of(*some: list[int]) -> list[Followers]:
    found = [Followers() for _ in some]
    for one, text in zip(found, some, strict=True):
        one.read(text)
    return found


@given(texts, st.lists(st.integers(1, 20), max_size=9))
def test_pairs_are_counted_once_however_a_text_grows(text: list[int], parts: list[int]) -> None:
    followers, grown = Followers(), list[int]()
    for part in [*parts, len(text)]:
        grown += text[len(grown) : len(grown) + part]
        followers.read(grown)
    pairs = Counter(pair for pair in pairwise(text) if min(pair) >= 0)
    for token in range(-1, 5):
        of_token, after = {b: count for (a, b), count in pairs.items() if a == token}, followers.after(token)
        assert after is None if not of_token else after is not None and after[:2] == (of_token, sum(of_token.values()))
        assert after is None or of_token[after[2]] == max(of_token.values())
    assert sum(len(of_token) for of_token in followers._counts.values()) <= len(text)


def test_a_long_text_is_read_in_parts() -> None:
    followers, text = Followers(), list(range(2 * MAX_TOKENS_PER_CALL))
    followers.read(text)
    assert followers.after(7) == ({8: 1}, 1, 8) and followers.after(len(text) - 2) is None
    followers.read(text)
    assert followers.after(len(text) - 2) == ({len(text) - 1: 1}, 1, len(text) - 1)


@given(st.lists(texts, max_size=3), st.lists(st.tuples(st.integers(0, 4), st.integers(2, 12)), max_size=8))
def test_the_likeliest_guess_is_at_most_certain(some: list[list[int]], nexts: list[tuple[int, int]]) -> None:
    followers = followers_of(*some)
    guess = most_probable(1, nexts, followers)
    known = {b for one in followers for b in (one.after(1) or [{}])[0]}
    if guess is None:
        assert not nexts and not known
        return
    assert guess.token in known | {following for following, _ in nexts}
    assert 0 < guess.prob < 1 and 0 <= guess.share <= 1


def test_longer_matches_and_those_that_agree_are_believed_more() -> None:
    (pairs,) = followers_of([1, 2, 1, 2, 1, 3])
    alone = most_probable(1, [], [pairs])
    assert alone is not None and (alone.token, alone.prob, alone.share) == (2, 2 / 5, 2 / 3)
    growing = [most_probable(1, [(2, length)], [pairs]) for length in (2, 3, 4)] + [
        most_probable(1, [(2, length) for length in (2, 3, 4)], [pairs])
    ]
    probs = [guess.prob for guess in growing if guess is not None]
    assert probs[0] == 0.5 + 0.5 * 2 / 5 and [guess and guess.share for guess in growing] == [1, 1, 1, 1]
    other = most_probable(1, [(2, 4), (3, 4), (3, 5)], [pairs])
    assert other is not None and other.token == 3, "the longest match decides"
    assert evidence_of(0.01) == 1 < evidence_of(0.5) < evidence_of(0.9) < evidence_of(0.999) == 10
