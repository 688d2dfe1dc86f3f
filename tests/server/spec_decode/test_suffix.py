"""Suffix decoding: what it guesses, from whose texts, and how much it keeps."""

from __future__ import annotations

import gc
import random
import tracemalloc
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from octavo.spec_decode.suffix import MAX_STORED_TOKENS, RecentAnswers, SuffixDrafter


def drafter(max_depth: int = 24, answers: int = 100, factor: float = 1.0, prob: float = 0.1) -> SuffixDrafter:
    return SuffixDrafter(max_depth, answers, factor, prob)


def guess(suffix: SuffixDrafter, tokens: list[int], most: int = 8, scope: bytes = b"", prompt: int = 1) -> list[int]:
    suffix.start("0#r", scope, prompt)
    drafts = suffix.propose("0#r", tokens, most)
    suffix._sequences.pop("0#r")
    return drafts


def answer(suffix: SuffixDrafter, tokens: list[int], scope: bytes = b"", prompt: int = 0) -> None:
    suffix.start("0#a", scope, prompt)
    suffix.propose("0#a", tokens, 1)
    suffix.forget("0#a")


def test_a_longer_match_is_followed_further() -> None:
    text = [*range(10, 30)]
    assert guess(drafter(), [*text, 10, 11]) == [12, 13]
    assert guess(drafter(), [*text, 10, 11, 12, 13]) == [14, 15, 16, 17]
    assert guess(drafter(factor=2.0), [*text, 10, 11, 12]) == [13, 14, 15, 16, 17, 18]
    assert guess(drafter(max_depth=3), [*text, 10, 11, 12, 13]) == [14, 15, 16]
    assert guess(drafter(), [1, 2, 1, 3, 1], most=2) == [3], "one token alone is good for one"
    assert guess(drafter(), [1, 2, 3, 4]) == []
    assert guess(drafter(), [7, 7, 7, 7], most=2) == [7, 7], "round and round"


def test_the_commonest_follower_is_guessed_while_the_places_agree() -> None:
    often = [5, 6, 7, 1, 5, 6, 7, 2, 5, 6, 8, 3, 5, 6]
    assert guess(drafter(prob=0.3), often) == [7, 2], "two of three, then one of two: the latest of equals"
    assert guess(drafter(prob=0.5), often) == [7]
    assert guess(drafter(prob=0.7), often) == []


def test_answers_are_found_in_their_own_scope_alone() -> None:
    suffix = drafter()
    answer(suffix, [1, 2, 3, 4, 5], scope=b"a")
    assert guess(suffix, [9, 1, 2, 3], scope=b"a") == [4, 5]
    for scope in (b"", b"b"):
        assert guess(suffix, [9, 1, 2, 3], scope=scope) == []


def test_prompts_are_not_kept() -> None:
    suffix = drafter()
    answer(suffix, [1, 2, 3, 4, 5, 6, 7], prompt=4)
    assert guess(suffix, [1, 2]) == [] and guess(suffix, [5, 6]) == [7]


def test_only_the_sequence_itself_counts_without_recent_answers() -> None:
    suffix = drafter(answers=0)
    answer(suffix, [1, 2, 3, 4, 5])
    assert guess(suffix, [9, 1, 2, 3]) == [] and suffix.recent is None


def test_no_guess_runs_from_one_answer_into_the_next() -> None:
    suffix = drafter()
    answer(suffix, [1, 2, 3])
    answer(suffix, [7, 8, 9])
    assert guess(suffix, [0, 1, 2], most=4) == [3]
    assert guess(suffix, [0, 3]) == []


answers = st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.integers(0, 70)), max_size=40)


@given(answers, st.integers(4, 120), st.integers(1, 9))
def test_memory_of_recent_answers_is_bounded(added: list[tuple[bytes, int]], max_tokens: int, max_answers: int) -> None:
    recent = RecentAnswers(max_tokens, max_answers)
    for scope, length in added:
        recent.add(scope, list(range(length)))
        kept = {scope: recent.texts(scope) for scope in (b"a", b"b", b"c")}
        assert recent.num_tokens == sum(len(text.token_ids) for texts in kept.values() for text in texts) <= max_tokens
        assert all(sum(text.num_answers for text in texts) <= max_answers + 1 for texts in kept.values())
        for text in (text for texts in kept.values() for text in texts):
            assert sum(len(of_token) for of_token in text.followers._counts.values()) <= len(text.token_ids)
        newest = kept[scope][0].token_ids
        assert newest[-1] == -1 and newest[-2:-1] == ([length - 1] if length else newest[-2:-1])


def test_ended_sequences_leave_nothing_but_the_bounded_store() -> None:
    suffix, rng = drafter(), random.Random(0)
    for i in range(300):
        tokens: list[Any] = [rng.randrange(50) for _ in range(500)]
        answer(suffix, tokens, scope=b"%d" % (i % 7))
    assert not suffix._sequences and suffix.recent is not None and suffix.recent.num_tokens <= MAX_STORED_TOKENS


def test_the_store_takes_little_memory_and_gives_it_back() -> None:
    """Tokens at random are the worst that can be: no two pairs are alike. Docs say 10 to 30 MB."""
    rng = random.Random(1)
    gc.collect()
    tracemalloc.start()
    recent = RecentAnswers(MAX_STORED_TOKENS, 10_000)
    for _ in range(180):
        recent.add(b"", [rng.randrange(50_000) for _ in range(400)])
    assert recent.num_tokens > MAX_STORED_TOKENS / 2 and tracemalloc.get_traced_memory()[0] < 32e6
    del recent
    gc.collect()
    left = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert left < 1e5


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30), st.booleans()), min_size=1, max_size=25), st.data())
def test_no_token_of_another_scope_is_ever_guessed(asked: list[tuple[int, int, bool]], data: st.DataObject) -> None:
    """Whatever runs beside whatever. Tokens 0 and 1 are in all texts, token 10 + s in those of scope s."""
    suffix, running = drafter(answers=3), dict[str, tuple[int, list[int]]]()
    for number, (scope, length, ends) in enumerate(asked):
        req_id = f"{number}#r"
        text = [*data.draw(st.lists(st.sampled_from([0, 1, 10 + scope]), max_size=length)), 0, 1]
        suffix.start(req_id, bytes([scope]), 1)
        running[req_id] = scope, text
        for other, (its, tokens) in running.items():
            drafts = suffix.propose(other, tokens, 6)
            assert all(token in (0, 1, 10 + its) for token in drafts) and len(suffix.evidence) == len(drafts) <= 6
            tokens += drafts[:2]
        if ends:
            suffix.forget(req_id)
            del running[req_id]
    assert len(suffix._sequences) == len(running)
