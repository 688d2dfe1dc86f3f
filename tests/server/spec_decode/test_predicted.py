"""Predicted outputs: where an answer is followed in a text, and what is expected next."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from octavo.spec_decode.ngram import NgramDrafter
from octavo.spec_decode.predicted import Prediction, PredictionDrafter

texts = st.lists(st.integers(0, 5), max_size=60)


@given(texts)
def test_an_answer_that_is_the_text_is_expected_from_its_first_token_on(text: list[int]) -> None:
    prediction = Prediction(text)
    for i, token in enumerate(text):
        prediction.follow([token])
        assert prediction.expected(9) == text[i + 1 : i + 10]
    assert (prediction.num_right, prediction.num_wrong) == (len(text), 0)


@given(texts, texts, st.lists(st.integers(1, 9), max_size=20))
def test_pieces_change_nothing_and_counts_add_up(text: list[int], answer: list[int], sizes: list[int]) -> None:
    whole, cut, rest = Prediction(text), Prediction(text), list(answer)
    whole.follow(answer)
    for size in [*sizes, len(answer)]:
        cut.follow(rest[:size])
        rest = rest[size:]
    assert cut.expected(99) == whole.expected(99)
    assert (cut.num_right, cut.num_wrong) == (whole.num_right, whole.num_wrong)
    assert 0 <= whole.num_right <= min(len(text), len(answer)) and whole.num_right + whole.num_wrong == len(text)


@given(st.integers(0, 10**6), st.integers(0, 12), st.integers(0, 12))
def test_an_edit_loses_its_own_tokens_and_the_two_behind_it(seed: int, removed: int, added: int) -> None:
    rng = random.Random(seed)
    text = rng.sample(range(1000), 200)  # no token twice
    at = rng.randrange(150)
    answer = text[:at] + [1000 + i for i in range(added)] + text[at + removed :]
    prediction = Prediction(text)
    prediction.follow(answer)
    assert prediction.num_right >= len(answer) - added - 2
    assert prediction.expected(1) == [] and prediction.num_right <= len(answer) - added


def test_of_equal_places_the_nearest_behind_the_last_one_counts() -> None:
    lines = [[7, 8, line, 9] for line in range(100, 130)]  # more than are compared, each begins alike
    text = [token for line in lines for token in line]
    prediction = Prediction(text)
    prediction.follow([*lines[0], *lines[1], *lines[2][:2], 99, 9])  # one token differs
    assert prediction.expected(4) == [], "9 alone does not tell the line"
    prediction.follow([7])
    assert prediction.expected(3) == [8, 103, 9] or prediction.expected(3)[0] == 8
    prediction.follow([8, 103])
    assert prediction.expected(2) == [9, 7]


def test_another_drafter_helps_out_and_forgets_too() -> None:
    drafter = PredictionDrafter(NgramDrafter(2, 4))
    drafter.start("a", b"", 6)
    drafter.expect("a", [50, 51, 52], 6)
    drafter.start("b", b"", 6)
    prompt = [1, 2, 3, 4, 5, 6]
    assert drafter.propose("a", [*prompt, 50], 4) == [51, 52]
    assert min(drafter.evidence) > 99
    assert drafter.propose("a", [*prompt, 50, 2, 3], 2) == [4, 5], "what the prompt goes on with"
    assert max(drafter.evidence) < 99
    assert drafter.propose("b", [*prompt, 50], 4) == []
    drafter.forget("a")
    drafter.forget("b")
    assert not drafter._followed and not drafter._other._places
