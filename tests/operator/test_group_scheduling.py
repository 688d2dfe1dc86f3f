"""Groups of pods that find places for some of their pods only, in a cluster that gives pods places as it likes."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.llmd import parsed

from octavo_operator.groups.other_groups import read_other_groups
from octavo_operator.groups.scheduling import (
    HELD,
    TURN_SECONDS,
    UNSCHEDULABLE,
    GroupSchedule,
    HeldGroups,
    OtherGroups,
    partly_placed_since,
    schedule_groups,
)
from octavo_operator.kube.store import Observed, Store
from octavo_operator.observed.workload import Group, groups
from octavo_operator.render.workload import KIND

Json = dict[str, Any]
INDEX = "leaderworkerset.sigs.k8s.io/group-index"
PATIENCE, PRE_STOP = 60, 10
STEP = 3.0  # seconds, in which everybody has a turn


def stamp(now: float) -> str:
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def pod(index: int, number: int, now: float, placed_at: float | None, reason: str = "Unschedulable") -> Json:
    condition = {"type": "PodScheduled", "status": "True", "lastTransitionTime": stamp(placed_at or now)}
    if placed_at is None:
        condition |= {"status": "False", "reason": reason, "message": "0/1 nodes: Insufficient cpu"}
    return {
        "metadata": {"name": f"g-{index}-{number}", "labels": {INDEX: str(index)}, "creationTimestamp": stamp(now)},
        "status": {"conditions": [condition]},
    }


def half(index: int, since: float, reason: str = "Unschedulable") -> Group:
    (one,) = groups([pod(index, 0, since, since)], [pod(index, 1, since, None, reason)])
    return one


def whole(index: int) -> Group:
    (one,) = groups([pod(index, 0, 0.0, 1.0)], [pod(index, 1, 0.0, 1.0)])
    return one


def live_with(held: HeldGroups | None) -> Json:
    return {"kind": KIND, "metadata": {"annotations": {HELD: str(held)} if held else {}}}


def schedule(
    replicas: int,
    found: list[Group],
    now: float,
    held: HeldGroups | None = None,
    other_groups: OtherGroups = OtherGroups(),
) -> GroupSchedule:
    deployment = parsed(replicas=replicas, parallelism={"tensor": 2, "nodes": 2})
    return schedule_groups(deployment, live_with(held), found, lambda: other_groups, now)


def test_a_half_group_is_waited_for_then_given_up_and_tried_again_later() -> None:
    found = [whole(0), whole(1), half(2, 1000.0)]
    early = schedule(3, found, 1010.0)
    assert (early.num_held, early.problem) == (0, None)
    assert early.requeue_after and early.requeue_after <= PATIENCE
    late = schedule(3, found, 1000.0 + early.requeue_after + 10)
    assert late.num_held == 1 and late.held
    assert late.problem and late.problem.reason == UNSCHEDULABLE
    meanwhile = schedule(3, found[:2], late.held.at + 30, late.held)
    assert meanwhile.num_held == 1 and meanwhile.problem == late.problem, "no message that changes by the second"
    again = schedule(3, found[:2], late.held.due + 1, late.held)
    assert again.num_held == 0 and again.held
    failed = schedule(3, [whole(0), whole(1), half(2, 2000.0)], 2100.0, again.held)
    assert failed.held and failed.held.due - failed.held.at > late.held.due - late.held.at, "each time later"
    assert schedule(3, [whole(0), whole(1), whole(2)], 2100.0, again.held).held is None
    assert schedule(2, found[:2], late.held.at + 1, late.held).held is None, "another number is tried at once"


def test_a_group_of_which_nothing_is_placed_holds_nothing_and_may_wait() -> None:
    (nowhere,) = groups([pod(2, 0, 0.0, None)], [pod(2, 1, 0.0, None)])
    assert schedule(3, [whole(0), whole(1), nowhere], 10_000.0) == GroupSchedule()
    assert partly_placed_since(half(0, 5.0, "SchedulingGated"), 2) is None


def test_the_youngest_goes_first_and_the_others_then_get_their_turn() -> None:
    old, now = [half(0, 1000.0)], 1100.0
    assert schedule(1, old, now, other_groups=OtherGroups((1010.0,))).num_held == 0
    assert schedule(1, old, now, other_groups=OtherGroups((990.0,))).num_held == 1
    assert schedule(1, old, now, other_groups=OtherGroups((), now - 1)).num_held == 0
    assert schedule(1, old, now + TURN_SECONDS, other_groups=OtherGroups((), now - 1)).num_held == 1


def test_a_group_before_the_last_is_made_anew_and_ends_no_other() -> None:
    found = schedule(2, [half(0, 1000.0), whole(1)], 1100.0)
    assert found.num_held == 0
    assert found.evicted and found.evicted["metadata"]["name"] == "g-0-0"
    assert found.problem and found.problem.reason == UNSCHEDULABLE
    assert "group 0: 1 of 2 pods" in found.problem.message


def test_rivals_are_the_groups_of_others() -> None:
    store = Store()
    for name, held in (("a", None), ("b", HeldGroups(1, 2, 700, 1)), ("c", HeldGroups(1, 2, 900, 1, True))):
        labels = {"octavo.dev/llmdeployment": name}
        meta = {"name": f"{name}-group", "namespace": "n", "uid": name, "resourceVersion": "1", "labels": labels}
        body = {"metadata": {**meta, **live_with(held)["metadata"]}, "spec": {"leaderWorkerTemplate": {"size": 2}}}
        store.put(Observed.of(KIND, "leaderworkerset.x-k8s.io/v1", body))
        for number, placed in enumerate((1000.0, None)):
            one = pod(0, number, 1000.0, placed)
            component = {"app.kubernetes.io/component": ("engine", "worker")[number]}
            one["metadata"] |= {"name": f"{name}-{number}", "namespace": "n", "uid": f"{name}{number}"}
            one["metadata"] |= {"resourceVersion": "1", "labels": {**one["metadata"]["labels"], **labels, **component}}
            store.put(Observed.of("Pod", "v1", one))
    assert read_other_groups(store, ("n", "a")) == OtherGroups((1000.0, 1000.0), 700.0)
    assert read_other_groups(store, ("n", "b")) == OtherGroups((1000.0, 1000.0), 0.0), (
        "what is tried again is not given up"
    )


@dataclass
class Simulation:
    """Sets of groups that share places; the scheduler, the controller of groups and the operator take turns."""

    room: int
    sets: list[tuple[int, int]]  # groups, and pods of each
    rng: random.Random
    now: float = 1_000_000.0
    pods: dict[tuple[int, int, int], tuple[float, float | None]] = field(default_factory=dict)
    leaving: dict[tuple[int, int, int], float] = field(default_factory=dict)
    held: dict[int, HeldGroups | None] = field(default_factory=dict)
    half_since: dict[tuple[int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lifecycle = {"preStopSeconds": PRE_STOP}
        self.owners = [
            parsed(replicas=count, parallelism={"tensor": size, "nodes": size}, lifecycle=lifecycle)
            for count, size in self.sets
        ]

    def groups_of(self, which: int) -> list[Group]:
        made = [[], []]  # type: ignore[var-annotated]
        for (owner, index, number), (created, placed) in self.pods.items():
            if owner == which:
                made[number > 0].append(pod(index, number, created, placed))
        return groups(*made)

    def other_groups(self, which: int) -> OtherGroups:
        others = [one for one in range(len(self.sets)) if one != which]
        found = [partly_placed_since(one, self.sets[o][1]) for o in others for one in self.groups_of(o)]
        gave = [held.at for o in others if (held := self.held.get(o)) and not held.is_over]
        return OtherGroups(tuple(one for one in found if one is not None), max(gave, default=0.0))

    def step(self) -> None:
        self.now += STEP
        for key in [key for key, until in self.leaving.items() if until <= self.now]:
            del self.leaving[key]
            self.half_since.pop(key[:2], None)  # what it had is free for a moment
        for which, (count, size) in enumerate(self.sets):
            found = schedule_groups(
                self.owners[which],
                live_with(self.held.get(which)),
                self.groups_of(which),
                lambda which=which: self.other_groups(which),
                self.now,
            )
            self.held[which] = found.held
            wanted = {
                (which, index, number) for index in range(count - found.num_held) for number in range(size)
            } - self.leaving.keys()
            if found.evicted:
                index = int(found.evicted["metadata"]["labels"][INDEX])
                wanted -= {(which, index, number) for number in range(size)}
            for key in [key for key in self.pods if key[0] == which and key not in wanted]:
                if self.pods.pop(key)[1] is not None:
                    self.leaving[key] = self.now + PRE_STOP + 2
            for key in wanted - self.pods.keys():
                self.pods[key] = (self.now, None)
        waiting = sorted(key for key, (_, placed) in self.pods.items() if placed is None)
        self.rng.shuffle(waiting)
        taken = len(self.leaving) + sum(placed is not None for _, placed in self.pods.values())
        for key in waiting[: max(self.room - taken, 0)]:
            self.pods[key] = (self.pods[key][0], self.now)

    def complete(self) -> int:
        return sum(
            sum(self.pods.get((which, index, number), (0, None))[1] is not None for number in range(size)) == size
            for which, (count, size) in enumerate(self.sets)
            for index in range(count)
        )

    def longest_half(self) -> float:
        """Seconds for which a half group that no other one waits beside has held places."""
        for which, (count, size) in enumerate(self.sets):
            for index in range(count):
                keys = [(which, index, number) for number in range(size)]
                placed = sum(self.pods.get(key, (0, None))[1] is not None for key in keys)
                is_half = 0 < placed < size or bool(
                    self.leaving.keys() & set(keys) and (which, index) in self.half_since
                )
                if not is_half:
                    self.half_since.pop((which, index), None)
                else:
                    self.half_since.setdefault((which, index), self.now)
        return max((self.now - since for since in self.half_since.values()), default=0.0)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 9), st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(2, 3), st.integers())
def test_half_groups_never_block_each_other(room: int, counts: list[int], size: int, seed: int) -> None:
    """Whatever gets places first, in the end as many groups run as there is room for."""
    cluster = Simulation(room, [(count, size) for count in counts], random.Random(seed))
    most = min(sum(counts), room // size)
    for _ in range(400):
        cluster.step()
        if cluster.complete() == most:
            break
    assert cluster.complete() == most
    for _ in range(40):
        cluster.step()
        assert cluster.complete() == most, "and who runs goes on running"


@pytest.mark.parametrize("seed", range(2))
def test_no_half_group_keeps_its_places_for_longer_than_a_surge_is_waited_for(seed: int) -> None:
    cluster = Simulation(5, [(3, 2)], random.Random(seed))
    longest = 0.0
    for _ in range(150):
        cluster.step()
        longest = max(longest, cluster.longest_half())
    assert cluster.complete() == 2
    assert longest <= PATIENCE
