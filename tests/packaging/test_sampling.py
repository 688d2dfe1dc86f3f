"""`make test` leaves no value, and no pair of values where pairs are asked for, to `make test-long`."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.sampling import sample, share_of


@st.composite
def tables(draw: st.DrawFn) -> dict[str, dict[str, str]]:
    """Cases of up to four parameters, some of which were left out by hand."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    drawn = [values for values in product(*map(range, sizes)) if draw(st.integers(0, 9))]
    return {str(values): {f"p{i}": str(value) for i, value in enumerate(values)} for values in drawn}


@given(cases=tables())
def test_every_value_and_every_pair_has_a_case(cases: dict[str, dict[str, str]]) -> None:
    whole, ones, pairs = ([cases[name] for name in names] for names in (cases, sample(cases, 1), sample(cases, 2)))
    assert {item for case in ones for item in case.items()} == {item for case in whole for item in case.items()}
    held = [{*case.items()} for case in pairs]
    assert all(any({a, b} <= case for case in held) for one in whole for a, b in product(one.items(), repeat=2))


@pytest.mark.parametrize(("strength", "most"), [(1, 6), (2, 36), (3, 120)])
def test_it_is_small_and_the_same_every_time(strength: int, most: int) -> None:
    cases = {
        f"{a}-{b}-{c}": {"a": str(a), "b": str(b), "c": str(c)} for a, b, c in product(range(5), range(4), range(6))
    }
    chosen = sample(cases, strength)
    assert len(chosen) <= most and chosen == sample(dict(reversed(cases.items())), strength)


@given(names=st.sets(st.text()), share=st.integers(1, 6), draw=st.integers(0, 2**32))
def test_draws_that_follow_each_other_have_every_case(names: set[str], share: int, draw: int) -> None:
    shares = [share_of(names, share, draw + number) for number in range(share)]
    assert set().union(*shares) == names
    assert not names or all(1 <= len(one) <= -(-len(names) // min(share, len(names))) for one in shares)


@pytest.mark.sampled
@pytest.mark.parametrize("value", [10**5000], ids=["5000 digits"])
def test_a_value_that_cannot_be_shown_is_one(value: int) -> None:
    """Python shows no integer of so many digits: the choice of cases must do without."""
    with pytest.raises(ValueError, match="digits"):
        repr(value)
