"""Chooses the picker's defaults: its code with replicas that have a cache and a pace, on a clock that does not wait.

    python -m benchmarks routing/simulate [--set SPILL_FLOOR=4,8,16]... [--seeds N] [--workloads ...] [--routers ...]

The same workloads as bench.py's, with no network and no process: a run takes a second, and gives the same figures each
time. `--set` tries each value of a constant of octavo_router.pick. "2 routers" know nothing of each other, and each
request may come to either, which no client with a kept connection does.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import selectors
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from support.emulated_engines import BLOCK_CHARACTERS, TOKEN_CHARACTERS, Replica, text_of

from benchmarks.routing.workload import CACHE_SHARE, PACES, REPLICAS, WORKLOADS, Measured, Workload, conversation
from octavo_router import pick as picking
from octavo_router.blocks import Prompt
from octavo_router.prompt import read_prompt

NAMES = [f"10.0.0.{number}:8000" for number in range(1, REPLICAS + 1)]
TOKEN_SECONDS = 0.01
Release = Callable[[], None]


class Front(Protocol):
    """Sends a request to a replica, until it is released."""

    def send(self, key: str, prompt: Prompt, now: float) -> tuple[str, Release]: ...


class RoundRobin:
    def __init__(self, seed: int) -> None:
        self._names = itertools.cycle(NAMES)

    def send(self, key: str, prompt: Prompt, now: float) -> tuple[str, Release]:
        return next(self._names), lambda: None


class Pickers:
    """So many routers, each with a picker of its own."""

    def __init__(self, seed: int, many: int) -> None:
        self._rng = random.Random(seed)
        self._pickers = [picking.Picker() for _ in range(many)]
        for one in self._pickers:
            one.set_replicas(NAMES)

    def send(self, key: str, prompt: Prompt, now: float) -> tuple[str, Release]:
        picker = self._rng.choice(self._pickers)
        pick = picker.pick(key, prompt, now)
        assert pick is not None
        return pick.order[0], lambda: picker.end(pick)


FRONTS: dict[str, Callable[[int], Front]] = {
    "round robin": RoundRobin,
    "1 router": lambda seed: Pickers(seed, 1),
    "2 routers": lambda seed: Pickers(seed, 2),
}


class _Clock(selectors.DefaultSelector):
    """Time passes when nothing is left to do, at once."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "everybody waits for somebody"
        self.now += max(timeout, 0)
        return []


def on_own_clock(measure: Callable[[Callable[[], float]], Any]) -> Any:
    """Runs what `measure` makes of a clock."""
    clock = _Clock()
    loop = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.now  # type: ignore[method-assign]
    try:
        return loop.run_until_complete(measure(loop.time))
    finally:
        loop.close()


async def play(workload: Workload, front: Front | None, seed: int, now: Callable[[], float]) -> dict[str, float]:
    """One run. Without a front: one endless cache as fast as all."""
    blocks_each = int(workload.characters * CACHE_SHARE / BLOCK_CHARACTERS) if front else 10**9
    faster = 1 if front else REPLICAS
    pace = {name: value * faster for name, value in PACES[workload.saturated].items()}
    replicas = {name: Replica(blocks_each, **pace) for name in NAMES}
    measured, served, rng = Measured(), Counter[str](), random.Random(seed)

    async def hold(number: int, delay: float) -> None:
        await asyncio.sleep(delay)
        for body in conversation(workload, seed, number):
            began, text = now(), text_of(body)
            key = "hot" if workload.hot else str(number)
            name, release = (
                front.send(key, read_prompt(json.dumps(body).encode()), began) if front else (NAMES[0], None)
            )
            served[name] += 1
            async with replicas[name].prefilled(text) as cached:
                measured.ttft.append(now() - began)
                measured.prompt_tokens += len(text) // TOKEN_CHARACTERS
                measured.cached_tokens += cached // TOKEN_CHARACTERS
                await asyncio.sleep(workload.max_tokens * TOKEN_SECONDS)
            if release:
                release()

    await asyncio.gather(*(hold(number, rng.random()) for number in range(workload.sessions)))
    return {
        "hit": 100 * measured.hit_rate,
        "balance": max(served.values()) * REPLICAS / sum(served.values()),
        "p50": 1000 * measured.percentile(0.5),
        "p99": 1000 * measured.percentile(0.99),
    }


def figures(workload: Workload, make: Callable[[int], Front] | None, seeds: range) -> dict[str, float]:
    """Medians over seeds."""
    runs = [
        on_own_clock(lambda now, seed=seed: play(workload, make(seed) if make else None, seed, now)) for seed in seeds
    ]
    return {name: statistics.median(one[name] for one in runs) for name in runs[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE,...", help="of octavo_router.pick")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS), metavar="NAME")
    parser.add_argument("--routers", nargs="+", choices=list(FRONTS), default=list(FRONTS), metavar="NAME")
    args = parser.parse_args()
    names = [one.partition("=")[0] for one in args.set]
    values = [one.partition("=")[2].split(",") for one in args.set]
    if unknown := [name for name in names if not isinstance(getattr(picking, name, None), int | float)]:
        parser.error(f"octavo_router.pick has no number {unknown[0]!r}")
    seeds = range(1, args.seeds + 1)
    for workload in (WORKLOADS[name] for name in args.workloads):
        best = figures(workload, None, seeds)["hit"]
        print(f"\n{workload.name}: one endless cache hits {best:.1f} %")
        for tried in itertools.product(*values):
            for name, value in zip(names, tried, strict=True):
                setattr(picking, name, float(value) if "." in value else int(value))
            said = " ".join(f"{name}={value}" for name, value in zip(names, tried, strict=True))
            for router in args.routers:
                one = figures(workload, FRONTS[router], seeds)
                print(
                    f"  {said} {router:12} of optimum {100 * one['hit'] / best:5.1f} %  max/mean {one['balance']:.2f}  "
                    f"TTFT p50 {one['p50']:4.0f}  p99 {one['p99']:4.0f} ms",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
