"""Check a plan against a workload: so many users, or requests a second, of some length and with some speed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from octavo.memory.dry_run import Plan
from octavo.plan.speed import Pace, Speed, pace


@dataclass(frozen=True)
class Workload:
    """The requests expected. ``users`` send one request after the other; None: ``rps`` requests arrive each second."""

    context: int  # tokens of a prompt
    output: int  # of an answer
    users: int | None = None
    rps: float | None = None
    prefix_share: float = 0.0  # of a prompt, that all have in common
    ttft: float | None = None  # seconds to the first token that are wanted, at most
    itl: float | None = None  # seconds between tokens


@dataclass(frozen=True)
class Outlook:
    """The performance expected of a workload, on all engines together."""

    users: float  # requests at the same time
    capacity: int  # of them, that the KV caches hold at their longest
    mean_capacity: int  # at their mean length
    ttft: float
    itl: float
    tokens_per_second: float
    problems: tuple[str, ...]
    max_num_seqs: int  # of each engine, that suits it

    def as_json(self, speed: Speed) -> dict[str, Any]:
        """Seconds as milliseconds."""
        return {
            "users": round(self.users, 1),
            "capacity": self.capacity,
            "mean_capacity": self.mean_capacity,
            "ttft_ms": round(self.ttft * 1e3, 1),
            "itl_ms": round(self.itl * 1e3, 2),
            "tokens_per_second": round(self.tokens_per_second, 1),
            "calibrated": speed.calibrated,
            "calibration": speed.source or None,
            "max_num_seqs": self.max_num_seqs,
            "problems": list(self.problems),
        }


def outlook(plan: Plan, work: Workload, speed: Speed) -> Outlook:
    """Predict the performance of a plan that fits. Engines share the requests evenly, as the one with the fewest tokens
    gets the next."""
    own = work.context * (1 - work.prefix_share)
    shared = int(work.context * work.prefix_share)
    capacity = _capacity(plan, int(own) + work.output, shared)
    mean_capacity = _capacity(plan, int(own) + work.output // 2, shared)
    room = max(1, mean_capacity)
    limit = min(room, plan.config.scheduler.max_num_seqs)

    def at(users: float, limit: int = limit) -> Pace:
        """The pace with so many requests at the same time; those above ``limit`` wait for a place."""
        running = max(1.0, min(users, limit))
        found = pace(plan, speed, running, own, work.context, work.output)
        if users <= limit:
            return found
        waiting = (users - limit) / limit * (found.ttft + work.output * found.itl)
        return replace(found, ttft=found.ttft + waiting)

    engines = plan.num_engines if work.rps is not None else min(plan.num_engines, work.users or 1)  # that have any
    users = (work.users or 1) / engines  # of each
    if work.users is None and work.rps is not None:
        for _ in range(50):  # Little's law
            found = at(min(users, limit))
            users = min(1e6, 0.5 * users + 0.5 * work.rps / engines * (found.ttft + work.output * found.itl))
    found = at(users)
    capacity, mean_capacity = capacity * plan.num_engines, mean_capacity * plan.num_engines
    problems = _problems(plan, work, users * engines, mean_capacity, found.ttft, found.itl)
    seqs, rate = _suiting(work, lambda running: at(running, room), users, room), found.tokens_per_second * engines
    return Outlook(users * engines, capacity, mean_capacity, found.ttft, found.itl, rate, problems, seqs)


def _capacity(plan: Plan, own: int, shared: int) -> int:
    ledger = plan.ledger
    if ledger is None or not ledger.kv_cache:
        return 0
    layout = ledger.layout
    usable = ledger.num_blocks - 1 - (layout.most_blocks(shared) if shared else 0)
    return max(0, usable) // max(1, layout.most_blocks(max(1, own)))


def _problems(plan: Plan, work: Workload, users: float, capacity: int, ttft: float, itl: float) -> tuple[str, ...]:
    found = []
    scheduler = plan.config.scheduler
    most = scheduler.max_num_seqs * plan.num_engines
    if work.context + work.output > scheduler.max_model_len:
        length = work.context + work.output
        found.append(f"requests of {length:,} tokens are longer than max_model_len {scheduler.max_model_len:,}")
    if users > capacity:
        found.append(f"{users:,.0f} requests at the same time, the KV cache holds {capacity:,} of their mean length")
    elif users > most:
        found.append(f"{users:,.0f} requests at the same time, --max-num-seqs lets {most:,} run")
    if work.ttft is not None and ttft > work.ttft:
        found.append(f"the first token takes {ttft * 1e3:,.0f} ms, {work.ttft * 1e3:,.0f} ms are wanted")
    if work.itl is not None and itl > work.itl:
        found.append(f"{itl * 1e3:,.1f} ms between tokens, {work.itl * 1e3:,.0f} ms are wanted")
    return tuple(found)


def _suiting(work: Workload, at: Callable[[float], Pace], users: float, limit: int) -> int:
    """The most sequences at a time that keep what is wanted between tokens, as many as there are requests."""
    wanted = max(1, min(limit, -(-int(users) // 1)))
    if work.itl is None:
        return wanted
    while wanted > 1 and at(float(wanted)).itl > work.itl:
        wanted -= max(1, wanted // 16)
    return wanted
