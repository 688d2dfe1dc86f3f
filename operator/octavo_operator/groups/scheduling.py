"""Groups of pods that find places for some of their pods only. Pure.

Kubernetes gives pods places one by one, so a group may hold what another one lacks. One that is partly placed for as
long as a surge is waited for (rollout.surgePatienceSeconds) is given up: its LeaderWorkerSet is told to have fewer
groups, and later, after growing delays, to have all again. Of several that are partly placed, of all LLMDeployments,
the youngest goes first, and the others then get time to take what it has left. Only the last group of a LeaderWorkerSet
can be held back without ending others. One before it that is partly placed (it was restarted, and its place is gone) is
evicted instead: it is made anew at once, but whoever waits for a place is served before it.

Decided from our own pods alone, so it needs no rights over nodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from octavo_operator.api import GROUP, LLMDeployment
from octavo_operator.kube.backoff import Backoff
from octavo_operator.observed.diagnosis import Problem
from octavo_operator.observed.workload import Group
from octavo_operator.render.workload import KIND
from octavo_operator.times import parse_time

HELD = f"{GROUP}/held-groups"  # annotation of the LeaderWorkerSet
UNSCHEDULABLE = "GroupUnschedulable"  # reason of a condition
_RETRIES = Backoff(60.0, 600.0)  # until a group that was given up is tried again
TURN_SECONDS = 15.0  # that others have to take the places of one that was given up
_STOP_SECONDS = 5.0  # in which a pod that waits for its group ends, after preStop
_LEAST_PATIENCE_SECONDS = 5.0
_LOOK_SECONDS = 5.0  # until one looks whether a younger one has gone

Json = dict[str, Any]


@dataclass(frozen=True)
class HeldGroups:
    """`count` groups of `of` do not run. They were given up at the time `at` for the `tries`th time; `is_over`: they
    are being tried again."""

    count: int
    of: int
    at: int
    tries: int
    is_over: bool = False

    def __str__(self) -> str:
        return f"{self.count}/{self.of}/{self.at}/{self.tries}/{int(self.is_over)}"

    @classmethod
    def read(cls, live: Json | None) -> HeldGroups | None:
        """Parse the annotation."""
        text = ((live or {}).get("metadata") or {}).get("annotations", {}).get(HELD, "")
        parts = text.split("/")
        if len(parts) != 5 or not all(part.isdigit() for part in parts):
            return None
        count, of, at, tries, is_over = map(int, parts)
        return cls(count, of, at, tries, bool(is_over))

    @property
    def due(self) -> float:
        """The time at which they are tried again."""
        return self.at + _RETRIES.delay(self.tries)


def num_held(live: Json | None) -> int:
    """Groups of a LeaderWorkerSet that are not to run."""
    held = HeldGroups.read(live)
    return held.count if held and not held.is_over else 0


@dataclass(frozen=True)
class GroupSchedule:
    """`held`: for the annotation. `problem`: of groups that do not run, or are partly placed for too long."""

    held: HeldGroups | None = None
    problem: Problem | None = None
    requeue_after: float | None = None
    evicted: Json | None = None  # leader of a group that is to be made anew

    @property
    def num_held(self) -> int:
        """Groups that are not to run."""
        return self.held.count if self.held and not self.held.is_over else 0


@dataclass(frozen=True)
class OtherGroups:
    """Groups of other LLMDeployments: since when each partly placed one is so, and when one was last given up."""

    since: tuple[float, ...] = ()
    given_up_at: float = 0.0


def partly_placed_since(group: Group, size: int) -> float | None:
    """Return since when some pods of a group are scheduled while others find no node; None if that is not so."""
    scheduled = {pod["metadata"]["name"]: _scheduled(pod) for pod in group.pods}
    waiting = [one for one in scheduled.values() if one.get("status") == "False"]
    placed = [one for one in scheduled.values() if one.get("status") == "True"]
    if not placed or not waiting or len(placed) >= size:
        return None
    return max(min(map(_since, waiting)), min(map(_since, placed)))


def schedule_groups(
    deployment: LLMDeployment,
    live: Json | None,
    groups: Iterable[Group],
    other_groups: Callable[[], OtherGroups],
    now: float,
) -> GroupSchedule:
    """Decide which groups of the LeaderWorkerSet `live` run, are held back, or are evicted."""
    if live is None or live.get("kind") != KIND:
        return GroupSchedule()
    wanted, size = deployment.replicas, deployment.spec.parallelism.nodes
    held = HeldGroups.read(live)
    if held and held.of != wanted:
        held = None  # another number is asked for: it is tried at once
    schedule = GroupSchedule(held)
    running = [one for one in groups if one.index < wanted - schedule.num_held]
    since = {one.index: begin for one in running if (begin := partly_placed_since(one, size)) is not None}
    if since:
        return _wait_or_give_up(deployment, running, since, held, other_groups, now)
    if held and not held.is_over:
        if now < held.due:
            return GroupSchedule(held, _given_up(held), held.due - now)
        return GroupSchedule(dataclasses.replace(held, is_over=True))
    all_placed = len(running) == wanted and all(_is_placed(one, size) for one in running)
    return GroupSchedule(None if all_placed else held)


def _wait_or_give_up(
    deployment: LLMDeployment,
    running: list[Group],
    since: dict[int, float],
    held: HeldGroups | None,
    other_groups: Callable[[], OtherGroups],
    now: float,
) -> GroupSchedule:
    """`since`: of groups that are partly placed, by index."""
    schedule = GroupSchedule(held)
    given_up = _given_up(held) if held and schedule.num_held else None
    begin = max(since.values())
    due = begin + _patience(deployment)
    if now < due:
        return GroupSchedule(held, given_up, due - now)
    problem = _partly_placed(running, since, deployment.spec.parallelism.nodes)
    others = other_groups()
    due = max((held.at if held and not held.is_over else 0.0), others.given_up_at) + TURN_SECONDS
    if any(other > begin for other in others.since):
        due = max(due, now + _LOOK_SECONDS)  # a younger one goes first
    if now < due:
        return GroupSchedule(held, problem, due - now)
    last = max(one.index for one in running)
    if last not in since:
        youngest = next(one for one in running if since.get(one.index) == begin)
        return GroupSchedule(held, problem, TURN_SECONDS, youngest.leader)
    tries = 1 if held is None else held.tries + held.is_over
    new = HeldGroups(deployment.replicas - last, deployment.replicas, int(now), tries)
    return GroupSchedule(new, _given_up(new), new.due - now)


def _patience(deployment: LLMDeployment) -> float:
    """Return the seconds after which a group is given up: its pods have ended after surgePatienceSeconds then."""
    stopping = deployment.spec.lifecycle.pre_stop_seconds + _STOP_SECONDS
    return max(deployment.spec.rollout.surge_patience_seconds - stopping, _LEAST_PATIENCE_SECONDS)


def _is_placed(group: Group, size: int) -> bool:
    return len(group.pods) == size and all(_scheduled(pod).get("status") == "True" for pod in group.pods)


def _scheduled(pod: Json) -> Json:
    found = (pod.get("status") or {}).get("conditions") or []
    condition: Json = next((one for one in found if one["type"] == "PodScheduled"), {})
    if condition.get("status") == "False" and condition.get("reason") != "Unschedulable":
        return {}  # it is gated, or was not looked at yet
    return {"lastTransitionTime": pod["metadata"]["creationTimestamp"], **condition}


def _since(condition: Json) -> float:
    return parse_time(condition["lastTransitionTime"])


def _given_up(held: HeldGroups) -> Problem:
    again = datetime.fromtimestamp(held.due, UTC).strftime("%H:%M:%S")
    return Problem(
        UNSCHEDULABLE,
        f"{held.count} of {held.of} groups could place only some of their pods and released them until {again} "
        "UTC; free resources, add nodes, or lower replicas or parallelism.nodes",
    )


def _partly_placed(groups: list[Group], since: dict[int, float], size: int) -> Problem:
    one = next(one for one in groups if one.index in since)
    placed = sum(_scheduled(pod).get("status") == "True" for pod in one.pods)
    waiting = next(pod for pod in one.pods if _scheduled(pod).get("status") == "False")
    return Problem(
        UNSCHEDULABLE,
        f"group {one.index}: {placed} of {size} pods have places; free resources, add nodes, or lower replicas or "
        f"parallelism.nodes. Scheduler: {_scheduled(waiting).get('message', '')[:300]}",
    )
