"""Compute how many replicas the load needs, and the metric that makes a HorizontalPodAutoscaler agree. Pure.

An autoscaler with an External metric and AverageValue wants ceil(metric / target) replicas, and changes nothing within
a tolerance of 10 %. The metric must be chosen so that this is the right number.

The length of the queue is not. It is 0 as soon as enough replicas run, however busy they are: the autoscaler removes
some, the queue comes back, and so on. It also asks for too many: 100 waiting requests at a target of 4 are 25 replicas,
though each additional one takes a whole batch off the queue and not 4.

So two bounds are computed from all requests of the fleet, running and waiting (`demand`), given the number of requests
that one replica handles at once (`capacity`) and how many may wait for each (`target`, set by the user):

    at least   ceil(demand / (capacity + target))   with fewer, more than `target` a replica would wait
    at most    ceil(demand / capacity)              with more, some would be idle

Between the two, the fleet stays as it is. Demand does not depend on the number of replicas, so one step reaches a
number that the same demand leaves unchanged: it cannot flap. Scaling down never creates a queue, an idle fleet needs no
replica (the autoscaler's minReplicas remain), and pods that are loading or pending add no demand.

The metric is `target` for every replica that is needed: the queue if just `target` requests were waiting for each. It
counts whole replicas, so that the tolerance never swallows a step between up to ten replicas.

`capacity` is observed. A replica with waiting requests runs as many as it can, whatever limits it: sequences, KV memory
or tokens per step. That is kept, and raised when more are seen to run. Before anything has waited it is the engine's
configuration, or what its KV memory would take of requests like those now running. The status records it, so that an
operator that starts knows it: by the configuration alone it would remove replicas that are full.

Unknown load never removes a replica: while a pod that might hold requests cannot be scraped, or is loading, the number
of replicas does not fall. It may grow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from octavo_operator.autoscaling.metrics_page import Load


@dataclass(frozen=True)
class Decision:
    """The replicas that the load needs, and what that follows from."""

    needed: int  # replicas
    metric: int  # `needed` times the target
    running: int
    waiting: int
    capacity: float | None  # sequences per replica; None: unknown, and nothing runs
    held: bool = False  # not scaled down because some load is unknown
    idle: bool = False  # there is no request, and no load is unknown
    finished: float = 0  # requests that the pods have ended


def decide(
    replicas: int, target: int, loads: Sequence[Load], capacity: float | None, *, unsure: bool = False
) -> Decision:
    """The decision for a fleet that has `replicas` desired now. `unsure`: there may be demand that `loads` lacks."""
    running, waiting = sum(load.running for load in loads), sum(load.waiting for load in loads)
    demand = running + waiting
    if demand == 0:
        needed = 0
    else:
        one = capacity or max(max(load.running for load in loads), 1)
        at_least, at_most = _ceil(demand / (one + target)), _ceil(demand / one)
        needed = min(max(replicas, at_least), at_most)
    held = unsure and needed < replicas
    if held:
        needed = replicas
    idle, finished = demand == 0 and not unsure, sum(load.finished for load in loads)
    return Decision(needed, needed * target, math.ceil(running), math.ceil(waiting), capacity, held, idle, finished)


def update_capacity(known: float | None, loads: Sequence[Load]) -> float | None:
    """Capacity of one replica from the current loads and what was `known`; None: no replica was ever at its limit."""
    full = [max(load.running, 1) for load in loads if load.waiting > 0]
    if full:
        return sum(full) / len(full)
    if known is None:
        return None
    return max([known, *(load.running for load in loads)])


def rounded_capacity(before: int | None, capacity: float | None) -> int | None:
    """status.replicaCapacity, which is `before` now: small changes are not worth a write."""
    if capacity is None or (before and abs(capacity - before) < max(0.75, before / 10)):
        return before
    return max(round(capacity), 1)


def estimate_capacity(loads: Sequence[Load], configured: float | None = None) -> float | None:
    """Capacity of one replica before any was seen at its limit. `configured`: maxNumSeqs of the spec."""
    busy = [load for load in loads if load.running]
    found = [one for load in busy or loads if (one := _estimate(load, configured)) is not None]
    return sum(found) / len(found) if found else configured


def _estimate(load: Load, configured: float | None) -> float | None:
    limits = [limit for limit in (load.max_running or configured,) if limit]
    if load.running and load.kv_usage:
        limits.append(load.running / load.kv_usage)
    return max(min(limits), load.running, 1) if limits else None


def _ceil(number: float) -> int:
    return math.ceil(number - 1e-9)  # 10 / (10 / 3) is a little more than 3
