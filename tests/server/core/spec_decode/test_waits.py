"""Whether sequences wait to be guessed for where steps could overlap: as tokens come fastest, in simulated time."""

from __future__ import annotations

import random

import pytest

from octavo.core.spec_decode.waits import FIRST_STEPS, TRY, DraftWaits


def serve(waits: DraftWaits, users: int, gain: float, host: float, device: float, steps: int) -> tuple[float, int]:
    """Tokens per second of ``users`` to whose tokens guesses add ``gain`` on average, and how many steps waited."""
    rng = random.Random(f"{users} {gain} {host}")
    tokens = seconds = 0.0
    waited = 0
    for _ in range(steps):
        alone = waits.decide(users)
        rows = users * (4 if alone else 1)
        took = device * (1 + 0.01 * rows)
        took = (host + took if alone else max(host, took)) * rng.uniform(0.97, 1.03)
        if alone:
            waited += 1
            for _ in range(users):
                waits.count_turn()
                right = sum(rng.random() < gain / 3 for _ in range(3))
                if rng.random() < 0.8:
                    waits.observe(right)
                    tokens += right
        waits.observe_step(rows, took, alone)
        seconds += took
        tokens += users
    return tokens / seconds, waited


@pytest.mark.sampled(strength=2)
@pytest.mark.parametrize("users", [1, 8])
@pytest.mark.parametrize("gain", [0.0, 0.2, 1.0, 2.5])
@pytest.mark.parametrize("host", [0.1, 0.5, 1.0])
def test_it_is_never_far_from_the_better_way(users: int, gain: float, host: float) -> None:
    got, _ = serve(DraftWaits(), users, gain, host, 1.0, 3000)
    never = users / max(host, 1.0 + 0.01 * users)
    always = users * (1 + 0.8 * gain) / (host + 1.0 + 0.04 * users)
    assert got >= 0.93 * max(never, always)


def test_tries_become_rare_and_see_that_a_text_has_changed() -> None:
    waits = DraftWaits()
    _, waited = serve(waits, 1, 0.0, 0.5, 1.0, 4000)
    assert FIRST_STEPS <= waited <= 0.05 * 4000
    _, waited = serve(waits, 1, 3.0, 0.5, 1.0, 6000)
    assert waited > 2000
    _, waited = serve(waits, 1, 0.0, 0.5, 1.0, 4000)
    assert TRY <= waited < 0.1 * 4000
