"""Delays of retries."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from octavo_operator.kube.backoff import Backoff


@given(st.floats(0.01, 60), st.floats(60, 1000), st.integers(1, 100_000))
def test_delays_double_up_to_the_longest(first: float, longest: float, attempt: int) -> None:
    backoff = Backoff(first, longest)
    assert backoff.delay(1) == first
    assert first <= backoff.delay(attempt) <= backoff.delay(attempt + 1) <= longest
    assert backoff.delay(attempt + 1) in (2 * backoff.delay(attempt), longest)
