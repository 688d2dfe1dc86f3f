"""A new engine image reaches those that follow it in order, so many at a time, and nobody else."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.llmd import manifest, parsed
from support.worlds import world

from octavo_operator.api import API_VERSION, KIND, LLMDeployment
from octavo_operator.config import OperatorConfig
from octavo_operator.defaults import Defaults
from octavo_operator.deployment.image_rollout import ImageRollout, Member, members_before
from octavo_operator.deployment.reconcile import Outcome, reconcile
from octavo_operator.kube.store import Observed, Store
from octavo_operator.writes.plan import Apply

Json = dict[str, Any]

OLD = OperatorConfig(engine_image="engine:1")
NEW = dataclasses.replace(OLD, engine_image="engine:2")


@given(st.lists(st.tuples(st.integers(-1, 1), st.integers(0, 2)), min_size=1, max_size=8), st.integers(1, 3), st.data())
def test_all_take_it_in_order_and_never_more_than_so_many_at_a_time(
    drawn: list[tuple[int, int]], limit: int, data: st.DataObject
) -> None:
    fleet = {
        f"m{index}": Member("n", f"m{index}", priority, f"2026-01-0{1 + day}", is_behind=True, is_complete=True)
        for index, (priority, day) in enumerate(drawn)
    }
    order = [one.name for one in sorted(fleet.values(), key=lambda one: one.order)]
    went: list[str] = []
    while any(one.is_behind or not one.is_complete for one in fleet.values()):
        moves = [one.name for one in fleet.values() if not one.is_complete]
        moves += [
            one.name for one in fleet.values() if one.is_behind and not members_before(one, fleet.values(), limit)
        ]
        assert moves, "nobody may go, though not all have it"
        name = data.draw(st.sampled_from(sorted(moves)))
        if fleet[name].is_behind:
            went.append(name)
            earlier = order[: order.index(name)]
            assert sum(fleet[other].is_behind or not fleet[other].is_complete for other in earlier) < limit
            fleet[name] = dataclasses.replace(fleet[name], is_behind=False, is_complete=False)
        else:
            fleet[name] = dataclasses.replace(fleet[name], is_complete=True)
        assert sum(not one.is_complete for one in fleet.values()) <= limit
    assert sorted(went) == sorted(order)
    if limit == 1:
        assert went == order


def test_a_broken_image_stops_at_the_first_and_one_that_cannot_take_it_stops_nobody() -> None:
    broken = Member("n", "a", 0, "1", is_behind=False, is_complete=False)
    stuck = Member("n", "b", 0, "2", is_behind=True, is_complete=True, is_stuck=True)
    waits = Member("n", "c", 0, "3", is_behind=True, is_complete=True)
    assert members_before(waits, [broken, stuck, waits], 1) == [broken]
    assert members_before(waits, [stuck, waits], 1) == []


class Fleet:
    """LLMDeployments whose Deployments are what was applied last, looked at as the controller does."""

    def __init__(self, **specs: Json) -> None:
        self.store, self.now, self.version = Store(), 0.0, 0
        for index, (name, spec) in enumerate(specs.items()):
            self.write(name, spec, f"2026-01-01T00:00:0{index}Z")

    def write(self, name: str, spec: Json, created: str, generation: int = 1) -> None:
        body = manifest(name, **spec)
        labels = {"octavo.dev/llmdeployment": name}
        body["metadata"] |= {"uid": f"uid-{name}", "generation": generation, "creationTimestamp": created}
        body["metadata"] |= {"resourceVersion": self.next_version(), "labels": labels}
        self.store.put(Observed.of(KIND, API_VERSION, body))

    def next_version(self) -> str:
        self.version += 1
        return str(self.version)

    def reconcile(self, name: str, config: OperatorConfig) -> Outcome:
        """Looks, and does what is to be done with the Deployment."""
        self.now += 10
        seen = self.store.get(KIND, "default", name)
        assert seen is not None
        deployment = LLMDeployment.from_json(seen.body)
        turn = ImageRollout(self.store, config, lambda: self.now).turn(deployment)
        children = self.store.children(("default", name))
        outcome = reconcile(deployment, world(children, now=self.now, image_turn=turn), config)
        for action in outcome.plan.actions:
            if isinstance(action, Apply) and action.manifest["kind"] == "Deployment":
                self.put_deployment(action.manifest, ready=False)
        return outcome

    def put_deployment(self, body: Json, ready: bool) -> None:
        meta = {**body["metadata"], "uid": f"d-{body['metadata']['name']}", "resourceVersion": self.next_version()}
        counts = ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas")
        status = {"observedGeneration": 1, **dict.fromkeys(counts, 1)} if ready else {}
        body = {**body, "metadata": {**meta, "generation": 1}, "status": status}
        self.store.put(Observed.of("Deployment", "apps/v1", body))

    def become_ready(self, name: str) -> None:
        live = self.store.get("Deployment", "default", name)
        assert live is not None
        self.put_deployment(live.body, ready=True)

    def image(self, name: str) -> str:
        live = self.store.get("Deployment", "default", name)
        assert live is not None
        return str(live.body["spec"]["template"]["spec"]["containers"][0]["image"])


def up_to_date(outcome: Outcome) -> tuple[str, str, str]:
    assert outcome.status
    found = next(one for one in outcome.status["conditions"] if one["type"] == "ImageUpToDate")
    return found["status"], found["reason"], found["message"]


def test_a_new_image_of_the_operator_reaches_followers_one_after_the_other() -> None:
    follow = {"engine": {"imagePolicy": "Follow"}}
    canary = {"engine": {"imagePolicy": "Follow", "imagePriority": 5}}
    fleet = Fleet(first=follow, second=follow, canary=canary, pinned={}, own={"engine": {"image": "mine:1"}})
    names = ("first", "second", "canary", "pinned", "own")
    for name in names:
        fleet.reconcile(name, OLD)
        fleet.become_ready(name)
    for _ in range(2):
        outcomes = {name: fleet.reconcile(name, NEW) for name in names}
    assert [fleet.image(name) for name in names] == ["engine:1", "engine:1", "engine:2", "engine:1", "mine:1"]
    assert up_to_date(outcomes["second"])[:2] == ("False", "RolloutQueued")
    assert "default/canary, default/first" in up_to_date(outcomes["second"])[2]
    assert outcomes["first"].requeue_after, "nothing tells it that the canary is ready"
    fleet.become_ready("canary")
    for name in names:
        fleet.reconcile(name, NEW)
    assert [fleet.image(name) for name in names[:2]] == ["engine:2", "engine:1"]
    fleet.become_ready("first")
    fleet.reconcile("second", NEW)
    fleet.become_ready("second")
    outcomes = {name: fleet.reconcile(name, NEW) for name in names}
    assert [fleet.image(name) for name in names] == ["engine:2", "engine:2", "engine:2", "engine:1", "mine:1"]
    assert up_to_date(outcomes["second"])[:2] == ("True", "UpToDate")
    assert not [
        action
        for outcome in outcomes.values()
        for action in outcome.plan.actions
        if isinstance(action, Apply) and action.exists
    ]


def test_models_that_are_down_anyway_keep_nobody_from_a_new_image() -> None:
    """Some user's mistake must not stop the fleet, as an image that breaks models has to."""
    follow = {"engine": {"imagePolicy": "Follow"}}
    canary = {"engine": {"imagePolicy": "Follow", "imagePriority": 5}}
    fleet = Fleet(broken=canary, first=follow, second=follow)
    for name in ("broken", "first", "second"):
        fleet.reconcile(name, OLD)
    fleet.become_ready("first")
    fleet.become_ready("second")
    fleet.write("new", follow, "2026-02-01T00:00:00Z")
    for name in ("new", "broken", "first", "second"):
        fleet.reconcile(name, NEW)
    assert [fleet.image(name) for name in ("new", "broken", "first", "second")] == [
        "engine:2",
        "engine:1",
        "engine:2",
        "engine:1",
    ]
    assert up_to_date(fleet.reconcile("second", NEW))[2].endswith("before this one: default/first")
    fleet.become_ready("first")
    fleet.reconcile("second", NEW)
    fleet.reconcile("broken", NEW)
    assert [fleet.image(name) for name in ("broken", "second")] == ["engine:1", "engine:2"]
    fleet.become_ready("second")
    fleet.reconcile("broken", NEW)
    assert fleet.image("broken") == "engine:2"


@pytest.mark.parametrize("limit", [1, 2])
def test_the_operators_policy_is_of_those_that_name_none(limit: int) -> None:
    fleet = Fleet(a={}, b={}, c={}, pinned={"engine": {"imagePolicy": "Pinned"}})
    for name in ("a", "b", "c", "pinned"):
        fleet.reconcile(name, OLD)
        fleet.become_ready(name)
    new = dataclasses.replace(NEW, image_policy="Follow", image_rollouts=limit)
    for name in ("c", "b", "a", "pinned"):
        fleet.reconcile(name, new)
    images = [fleet.image(name) for name in ("a", "b", "c", "pinned")]
    assert images == ["engine:2", *(["engine:2"] if limit == 2 else ["engine:1"]), "engine:1", "engine:1"]


def test_choosing_to_follow_replaces_no_pod_by_itself() -> None:
    fleet = Fleet(a={})
    fleet.reconcile("a", OLD)
    fleet.become_ready("a")
    fleet.write("a", {"engine": {"imagePolicy": "Follow", "imagePriority": 3}}, "2026-01-01T00:00:00Z", generation=2)
    outcome = fleet.reconcile("a", OLD)
    assert not [one for one in outcome.plan.actions if isinstance(one, Apply) and one.manifest["kind"] == "Deployment"]


def test_an_operator_of_another_version_writes_no_deployment() -> None:
    """Of those that were made by a version which recorded less, too."""
    fleet = Fleet(a={})
    fleet.reconcile("a", OLD)
    live = fleet.store.get("Deployment", "default", "a")
    assert live is not None
    body = live.body
    annotations = body["metadata"]["annotations"]
    record = json.loads(annotations["octavo.dev/pod-template"])
    assert {"uid", "generation", "image"} <= record.keys()
    assert record["image"] == "engine:1"
    outcome = fleet.reconcile("a", NEW)
    assert not [one for one in outcome.plan.actions if isinstance(one, Apply) and one.manifest["kind"] == "Deployment"]
    assert parsed().spec.engine.image_policy is None


def test_an_image_of_the_defaults_reaches_those_with_its_accelerator() -> None:
    follow = {"engine": {"imagePolicy": "Follow"}}
    fleet = Fleet(cpu=follow, gpu={**follow, "accelerator": {}})
    for name in ("cpu", "gpu"):
        fleet.reconcile(name, OLD)
        fleet.become_ready(name)
    newer = dataclasses.replace(OLD, defaults=Defaults.parse('{"images": {"nvidia.com/gpu": "gpu:2"}}'))
    for name in ("cpu", "gpu", "gpu"):
        fleet.reconcile(name, newer)
    assert [fleet.image(name) for name in ("cpu", "gpu")] == ["engine:1", "gpu:2"]
