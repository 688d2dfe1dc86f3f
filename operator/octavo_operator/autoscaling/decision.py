"""How many replicas the present load needs, and the number that makes a HorizontalPodAutoscaler want as many. Pure.

An autoscaler with an External metric and AverageValue wants ceil(metric / target) replicas, and does nothing while
that is within a tenth of what it has. Which metric makes that right?

The bare queue does not. It is empty as soon as enough replicas run, however busy they are: the autoscaler takes them
away, the queue comes back, and so on. It also asks for too many: 100 waiting at a target of 4 are 25 replicas, though
each one that is added takes a whole batch away from the queue and not 4.

So two questions are asked about all requests in the fleet, running and waiting (`demand`), given what one replica holds
at once (`capacity`) and how many may wait for each (`target`, what the user sets):

    at least   ceil(demand / (capacity + target))   with fewer, more than `target` a replica would wait
    at most    ceil(demand / capacity)              with more, some would have nothing to do

Between the two, the fleet stays as it is. Demand does not depend on the number of replicas, so one step reaches a
number that the same demand leaves alone: it cannot flap. Scaling down never makes a queue, an idle fleet needs nothing
(the autoscaler's minReplicas is left), and pods that are loading or still to come do not disturb: they are no demand.

The metric is `target` for every replica that is needed: the queue that would be there if just the target were waiting
for each. In whole replicas, so that the tolerance of a tenth never swallows the step from one replica to the next, up
to ten of them.

`capacity` is learnt. A replica that has requests waiting holds exactly what it runs, whatever limits it: sequences,
KV memory, or tokens a step. That is remembered, and raised when more are seen to run. Before anything has waited it is
what the engine is configured for, or what its KV memory would take of requests like those now running. The status says
it, so that an operator that starts knows it again: by what is configured it would take replicas away that are full.

What is not known never takes a replica away: while a pod that might hold requests cannot be asked, or is loading, the
fleet is kept as it is at least. It may grow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from octavo_operator.autoscaling.metrics_page import Load


@dataclass(frozen=True)
class Decision:
    needed: int  # replicas
    metric: int  # what the autoscaler divides by its target
    running: int
    waiting: int
    capacity: float | None  # sequences a replica; None: nothing is known of it, and nothing runs
    held: bool = False  # something is not known, and the fleet is kept because of that


def decide(
    replicas: int, target: int, loads: Sequence[Load], capacity: float | None, *, unsure: bool = False
) -> Decision:
    """`replicas`: as many as are wanted so far. `unsure`: there may be demand that `loads` does not show."""
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
    return Decision(needed, needed * target, math.ceil(running), math.ceil(waiting), capacity, held)


def learn(known: float | None, loads: Sequence[Load]) -> float | None:
    """What one replica holds, by what can be seen now and was known before; None: never seen at its limit."""
    full = [max(load.running, 1) for load in loads if load.waiting > 0]
    if full:
        return sum(full) / len(full)
    if known is None:
        return None
    return max([known, *(load.running for load in loads)])


def noted(before: int | None, capacity: float | None) -> int | None:
    """What a status that says `before` should say: small changes are not worth a write."""
    if capacity is None or (before and abs(capacity - before) < max(0.75, before / 10)):
        return before
    return max(round(capacity), 1)


def estimate(loads: Sequence[Load], configured: float | None = None) -> float | None:
    """What one replica should hold, before any has been seen at its limit; `configured`: by the spec."""
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
