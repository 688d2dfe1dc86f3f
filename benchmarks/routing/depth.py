"""Long prompts: what a router with a picker adds to them in time and CPU, and which turns it keeps at their replica."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
from support.emulated_engines import BLOCK_CHARACTERS, TOKEN_CHARACTERS

from benchmarks.routing.streams import cpu_seconds, peak_mb, served
from benchmarks.routing.workload import text

ALONE_REQUESTS = 100
SESSIONS, TURNS, AT_ONCE = 24, 4, 6
ANSWER, QUESTION = 600, 300  # characters, of each turn
UNDER_WAY, UNDER_WAY_RATE, UNDER_WAY_SIZE = 200, 50, 400_000  # requests, of them a second, characters
_ENDLESS = 10**7  # blocks of a replica's cache
Figures = dict[str, float]
Ask = Callable[[bytes], Awaitable[dict[str, Any]]]


@dataclass(frozen=True)
class Prompts:
    """``head``: characters that all conversations share; ``own``: of each one's first question."""

    name: str
    head: int
    own: int = 800


ROWS = (
    *(Prompts(f"{size} KB", 1000 * size) for size in (10, 100, 220, 400, 1000, 2000)),
    Prompts("95k tokens shared, 5k own", 95_000 * TOKEN_CHARACTERS, 5000 * TOKEN_CHARACTERS),
)


def _messages(row: Prompts, seed: object) -> list[dict[str, str]]:
    shared, own = text((row.name, "head"), row.head), text((row.name, seed), row.own)
    return [{"role": "system", "content": shared}, {"role": "user", "content": own}]


def _body(messages: list[dict[str, str]]) -> bytes:
    return json.dumps({"model": "tiny", "messages": messages, "max_tokens": 1}).encode()


async def _ask(http: aiohttp.ClientSession, port: int, body: bytes) -> dict[str, Any]:
    url, head = f"http://127.0.0.1:{port}/v1/chat/completions", {"Content-Type": "application/json"}
    async with http.post(url, data=body, headers=head) as answer:
        answer.raise_for_status()
        return dict((await answer.json())["usage"])


async def _alone(http: aiohttp.ClientSession, ports: list[int], row: Prompts, requests: int) -> list[list[float]]:
    """Milliseconds of requests that come one by one, at each port in turn."""
    bodies = [_body(_messages(row, ("alone", one))) for one in range(4)]
    took: list[list[float]] = [[] for _ in ports]
    for number in range(-4, requests):  # the first ones fill caches and open connections
        for port, some in zip(ports, took, strict=True):
            began = time.perf_counter()
            await _ask(http, port, bodies[number % 4])
            if number >= 0:
                some.append(1000 * (time.perf_counter() - began))
    return took


async def _stay(ask: Ask, row: Prompts, seed: int) -> float:
    """The percentage of turns that find their last one: the replica's cache, which forgets nothing, had all of it."""
    stayed, places = list[bool](), asyncio.Semaphore(AT_ONCE)

    async def talk(number: int) -> None:
        messages, before = _messages(row, (seed, number)), 0
        for turn in range(TURNS):
            async with places:
                usage = await ask(_body(messages))
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            if turn:
                stayed.append(cached >= before - BLOCK_CHARACTERS // TOKEN_CHARACTERS)
            before = usage["prompt_tokens"]
            said = text((row.name, seed, number, turn), ANSWER + QUESTION)
            messages += [{"role": "assistant", "content": said[:ANSWER]}, {"role": "user", "content": said[ANSWER:]}]
            await asyncio.sleep(random.Random(f"{seed} {number} {turn}").random() / 10)

    await asyncio.gather(*map(talk, range(SESSIONS)))
    return 100 * statistics.mean(stayed)


async def _measure(row: Prompts, seed: int, requests: int, port: int, direct: int, pids: dict[str, int]) -> Figures:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(300)) as http:
        stay = await _stay(lambda body: _ask(http, port, body), row, seed)
        before = {name: cpu_seconds(pid) for name, pid in pids.items()}
        alone, through = await _alone(http, [direct, port], row, requests)
        spent = {name: 1000 * (cpu_seconds(pid) - before[name]) / (requests + 4) for name, pid in pids.items()}
    hundredths = [statistics.quantiles(some, n=100) for some in (through, alone)]
    added = {f"added_p{one}_ms": hundredths[0][one - 1] - hundredths[1][one - 1] for one in (50, 99)}
    return {"stay": stay, **added, **{f"{name}_cpu_ms": one for name, one in spent.items()}}


def _under_way() -> Figures:
    """Cores while long requests come at a rate, and the most memory once so many of them are under way."""
    seconds = UNDER_WAY / UNDER_WAY_RATE
    with served("stage 2", 2 * seconds) as (port, pids, _):
        body = _body(_messages(Prompts("under way", UNDER_WAY_SIZE), 0))

        async def come() -> None:
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(300)) as http:
                began, asked = time.monotonic(), []
                for number in range(UNDER_WAY):
                    asked.append(asyncio.create_task(_ask(http, port, body)))
                    await asyncio.sleep(began + (number + 1) / UNDER_WAY_RATE - time.monotonic())
                await asyncio.gather(*asked)

        before = {name: cpu_seconds(pid) for name, pid in pids.items()}
        asyncio.run(come())
        cores = {f"{name}_cores": (cpu_seconds(pid) - before[name]) / seconds for name, pid in pids.items()}
        return {**cores, **{f"{name}_mb": peak_mb(pid) for name, pid in pids.items()}}


def compare(runs: int, share: float) -> dict[str, Figures]:
    """Medians of so many runs, by row. `share`: of the requests that tell times."""
    found: dict[str, list[Figures]] = {row.name: [] for row in ROWS}
    for seed in range(runs):
        for row in ROWS:
            with served("stage 2", 0, blocks=_ENDLESS) as (port, pids, direct):
                one = asyncio.run(_measure(row, seed, int(ALONE_REQUESTS * share), port, direct, pids))
                found[row.name].append(one)
    medians = {
        name: {figure: statistics.median(one[figure] for one in some) for figure in some[0]}
        for name, some in found.items()
    }
    return {**medians, "under way": _under_way()}


def table(found: dict[str, Figures]) -> str:
    """For people."""
    lines = [
        f"\n**long prompts** (stage 2; {SESSIONS} conversations of {TURNS} turns, {AT_ONCE} at once; times and CPU of "
        "requests that come one by one)\n",
        "| shared head | turns that stay % | added ms p50 / p99 | CPU ms a request: Envoy + picker |",
        "|---|---|---|---|",
    ]
    for row in ROWS:
        one = found[row.name]
        lines.append(
            f"| {row.name} | {one['stay']:.1f} | {one['added_p50_ms']:.1f} / {one['added_p99_ms']:.1f} "
            f"| {one['envoy_cpu_ms']:.2f} + {one['picker_cpu_ms']:.2f} |"
        )
    many = found["under way"]
    lines.append(
        f"\n{UNDER_WAY_RATE} requests of {UNDER_WAY_SIZE // 1000} KB a second until {UNDER_WAY} are under way: "
        f"{many['envoy_cores']:.2f} + {many['picker_cores']:.2f} cores, {many['envoy_mb']:.0f} + "
        f"{many['picker_mb']:.0f} MB (Envoy + picker)"
    )
    return "\n".join(lines)
