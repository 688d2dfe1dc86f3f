"""Tenants' tokens and requests are counted exactly, without a gateway."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo_router.admission import Place, Tenants
from octavo_router.blocks import Prompt
from octavo_router.limits import WINDOW_SECONDS, Account, Limits, Refusal, Usage, read_limits
from octavo_router.prompt import read_prompt

RED = ("red", "1")
STEP = st.tuples(
    st.sampled_from(["a", "b"]),  # engine
    st.sampled_from([RED, ("red", "2"), ("blue", "1")]),
    st.sampled_from(["tokens", "tokens", "restart", "read"]),
    st.integers(0, 500),
    st.floats(0, 30),  # seconds until then
)


@given(st.lists(STEP, max_size=60))
def test_usage_is_what_was_counted_in_the_last_minute(steps: list[tuple[str, Any, str, int, float]]) -> None:
    """Beside a list of everything that happened: each token of an engine that is known counts once, at the time at
    which it is read, whatever restarts come between."""
    usage, now = Usage(), 0.0
    counters: dict[str, dict[Any, float]] = {"a": {}, "b": {}}
    unread: dict[str, dict[Any, float]] = {"a": {}, "b": {}}  # since the last reading, as far as it can be known
    seen: list[tuple[float, Any, float]] = []
    known: set[str] = set()
    for engine, account, what, many, seconds in steps:
        now += seconds
        if what == "tokens":
            for book in (counters, unread):
                book[engine][account] = book[engine].get(account, 0.0) + many
        else:
            usage.update(engine, counters[engine], now)
            seen += [(now, who, new) for who, new in unread[engine].items() if engine in known]
            known.add(engine)
            unread[engine] = {}
            if what == "restart":  # which takes longer than the time between two readings
                counters[engine] = {}
                usage.update(engine, {}, now)
        for who in (RED, ("red", "2"), ("blue", "1")):
            expected = sum(new for when, one, new in seen if one == who and when > now - WINDOW_SECONDS)
            assert usage.used(who, now) == expected


def test_an_engine_that_counts_anew_loses_nothing() -> None:
    usage = Usage()
    usage.update("a", {RED: 900}, 0)
    assert usage.used(RED, 0) == 0, "nobody knows when that was"
    usage.update("a", {RED: 1000}, 1)
    usage.update("a", {RED: 30}, 2)
    assert usage.used(RED, 2) == 130


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 100)), min_size=1, max_size=20), st.integers(1, 300))
def test_retry_after_is_the_first_moment_at_which_there_is_room(steps: list[tuple[float, int]], limit: int) -> None:
    usage, now, total = Usage(), 0.0, 0.0
    usage.update("a", {}, now)
    for seconds, tokens in steps:
        now, total = now + seconds, total + tokens
        usage.update("a", {RED: total}, now)
    seconds = usage.seconds_until_below(RED, limit, now)
    assert (seconds == 0) == (usage.used(RED, now) < limit)
    if seconds:
        assert usage.used(RED, now + seconds * 0.999 - 0.001) >= limit
        assert usage.used(RED, now + seconds + 0.001) < limit


@given(st.integers(1, 50), st.integers(1, 16), st.lists(st.tuples(st.integers(0, 15), st.booleans()), max_size=200))
def test_routers_together_allow_no_more_than_the_limit(most: int, routers: int, steps: list[tuple[int, bool]]) -> None:
    text = json.dumps({"routers": routers, "tenants": {"red": {"maxConcurrent": most}, "blue": {}}})
    all_of_them = [Tenants(str(number)) for number in range(routers)]
    for one in all_of_them:
        one.limits, one.routers = read_limits(text)
    under_way: list[list[Place]] = [[] for _ in all_of_them]

    def begin(number: int, account: Account) -> Refusal | None:
        got: list[Refusal | None] = []
        place = Place(all_of_them[number], account, got.append)
        all_of_them[number].begin(place, 0)
        if got == [None] and account == RED:
            under_way[number].append(place)
        return got[0]

    for number, begins in steps:
        number %= routers
        if begins:
            refused = begin(number, RED)
            assert refused is None or (refused.limit, refused.retry_after) == ("concurrent", 1)
            assert begin(number, ("blue", "1")) is None
        elif under_way[number]:
            under_way[number].pop().end()
        assert [len(one) for one in under_way] == [one.under_way("red") for one in all_of_them]
        assert sum(map(len, under_way)) <= max(most, routers)
    for number, _ in enumerate(all_of_them):
        while begin(number, RED) is None:
            assert len(under_way[number]) <= most
    assert most - routers < sum(map(len, under_way)) <= max(most, routers)


def test_limits_that_cannot_be_read_are_an_error() -> None:
    one = {"tokensPerMinute": 5, "requestsPerMinute": 7}
    assert read_limits(json.dumps({"routers": 2, "tenants": {"a": one}})) == ({"a": Limits(5, None, 7)}, 2)
    for text in ("", "[]", "{}", '{"routers": 1, "tenants": 3}', '{"routers": 1, "tenants": {"a": 3}}'):
        with pytest.raises(ValueError):
            read_limits(text)


def test_prompts_of_two_salts_have_nothing_in_common() -> None:
    body = json.dumps({"model": "m", "prompt": "x" * 1000}).encode()
    assert read_prompt(body, "a") == read_prompt(body, "a") != Prompt()
    assert not set(read_prompt(body, "a").blocks) & set(read_prompt(body, "b").blocks)
