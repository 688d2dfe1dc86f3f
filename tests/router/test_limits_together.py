"""Limits of tenants over several routers: the routers' pickers on loopback, with their real links."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.serving import free_port

from octavo_router import circle
from octavo_router.admission import Place, Tenants
from octavo_router.circle import Circle
from octavo_router.ledger import Ledger
from octavo_router.limits import Limits, Refusal
from octavo_router.peers import Peers, resolver

NAMES = [f"tenant-{number}" for number in range(16)]  # each router decides for some
Json = Any


class Router:
    """The part of a picker that decides for tenants."""

    def __init__(self, me: str, listed: list[str], limits: Limits, routers: int) -> None:
        self.tenants = Tenants(me)
        self.tenants.limits, self.tenants.routers = dict.fromkeys(NAMES, limits), routers
        self.me, self.listed = me, listed
        self.task = asyncio.create_task(Peers(self.tenants, me, lambda: list(listed)).run())

    async def asks(self, tenant: str) -> Place | Refusal:
        decided: asyncio.Future[Refusal | None] = asyncio.get_running_loop().create_future()
        place = Place(self.tenants, (tenant, ""), decided.set_result)
        self.tenants.begin(place, time.monotonic())
        refusal = await asyncio.wait_for(decided, 2)
        return refusal or place

    def stop(self) -> None:
        self.task.cancel()


async def until(what: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def agree(routers: list[Router]) -> bool:
    now = time.monotonic()
    known = {name for one in routers for name in one.tenants.circle.members}
    return known == {one.me for one in routers} and all(one.tenants.circle.agrees(now) for one in routers)


@contextlib.asynccontextmanager
async def running(limits: Limits, many: int = 2) -> AsyncIterator[list[Router]]:
    listed = [f"127.0.0.1:{free_port()}" for _ in range(many)]
    routers = [Router(me, listed, limits, many) for me in listed]
    try:
        await until(lambda: agree(routers))
        await answering(routers)
        yield routers
    finally:
        for one in routers:
            one.stop()
        await asyncio.gather(*(one.task for one in routers), return_exceptions=True)


async def answering(routers: list[Router]) -> None:
    """Links to all others are open."""
    links = [one.tenants.links for one in routers]
    await until(lambda: all(link.answers for one in links for link in one._links.values()))  # type: ignore[union-attr]


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=40, max_size=60), st.sampled_from(NAMES))
def test_twenty_a_minute_are_twenty_whichever_routers_are_asked(split: list[int], tenant: str) -> None:
    async def run() -> None:
        async with running(Limits(requests_per_minute=20), 3) as routers:
            answers = [await routers[number].asks(tenant) for number in split]
            assert [isinstance(one, Place) for one in answers] == [True] * 20 + [False] * (len(split) - 20)
            refusal = answers[-1]
            assert isinstance(refusal, Refusal) and refusal.limit == "requests" and 58 <= refusal.retry_after <= 60
            at_once = await asyncio.gather(
                *(routers[number].asks("tenant-0" if tenant != "tenant-0" else "tenant-1") for number in split)
            )
            assert sum(isinstance(one, Place) for one in at_once) == 20, "those that come at once, too"

    asyncio.run(run())


@settings(max_examples=12, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), st.booleans()), max_size=60), st.sampled_from(NAMES))
def test_three_at_once_are_three_whichever_routers_are_asked(steps: list[tuple[int, bool]], tenant: str) -> None:
    async def run() -> None:
        async with running(Limits(max_concurrent=3)) as routers:
            under_way: list[Place] = []
            decider = routers[0].tenants.circle.decider(tenant)
            its = next(one for one in routers if one.me == decider).tenants.ledger
            for number, begins in steps:
                if begins:
                    got = await routers[number].asks(tenant)
                    assert isinstance(got, Place) == (len(under_way) < 3)
                    if isinstance(got, Place):
                        under_way.append(got)
                elif under_way:
                    under_way.pop(0).end()
                    await until(lambda: its.under_way(tenant) == len(under_way))

    asyncio.run(run())


def test_a_client_that_goes_before_the_answer_leaves_no_trace() -> None:
    async def run() -> None:
        async with running(Limits(max_concurrent=3, requests_per_minute=20)) as routers:
            for asking in routers:
                for tenant in NAMES:
                    place = Place(asking.tenants, (tenant, ""), lambda _: None)
                    asking.tenants.begin(place, time.monotonic())
                    place.end()
            now = time.monotonic()
            await until(lambda: not any(one.tenants.ledger.under_way(name) for one in routers for name in NAMES))
            begun = [one.tenants.ledger.begun(name, now) for one in routers for name in NAMES]
            assert max(begun) <= 1, "who decides at once has let it in; who is asked takes it back"

    asyncio.run(run())


def test_a_router_that_comes_or_goes_keeps_the_count() -> None:
    """What others have let in is told to the router that decides next; what was under way at one that ends, ends."""

    async def run() -> None:
        async with running(Limits(max_concurrent=8, requests_per_minute=20)) as routers:
            first, second = routers
            held = [place for tenant in NAMES for place in [await first.asks(tenant), await second.asks(tenant)]]
            assert all(isinstance(one, Place) for one in held)
            third = Router(f"127.0.0.1:{free_port()}", first.listed, Limits(8, 8, 20), 3)
            third.tenants.limits = first.tenants.limits
            routers.append(third)
            await until(lambda: agree(routers))  # before it is listed: it says itself that it is there
            await answering(routers)
            for tenant in NAMES:
                more = [await routers[number % 3].asks(tenant) for number in range(8)]
                assert [isinstance(one, Place) for one in more] == [True] * 6 + [False] * 2
            second.stop()
            routers.remove(second)
            first.listed.remove(second.me)
            await until(lambda: agree(routers))
            await answering(routers)
            for tenant in NAMES:  # of 8 under way 3 were the second's; begun are 8 - 3 of the minute, as far as known
                more = [await routers[number % 2].asks(tenant) for number in range(5)]
                assert [isinstance(one, Place) for one in more] == [True] * 3 + [False] * 2

    asyncio.run(run())


def test_routers_that_see_different_ones_have_their_share() -> None:
    async def run() -> None:
        async with running(Limits(requests_per_minute=20)) as routers:
            routers[0].listed.append("127.0.0.1:1")  # nobody is there
            await until(lambda: all("127.0.0.1:1" in one.tenants.circle.members for one in routers))
            for number, router in enumerate(routers):
                allowed = [await router.asks(NAMES[number]) for _ in range(20)]
                assert sum(isinstance(one, Place) for one in allowed) == 20 // 3

    asyncio.run(run())


PROGRAM = """
import asyncio, json, sys, time
from pathlib import Path
from octavo_router.admission import Place, Tenants
from octavo_router.limits import Limits
from octavo_router.peers import Peers

async def serve(me, listed, api):
    tenants = Tenants(me)
    tenants.limits, tenants.routers = {f"tenant-{n}": Limits(None, 4, 20) for n in range(16)}, 2
    peers = Peers(tenants, me, lambda: Path(listed).read_text().split())

    async def answer(reader, writer):
        while line := await reader.readline():
            tenant = line.decode().strip()
            if tenant == "?":
                view = [tenants.circle.agrees(time.monotonic()), sorted(tenants.circle.members)]
                writer.write(json.dumps(view).encode() + b"\\n")
                continue
            decided = asyncio.get_running_loop().create_future()
            place = Place(tenants, (tenant, ""), decided.set_result)
            tenants.begin(place, time.monotonic())
            refusal = await decided
            place.end()
            writer.write(json.dumps(refusal and refusal.limit).encode() + b"\\n")

    await asyncio.start_server(answer, "127.0.0.1", api)
    await peers.run()

asyncio.run(serve(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""


class Process:
    """The same as a process."""

    def __init__(self, me: str, listed: Path) -> None:
        self.me, self.api = me, free_port()
        self.process = subprocess.Popen([sys.executable, "-c", PROGRAM, me, str(listed), str(self.api)])

    async def connect(self) -> None:
        async def opened() -> None:
            while True:
                with contextlib.suppress(OSError):
                    self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.api)
                    return
                await asyncio.sleep(0.05)

        await asyncio.wait_for(opened(), 30)

    async def asks(self, tenant: str) -> Json:
        self.writer.write(tenant.encode() + b"\n")
        return json.loads(await asyncio.wait_for(self.reader.readline(), 10))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_decider_that_dies_or_hangs_holds_up_nobody(tmp_path: Path, number: signal.Signals) -> None:
    """By share until it is listed no more; then who is left decides, and knows what it has let in."""

    async def run() -> None:
        listed = tmp_path / "routers"
        routers = [Process(f"127.0.0.1:{free_port()}", listed) for _ in range(2)]
        left, decider = routers
        listed.write_text(" ".join(one.me for one in routers))
        try:
            for one in routers:
                await one.connect()

            async def agreed(many: int) -> None:
                deadline = time.monotonic() + 90
                seen = [True, sorted(one.me for one in routers[:many])]
                while [await one.asks("?") for one in routers[:many]] != [seen] * many:
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.02)

            await agreed(2)
            await asyncio.sleep(0.1)
            seen = Circle(left.me)
            seen.serving(one.me for one in routers)
            its = [name for name in NAMES if seen.decider(name) == decider.me]
            assert 0 < len(its) < len(NAMES)
            for tenant in NAMES:
                assert [await routers[each % 2].asks(tenant) for each in range(8)] == [None] * 8
            decider.process.send_signal(number)
            seconds: list[float] = []
            answers: dict[str, list[Json]] = {}
            for _ in range(10):
                for tenant in NAMES:
                    began = time.monotonic()
                    answers.setdefault(tenant, []).append(await left.asks(tenant))
                    seconds.append(time.monotonic() - began)
            print(f"the slowest of {len(seconds)}: {sorted(seconds)[-5:]}")
            assert sorted(seconds)[-5] < circle.LEASE_SECONDS / 2, (
                "one waits for its time; a machine that does other things may hold up some"
            )
            assert all(answers[tenant] == [None] * 6 + ["requests"] * 4 for tenant in its), "10 of 20: 4 were before"
            listed.write_text(left.me)
            await agreed(1)
            for tenant in its:
                more = [await left.asks(tenant) for _ in range(20)]
                assert more == [None] * 10 + ["requests"] * 10, "its own 10 count on"
        finally:
            for one in routers:
                one.process.kill()
                one.process.wait()

    asyncio.run(run())


STEPS = st.lists(st.tuples(st.sampled_from(["begin", "begin", "end", "back"]), st.floats(0, 20)), max_size=60)


@given(STEPS, st.integers(1, 10))
def test_a_ledger_lets_no_more_begin_in_any_minute(steps: list[tuple[str, float]], limit: int) -> None:
    ledger, now, begun, under_way = Ledger(), 1000.0, [], 0
    for what, seconds in steps:
        now += seconds
        if what == "begin":
            wait = ledger.seconds_until_below("t", limit, now)
            assert (wait == 0) == (ledger.begun("t", now) < limit)
            if wait:
                now += wait + 0.01
            ledger.begin("t", "a", now)
            begun.append(now)
            under_way += 1
        elif under_way:
            (ledger.end if what == "end" else ledger.take_back)("t", "a")
            under_way -= 1
            if what == "back":
                begun.pop()
        assert all(sum(one <= each < one + 60 for each in begun) <= limit for one in begun)
        assert ledger.under_way("t") == under_way
    other = Ledger()
    other.learn("a", json.loads(json.dumps(ledger.told("a", ["t"], now))), now)
    assert ledger.begun("t", now) <= other.begun("t", now) and other.under_way("t") == under_way
    other.gone("a")
    assert other.under_way("t") == 0 and other.begun("t", now + 61) == 0


@given(st.sets(st.integers(1, 99), min_size=2, max_size=8), st.integers(0, 99))
def test_a_router_that_goes_moves_its_own_tenants_alone(members: set[int], seed: int) -> None:
    names = sorted(f"10.0.0.{one}:9004" for one in members)

    def deciders(of: list[str]) -> dict[str, str]:
        made = Circle(of[0])
        made.serving(of)
        return {name: made.decider(name) for name in NAMES}

    gone = names[seed % len(names)]
    before, after = deciders(names), deciders([one for one in names if one != gone])
    assert {name: who for name, who in before.items() if who != gone}.items() <= after.items()


def test_silence_ends_an_agreement() -> None:
    one = Circle("a")
    assert not one.agrees(0), "nobody has said who serves"
    one.serving(["a"])
    assert one.agrees(0)
    one.hear("b", "?", 0)
    assert not one.agrees(0)
    one.hear("b", one.view, 1)
    assert one.agrees(1) and one.agrees(1 + circle.LEASE_SECONDS) and not one.agrees(1.1 + circle.LEASE_SECONDS)
    assert one.silent(1.1 + circle.LEASE_SECONDS) == ["b"]
    one.lose("b")
    assert one.agrees(9)


def test_names_are_found_by_dns() -> None:
    assert resolver("localhost", 9004)() in (
        ["127.0.0.1:9004"],
        ["[::1]:9004", "127.0.0.1:9004"],
        ["127.0.0.1:9004", "[::1]:9004"],
    )
    assert resolver("nobody.invalid", 9004)() is None
