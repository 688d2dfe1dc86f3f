"""Drafts are given up among many sequences where they cost, and used where they pay, in simulated time."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.spec_decode.worth import FEWEST, FIRST_PAUSE, DraftWorth


def serve(worth: DraftWorth, users: int, gain: float, cost: float, steps: int, seed: int = 0) -> tuple[float, float]:
    """Tokens a second over those without drafts, and the share of the steps that had drafts. In a step with drafts a
    sequence gets ``gain`` tokens more on average, and it takes ``cost`` times as long; contexts grow all the time."""
    rng, tokens, seconds, plain, with_drafts = random.Random(seed), 0.0, 0.0, 0.0, 0
    for step in range(steps):
        drafts = worth.begin_step(users)
        usual = 1 + step / steps
        took = usual * (cost if drafts else 1)
        accepted = sum(rng.random() < gain for _ in range(users)) if drafts else 0
        worth.observe(accepted)
        worth.end_step(took * rng.uniform(0.95, 1.05) * (10 if rng.random() < 0.01 else 1))
        tokens, seconds, plain = tokens + users + accepted, seconds + took, plain + usual
        with_drafts += drafts
    return tokens / seconds / (steps * users / plain), with_drafts / steps


@settings(max_examples=40, deadline=None)
@given(st.integers(FEWEST, 40), st.floats(0, 0.8), st.floats(0.98, 1.6), st.integers(0, 1000))
def test_drafts_cost_next_to_nothing_and_bring_most_of_what_they_can(
    users: int, gain: float, cost: float, seed: int
) -> None:
    speed, _ = serve(DraftWorth(), users, gain, cost, 3000, seed)
    assert speed >= 0.98
    assert speed >= 0.95 * (1 + gain) / cost


def test_drafts_that_lose_a_tenth_are_given_up_within_a_few_steps() -> None:
    speed, share = serve(DraftWorth(), 20, 0.05, 1.16, 2000)
    assert share < 0.06 and speed > 0.99


def test_drafts_come_back_when_texts_turn_predictable() -> None:
    worth = DraftWorth()
    serve(worth, 20, 0.0, 1.2, 1000)
    _, share = serve(worth, 20, 0.7, 1.2, 4000)
    assert share > 0.6


def test_few_sequences_are_left_to_prediction() -> None:
    worth = DraftWorth()
    assert serve(worth, FEWEST - 1, 0.0, 2.0, 200)[1] == 1.0


def test_crowds_of_other_sizes_are_judged_alone() -> None:
    worth = DraftWorth()
    serve(worth, 20, 0.0, 1.3, 400)
    assert worth.begin_step(5), "among few they were not tried yet"


def test_steps_with_prompts_do_not_count() -> None:
    worth = DraftWorth()
    for _ in range(10 * FIRST_PAUSE):
        assert worth.begin_step(20), "no step has ended, nothing was compared"
