"""How many tokens are guessed: what makes tokens come fastest, in simulated time."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.spec_decode.lengths import NO_EVIDENCE, DraftLengths, StepTimes


def nothing(count: int) -> tuple[int, ...]:
    """The evidence of guesses of which nothing is known."""
    return (NO_EVIDENCE,) * count


def serve(
    lengths: DraftLengths, users: int, acceptance: float, most: int, fixed: float, each: float, steps: int = 300
) -> float:
    """Tokens per second of ``users`` whose guesses are right with a chance of ``acceptance``."""
    rng = random.Random(f"{users} {acceptance} {most}")
    tokens, seconds = 0, 0.0
    for _ in range(steps):
        lengths.begin_step(users)
        rows = users
        for i in range(users):
            k = lengths.choose(f"{i}", nothing(most))
            assert 0 <= k <= most
            if k:
                lengths.add(f"{i}", nothing(k))
                right = next((j for j in range(k) if rng.random() >= acceptance), k)
                lengths.observe(f"{i}", k, right)
                tokens, rows = tokens + right, rows + k
        took = (fixed + each * rows) * rng.uniform(0.97, 1.03) * (8 if rng.random() < 0.01 else 1)
        lengths.times.observe(rows, took)
        seconds += fixed + each * rows
        tokens += users
    return tokens / seconds


def fixed_length(users: int, acceptance: float, k: int, fixed: float, each: float) -> float:
    tokens = users * sum(acceptance**i for i in range(k + 1))
    return tokens / (fixed + each * users * (k + 1))


@pytest.mark.sampled(strength=2)
@pytest.mark.parametrize("each", [0.0, 0.03, 0.15, 0.4])
@pytest.mark.parametrize("users", [1, 4, 12])
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.7, 0.95])
def test_about_as_fast_as_the_best_length_and_never_slower_than_none(
    users: int, acceptance: float, each: float
) -> None:
    speeds = [fixed_length(users, acceptance, k, 1.0 - each, each) for k in range(8)]
    speed = serve(DraftLengths(), users, acceptance, 7, 1.0 - each, each)
    assert speed >= 0.98 * speeds[0]
    assert speed >= 0.88 * max(speeds)


def weighed(seed: int, users: int, chances: list[float], each: float, jump: float, most: int) -> tuple[float, float]:
    """Tokens per second over those without guesses, and the share of the guesses that was right, in 2,000 steps.

    Guesses on evidence 1 are right as often as ``chances[0]`` says, and so on. Sequences come and go. Steps of 8 tokens
    and more take ``jump`` longer."""
    lengths, rng = DraftLengths(), random.Random(seed)
    tokens = seconds = plain = 0.0
    drafts = right = started = 0
    sequences: list[str] = []
    for _ in range(2000):
        while len(sequences) < users:
            started += 1
            sequences.append(str(started))
        lengths.begin_step(users)
        rows = users
        for i in sequences:
            kinds = [rng.randrange(1, len(chances) + 1) for _ in range(rng.randrange(most + 1))]
            k = lengths.choose(i, kinds)
            assert 0 <= k <= len(kinds)
            lengths.add(i, kinds[:k])
            if k:
                good = next((j for j in range(k) if rng.random() >= chances[kinds[j] - 1]), k)
                lengths.observe(i, k, good)
                drafts, right, tokens, rows = drafts + k, right + good, tokens + good, rows + k
        took, without = ((1 - each + each * n) * (1 + jump * (n >= 8)) for n in (rows, users))
        lengths.times.observe(rows, took * rng.uniform(0.98, 1.02) * (8 if rng.random() < 0.01 else 1))
        tokens, seconds, plain = tokens + users, seconds + took, plain + without
        if rng.random() < 0.02:
            lengths.release(sequences.pop(rng.randrange(users)))
    return tokens / seconds / (2000 * users / plain), right / max(drafts, 1)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 1000),
    st.integers(1, 10),
    st.lists(st.floats(0, 1), min_size=1, max_size=6),
    st.floats(0, 0.5),
    st.floats(0, 0.4),
    st.integers(1, 7),
)
def test_drafts_cost_next_to_nothing_however_often_they_are_right(
    seed: int, users: int, chances: list[float], each: float, jump: float, most: int
) -> None:
    assert weighed(seed, users, chances, each, jump, most)[0] >= 0.975


def test_guesses_on_good_evidence_are_made_and_those_on_bad_evidence_are_not() -> None:
    speed, right = weighed(1, 1, [0.02, 0.03, 0.9], 0.15, 0.0, 4)
    assert speed > 1.15 and right > 0.8
    assert weighed(1, 1, [0.3] * 3, 0.15, 0.0, 4)[0] < speed, "which a third of all guesses, at random, would not be"


def test_under_load_drafters_are_seldom_asked_in_vain() -> None:
    """Of 15 users each guess has to be right three times in four."""
    asked = []
    for users, fixed, acceptance in ((15, 0.5, 0.3), (15, 0.5, 1.0), (1, 0.85, 0.3)):
        lengths, rng, count = DraftLengths(), random.Random(1), 0
        for _ in range(600):
            lengths.begin_step(users)
            rows = users
            for i in map(str, range(users)):
                if lengths.take_turn(i):
                    count += 1
                    k = lengths.choose(i, (1,))
                    lengths.add(i, (1,) * k)
                    rows += k
                    if k:
                        lengths.observe(i, 1, int(rng.random() < acceptance))
            lengths.times.observe(rows, fixed + (1 - fixed) / 15 * rows)
        asked.append(count / users / 600)
    assert asked[0] < 0.25 and asked[1] > 0.9 and asked[2] > 0.9


def test_guesses_stop_under_load_and_come_back_after_it() -> None:
    lengths = DraftLengths()
    serve(lengths, 1, 0.8, 4, 4.0, 0.8)
    for _ in range(200):
        lengths.begin_step(32)
        if sum(lengths.choose(f"{i}", nothing(4)) for i in range(32)) == 0:
            break
        lengths.times.observe(40, 4.0 + 0.8 * 40)
    lengths.begin_step(32)
    assert sum(lengths.choose(f"{i}", nothing(4)) for i in range(32)) == 0
    lengths.begin_step(1)
    assert lengths.choose("0", nothing(4)) > 0


def test_a_text_that_turns_predictable_is_found_out() -> None:
    lengths = DraftLengths()
    serve(lengths, 1, 0.0, 4, 1.0, 0.3)
    assert serve(lengths, 1, 1.0, 4, 1.0, 0.3, steps=400) > 0.85 * fixed_length(1, 1.0, 4, 1.0, 0.3)


@pytest.mark.parametrize("acceptance", [0.0, 0.2])
def test_tries_for_which_a_model_reads_much_take_a_small_share_of_the_time(acceptance: float) -> None:
    lengths, rng, taken = DraftLengths(), random.Random(1), 0.0
    lengths.observe("0", 4, 0)
    for step in range(20_000):  # a new sequence every 100 steps
        sequence = str(step // 100)
        lengths.begin_step(1)
        length = lengths.choose(sequence, nothing(4))
        lengths.add(sequence, nothing(length))
        if length:
            seconds = length * 0.8 + (20.0 if step > 100 else 0.0)  # and reads a prompt
            lengths.observe_drafting(length, seconds)
            taken += seconds * (step > 1000)
            right = next((i for i in range(length) if rng.random() >= acceptance), length)
            lengths.observe(sequence, length, right)
        lengths.times.observe(1 + length, 1.0 + 0.1 * length)
    assert 20.0 < taken < 0.02 * 19_000, "it is tried, now and then"


def test_right_guesses_are_made_as_long_as_can_be_from_the_start() -> None:
    lengths = DraftLengths()
    for _ in range(30):
        lengths.begin_step(1)
        assert lengths.choose("0", nothing(7)) == 7
        lengths.add("0", nothing(7))
        lengths.observe("0", 7, 7)
        lengths.times.observe(8, 1.0)


@given(
    st.lists(st.tuples(st.integers(1, 300), st.floats(1e-6, 100)), max_size=60),
    st.integers(1, 300),
)
def test_a_longer_step_never_seems_shorter(observed: list[tuple[int, float]], rows: int) -> None:
    times = StepTimes()
    for size, seconds in observed:
        times.observe(size, seconds)
    fixed, each = times.line()
    assert each >= 0 and fixed >= -1e-6 * (fixed + each * rows) and fixed + each * rows > 0
