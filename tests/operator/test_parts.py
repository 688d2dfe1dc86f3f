"""The small pure parts: work queue, leadership, ownership of fields, rollouts, status, configuration."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.llmd import parsed

from octavo_operator.autoscaling.condition import Scaling, autoscaler_ready
from octavo_operator.config import ConfigError, OperatorConfig
from octavo_operator.diff import quantity
from octavo_operator.kube.client import ApiError
from octavo_operator.kube.field_ownership import foreign_additions, is_allowed
from octavo_operator.kube.lease import may_acquire
from octavo_operator.kube.rejected_writes import RejectedWrites
from octavo_operator.kube.store import Observed, Store
from octavo_operator.kube.watch_health import WatchHealth
from octavo_operator.kube.workqueue import WorkQueue
from octavo_operator.rejections import NameConflictError, is_transient, rejection
from octavo_operator.rollout import MAKE_ROOM, Room, make_room
from octavo_operator.status import Observation, events, expected_status

# Work queue.


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=40))
def test_a_key_is_never_worked_on_twice_at_a_time_and_no_change_is_lost(steps: list[tuple[int, bool]]) -> None:
    async def run() -> None:
        queue: WorkQueue[int] = WorkQueue()
        version = dict.fromkeys(range(4), 0)
        seen = dict.fromkeys(range(4), 0)
        busy: set[int] = set()

        async def work() -> None:
            while True:
                key = await queue.get()
                assert key not in busy
                busy.add(key)
                seen[key] = version[key]
                await asyncio.sleep(0)
                busy.discard(key)
                queue.done(key)

        workers = [asyncio.create_task(work()) for _ in range(3)]
        for key, pause in steps:
            version[key] += 1
            queue.add(key)
            if pause:
                await asyncio.sleep(0)
        while len(queue):
            await asyncio.sleep(0)
        assert seen == version
        assert not any(worker.done() for worker in workers)
        for worker in workers:
            worker.cancel()

    asyncio.run(run())


def test_failures_wait_longer_and_longer_and_success_forgets_them() -> None:
    async def run() -> None:
        queue: WorkQueue[str] = WorkQueue(base_delay=1, max_delay=10)
        assert [queue.retry("a") for _ in range(6)] == [1, 2, 4, 8, 10, 10]
        queue.succeeded("a")
        assert queue.retry("a") == 1
        queue.add("a")  # a change is looked at now, whatever failed before
        assert await asyncio.wait_for(queue.get(), 0.1) == "a"

    asyncio.run(run())


def test_the_earliest_of_several_appointments_counts() -> None:
    async def run() -> None:
        queue: WorkQueue[str] = WorkQueue()
        queue.add_after("a", 0.01)
        queue.add_after("a", 60)
        assert await asyncio.wait_for(queue.get(), 1) == "a"

    asyncio.run(run())


def test_what_was_refused_is_asked_for_later_and_later_unless_it_has_changed() -> None:
    now = 0.0
    rejected = RejectedWrites(lambda: now, base_delay=1, max_delay=4)
    key, place = ("n", "toy"), ("Service", "toy")

    def ask(what: str = "a") -> bool:
        """True: the API server was asked, and refused."""
        try:
            rejected.check(key, place, what)
        except PermissionError:
            return False
        rejected.record(key, place, what, PermissionError())
        return True

    asked = []
    for now in range(20):
        if ask():
            asked.append(now)
    assert asked == [0, 1, 3, 7, 11, 15, 19]
    assert rejected.retry_after(key) == 4
    assert ask("b"), "a changed object is another question"
    assert rejected.retry_after(key) == 1
    rejected.forget(key, place)
    assert rejected.retry_after(key) is None


def test_what_may_pass_is_told_after_a_moment_and_asked_for_every_half_minute() -> None:
    now = 0.0
    rejected = RejectedWrites(lambda: now)
    key, place = ("n", "toy"), ("Deployment", "toy")
    told, asked = [], []
    for step in range(1800):
        now = step / 10
        try:
            rejected.check(key, place, f"spec {step // 50}")  # the user changes it meanwhile
        except TimeoutError:
            continue
        asked.append(now)
        rejected.record(key, place, f"spec {step // 50}", TimeoutError(), final=False)
        if rejected.error_to_report(key):
            told.append(now)
    assert 3 <= told[0] < 10, "a condition within ten seconds, and none for a hiccup"
    assert max(after - before for before, after in itertools.pairwise(asked)) <= 30
    now += 100
    rejected.record(key, ("Service", "toy"), "x", PermissionError())
    assert isinstance(rejected.error_to_report(key), PermissionError), "what users can mend comes first"
    rejected.retain(key, {place})
    assert isinstance(rejected.error_to_report(key), TimeoutError), "what is wanted no more is not told"
    rejected.retain(key, set())
    assert rejected.error_to_report(key) is None
    assert rejected.retry_after(key) is None


def test_a_passing_refusal_is_asked_for_at_most_half_a_minute_later() -> None:
    now, asked = 0.0, []
    rejected = RejectedWrites(lambda: now)
    for step in range(3000):
        now = step / 10
        try:
            rejected.check(("n", "toy"), ("Service", "toy"), "same")
        except TimeoutError:
            continue
        asked.append(now)
        rejected.record(("n", "toy"), ("Service", "toy"), "same", TimeoutError(), final=False)
    assert 25 < max(after - before for before, after in itertools.pairwise(asked)) <= 30.2
    assert len(asked) < 20


# Leadership.


@pytest.mark.parametrize(
    ("holder", "unchanged", "free"),
    [("", 0, True), (None, 0, True), ("me", 0, True), ("other", 14, False), ("other", 16, True)],
)
def test_a_lease_is_taken_only_when_nobody_renews_it(holder: str | None, unchanged: float, free: bool) -> None:
    lease = {"spec": {"holderIdentity": holder, "leaseDurationSeconds": 15}}
    assert may_acquire(lease, "me", unchanged) is free


# Ownership.


def owned(manager: str, fields: dict[str, Any], operation: str = "Update", subresource: str = "") -> dict[str, Any]:
    return {"manager": manager, "operation": operation, "subresource": subresource, "fieldsV1": {"f:spec": fields}}


def test_what_others_added_is_found_and_what_they_may_touch_is_not() -> None:
    engine = 'k:{"name":"engine"}'
    live = {
        "metadata": {
            "managedFields": [
                owned("us", {"f:replicas": {}, "f:list": {engine: {".": {}, "f:name": {}, "f:image": {}}}}, "Apply"),
                owned("hpa", {"f:replicas": {}}, subresource="scale"),
                owned("edit", {"f:paused": {}, "f:list": {engine: {"f:tty": {}}, 'k:{"name":"more"}': {".": {}}}}),
                owned("restart", {"f:template": {"f:metadata": {"f:annotations": {"f:restartedAt": {}}}}}),
                owned("us", {"f:schedulerName": {}, "f:list": {'k:{"name":"left"}': {".": {}, "f:name": {}}}}),
                owned("gone", {"f:vanished": {}}),
            ]
        },
        "spec": {
            "replicas": 1, "paused": True, "schedulerName": "x",
            "list": [{"name": "engine", "image": "i", "tty": True}, {"name": "more"}, {"name": "left"}],
            "template": {"metadata": {"annotations": {"restartedAt": "now"}}},
        },
    }  # fmt: skip
    assert foreign_additions(live, "us") == ["/spec/paused", "/spec/list/2", "/spec/list/1", "/spec/list/0/tty"]


ENV = "/spec/template/spec/containers/engine/env"


@pytest.mark.parametrize(
    ("pointer", "path", "alone"),
    [
        ("/spec/loadBalancerIP", "/spec/loadBalancerIP", True),
        ("/spec/loadBalancerIP", "/spec/loadBalancer", False),
        ("/spec/loadBalancerIP", "/spec/load*", True),
        ("/spec/template/spec/containers/0/env/1", f"{ENV}/STAKATER_*", True),
        ("/spec/template/spec/containers/0/env/1", f"{ENV}", True),
        ("/spec/template/spec/containers/0/env/1", "/spec/template/spec/containers/*/env/STAKATER_KEYS", True),
        ("/spec/template/spec/containers/0/env/1", "/spec/template/spec/containers/0/env/1", True),
        ("/spec/template/spec/containers/0/env/0", f"{ENV}/STAKATER_*", False),
        ("/spec/template/spec/containers/0/env", f"{ENV}/STAKATER_*", False),
        ("/spec/template/spec/nodeSelector/a.b~1c", "/spec/template/spec/nodeSelector/a.b~1c", True),
    ],
)
def test_what_others_add_on_purpose_is_found_by_its_path(pointer: str, path: str, alone: bool) -> None:
    env = [{"name": "HOME"}, {"name": "STAKATER_KEYS"}]
    pod = {"containers": [{"name": "engine", "env": env}], "nodeSelector": {"a.b/c": "x"}}
    live = {"spec": {"loadBalancerIP": "10.0.0.9", "template": {"spec": pod}}}
    assert is_allowed(pointer, live, ["/spec/other", path]) is alone


@given(st.integers(0, 10**6), st.sampled_from(["Ki", "Mi", "Gi"]))
def test_quantities_are_numbers(number: int, suffix: str) -> None:
    factor = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}[suffix]
    assert quantity(f"{number}{suffix}") == number * factor == quantity(number * factor)
    assert quantity(f"{number}m") * 1000 == number


# The store.


def observed(name: str, version: int, uid: str = "u", kind: str = "Pod") -> Observed:
    meta = {"name": name, "namespace": "n", "uid": uid, "resourceVersion": str(version)}
    return Observed.of(kind, "v1", {"metadata": {**meta, "labels": {"octavo.dev/llmdeployment": "toy"}}})


def test_old_news_changes_nothing() -> None:
    store = Store()
    assert store.put(observed("a", 5)) == ("n", "toy")
    assert store.put(observed("a", 4)) is None
    assert store.put(observed("a", 5)) is None
    assert store.put(observed("a", 9, uid="another")) == ("n", "toy"), "a new object of the same name"
    assert store.delete("Pod", "n", "a", "u", "8") is None, "the old one's end"
    assert len(store.children(("n", "toy"))) == 1


def test_an_answer_that_arrives_after_the_objects_end_does_not_bring_it_back() -> None:
    store = Store()
    store.put(observed("a", 5))
    assert store.delete("Pod", "n", "a", "u", "8") == ("n", "toy")
    assert store.put(observed("a", 7)) is None, "the answer to a write of ours, overtaken by the watch"
    assert store.put(observed("a", 9, uid="another")) == ("n", "toy")


def raw(name: str, version: int, uid: str = "u") -> dict[str, Any]:
    return observed(name, version, uid).body


def test_a_listing_finds_what_a_watch_has_missed_but_does_not_undo_what_it_told_meanwhile() -> None:
    store = Store()
    store.put(observed("gone", 1))
    store.put(observed("kept", 2))
    store.put(observed("replaced", 3, "old"))
    listing = store.listing("Pod")
    store.put(observed("new", 9))
    store.put(observed("replaced", 9, "new"))
    listing.add("v1", raw("kept", 2))
    listing.add("v1", raw("replaced", 3, "old") | {"spec": {}})
    store.delete("Pod", "n", "late", "late", "5")
    listing.add("v1", raw("late", 4, "late"))
    assert listing.finish() == {("n", "toy")}
    found = [(one.name, one.uid) for one in store.children(("n", "toy"))]
    assert found == [("kept", "u"), ("new", "u"), ("replaced", "new")], "nothing comes back, nothing new is lost"


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["changed", "ended"])), max_size=12),
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["changed", "ended"])), max_size=6),
    st.integers(1, 8),
)
def test_after_etcd_was_restored_from_a_backup_a_listing_is_what_there_is(
    before: list[tuple[int, str]], after: list[tuple[int, str]], lost: int
) -> None:
    """Versions go back then: what was told before the restore must hide neither what is listed nor what comes."""
    store, version, uid = Store(), 100, 0
    there: dict[int, tuple[int, str]] = {}
    backup: dict[int, tuple[int, str]] = {}
    for number, (name, what) in enumerate(before):
        version += 1
        if what == "ended":
            if name in there:
                store.delete("Pod", "n", str(name), there.pop(name)[1], str(version))
        else:
            uid += name not in there
            there[name] = (version, there[name][1] if name in there else f"u{uid}")
            store.put(observed(str(name), *there[name]))
        if number == len(before) - lost:
            backup, restored = dict(there), version
    if len(before) < lost:
        backup, restored = {}, 100
    listing = store.listing("Pod", "n")
    for name, (known, one) in backup.items():
        listing.add("v1", raw(str(name), known, one))
    listing.finish(str(restored))
    there, version = backup, restored
    for name, what in after:  # as watches tell it
        version += 1
        if what == "ended":
            if name in there:
                assert store.delete("Pod", "n", str(name), there.pop(name)[1], str(version))
        else:
            uid += name not in there
            there[name] = (version, there[name][1] if name in there else f"u{uid}")
            assert store.put(observed(str(name), *there[name]))
    found = {int(one.name): (int(one.resource_version), one.uid) for one in store.children(("n", "toy"))}
    assert found == there


def test_a_listing_that_breaks_off_changes_nothing_more() -> None:
    store = Store()
    store.put(observed("kept", 2))
    store.listing("Pod").add("v1", raw("kept", 2))
    assert len(store) == 1
    assert store.listing("Pod").finish() == {("n", "toy")}
    assert len(store) == 0


# Rollouts.


def pod(name: str, revision: str, created: str, waiting: str | None = None, ready: bool = True) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": str(ready and not waiting)}]
    if waiting:
        conditions += [
            {
                "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": waiting,
                "lastTransitionTime": created,
            }
        ]  # fmt: skip
    labels = {"pod-template-hash": revision}
    return {
        "metadata": {"name": name, "creationTimestamp": created, "labels": labels},
        "status": {"conditions": conditions},
    }


def live(wanted: int, available: int, updated: int = 1, **more: Any) -> dict[str, Any]:
    """A Deployment in its third rollout."""
    annotations = {"deployment.kubernetes.io/revision": "3", **more.pop("annotations", {})}
    status = {"observedGeneration": 2, "availableReplicas": available, "updatedReplicas": updated, **more}
    return {"metadata": {"annotations": annotations, "generation": 2}, "spec": {"replicas": wanted}, "status": status}


OLD = pod("old", "a", "2026-01-01T00:00:00Z")
FULL = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
START = "2026-01-01T00:01:00Z"
T0 = 1767225660.0  # of that
ONE = Room("3", 1)


@pytest.mark.parametrize(
    ("new", "now", "decided", "again"),
    [
        (pod("new", "b", START), T0, None, None),
        (pod("new", "b", START, FULL), T0 + 10, None, 50.0),
        (pod("new", "b", START, FULL), T0 + 60, ONE, None),
        (pod("new", "b", START, "1 node(s) didn't match node selector"), T0 + 600, None, None),
        (pod("more", "a", START, FULL), T0 + 600, None, None),
    ],
    ids=["scheduled", "patient", "out-of-patience", "would-not-help", "scale-up"],
)
def test_old_pods_make_room_only_for_new_ones_that_lack_it(
    new: dict[str, Any], now: float, decided: Room | None, again: float | None
) -> None:
    assert make_room(parsed(), live(1, 1), [OLD, new], now) == (decided, again)


@pytest.mark.parametrize("created", ["2026-01-01T00:00:00Z", START], ids=["within-a-second", "an-old-one-made-anew"])
def test_a_new_pod_is_known_by_the_template(created: str) -> None:
    def of(version: str, one: dict[str, Any]) -> dict[str, Any]:
        container = {"name": "engine", "image": "i", "env": [{"name": "VERSION", "value": version}]}
        return {**one, "spec": {"containers": [container, {"name": "injected"}]}}

    old = of("1", pod("old", "z", created))
    new = of("2", pod("new", "b", "2026-01-01T00:00:00Z", FULL))
    deployment = live(1, 1)
    deployment["spec"]["template"] = {"spec": {"containers": new["spec"]["containers"][:1]}}
    for pods in ([old, new], [new, old]):
        assert make_room(parsed(), deployment, pods, T0 + 60) == (ONE, None)


def test_a_decision_holds_until_its_rollout_is_complete() -> None:
    new = pod("new", "b", START)
    decided = {MAKE_ROOM: str(ONE)}
    assert make_room(parsed(), live(1, 0, annotations=decided), [new], T0) == (ONE, None)
    assert make_room(parsed(), live(1, 1, annotations=decided, replicas=1), [new], T0) == (None, None)
    another = {MAKE_ROOM: "2/1"}
    assert make_room(parsed(), live(1, 0, annotations=another), [new], T0) == (None, None)


def test_with_fewer_gpus_than_replicas_more_are_allowed_to_be_missing() -> None:
    """Or the replica that never had a place would be the one that may be missing, for ever."""
    pods = [pod(f"old{n}", "a", "2026-01-01T00:00:00Z") for n in range(3)] + [pod("new", "b", START, FULL)]
    assert make_room(parsed(), live(4, 3), pods, T0 + 60) == (Room("3", 2), None)
    progressing = {"type": "Progressing", "status": "True", "lastUpdateTime": "2026-01-01T00:02:00Z"}
    stands = live(4, 3, annotations={MAKE_ROOM: "3/1"}, conditions=[progressing])
    assert make_room(parsed(), stands, pods, T0 + 61) == (ONE, 59.0), "it has just come on"
    assert make_room(parsed(), stands, pods, T0 + 121) == (Room("3", 2), None)


def test_nothing_more_goes_while_something_is_leaving() -> None:
    leaving = pod("leaving", "a", "2026-01-01T00:00:00Z")
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:03:00Z"
    pods = [OLD, leaving, pod("new", "b", START, FULL)]
    assert make_room(parsed(), live(2, 1), pods, T0 + 100) == (None, 5.0)
    assert make_room(parsed(), live(2, 1), pods, T0 + 200)[0] == Room("3", 2), "it should have gone long ago"


def test_old_pods_that_do_not_serve_make_room_at_once_and_those_that_serve_stay() -> None:
    broken = pod("broken", "b", "2026-01-01T00:00:30Z", ready=False)
    pods = [OLD, broken, pod("reverted", "a2", START, FULL)]
    assert make_room(parsed(), live(2, 1), pods, T0 + 1) == (ONE, None)
    assert make_room(parsed(), live(2, 2), pods, T0 + 1)[0] is None, "none is missing: somebody would be taken"


def test_a_full_quota_is_no_room_either() -> None:
    refused = {
        "type": "ReplicaFailure", "status": "True", "message": "exceeded quota: gpus", "lastTransitionTime": START,
    }  # fmt: skip
    assert make_room(parsed(), live(1, 1, 0, conditions=[refused]), [OLD], T0 + 10) == (None, 50.0)
    stands = live(1, 1, 0, conditions=[refused])
    del stands["status"]["updatedReplicas"]  # as the API server leaves out zeros
    assert make_room(parsed(), stands, [OLD], T0 + 60) == (ONE, None)
    assert make_room(parsed(), live(2, 1, 1, conditions=[refused]), [OLD], T0 + 60) == (None, None), "a scale-up"


@given(
    st.integers(1, 6), st.integers(0, 6), st.integers(0, 6),
    st.lists(st.tuples(st.sampled_from("ab"), st.booleans(), st.booleans())),
)  # fmt: skip
def test_never_more_than_one_that_serves_is_taken(replicas: int, available: int, young: int, drawn: list[Any]) -> None:
    """`young`: ready, but not for minReadySeconds yet."""
    pods = [pod(f"p{n}", r, START, FULL if w else None, ready) for n, (r, w, ready) in enumerate(drawn)]
    available = min(available, replicas)
    ready = min(available + young, replicas)
    room, again = make_room(parsed(), live(replicas, available, readyReplicas=ready), pods, T0 + 1000)
    if room:
        assert again is None
        assert replicas - room.unavailable >= ready - 1


# Status.


def test_times_of_conditions_change_with_their_status_alone() -> None:
    deployment = parsed()
    first = expected_status(deployment, Observation(None, []), "cluster.local", 0.0)
    deployment.status.update(first)
    assert expected_status(deployment, Observation(None, []), "cluster.local", 100.0) == first
    assert events(first, first) == []


def test_what_a_replica_holds_is_said_as_long_as_it_is_scaled() -> None:
    deployment = parsed(autoscaling={"maxReplicas": 4})
    learnt = Observation(None, [], scaling=Scaling(capacity=8.2))
    assert "replicaCapacity" not in expected_status(deployment, Observation(None, []), "cluster.local", 0.0)
    deployment.status.update(expected_status(deployment, learnt, "cluster.local", 0.0))
    assert deployment.status["replicaCapacity"] == 8
    assert expected_status(deployment, Observation(None, []), "cluster.local", 0.0)["replicaCapacity"] == 8
    assert "replicaCapacity" not in expected_status(parsed(), learnt, "cluster.local", 0.0)


@pytest.mark.parametrize(("wanted", "least", "most", "pods"), [(9, 1, 2, 2), (1, 3, 4, 3), (3, 1, 4, 3), (0, 1, 2, 0)])
def test_pods_stay_within_the_limits_of_autoscaling(wanted: int, least: int, most: int, pods: int) -> None:
    """Whatever was written into replicas: an autoscaler would take them away again a moment later. 0 turns it off."""
    autoscaling = {"minReplicas": least, "maxReplicas": most}
    assert parsed(replicas=wanted, autoscaling=autoscaling).replicas == pods
    assert parsed(replicas=wanted, autoscaling=autoscaling, suspend=True).replicas == 0
    assert parsed(replicas=wanted).replicas == wanted


@pytest.mark.parametrize(
    ("needed", "reason"), [(None, "AtMaxReplicas"), (3, "AtMaxReplicas"), (2, "Scaling"), (0, "Scaling")]
)
def test_the_maximum_is_blamed_only_when_the_load_needs_more(needed: int | None, reason: str) -> None:
    """A HorizontalPodAutoscaler says TooManyReplicas of a number that was written by hand, too."""
    said = [
        {"type": "ScalingActive", "status": "True"},
        {"type": "ScalingLimited", "status": "True", "reason": "TooManyReplicas"},
    ]
    deployment = parsed(autoscaling={"maxReplicas": 2})
    verdict = autoscaler_ready(deployment, {"status": {"conditions": said}}, Scaling(needed=needed), frozenset())
    assert verdict is not None
    assert verdict[:2] == (True, reason)


@given(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3))
def test_ready_never_lies(replicas: int, updated: int, available: int) -> None:
    deployment = parsed(replicas=replicas)
    counts = {
        "observedGeneration": 1,
        "replicas": max(updated, available),
        "updatedReplicas": updated,
        "availableReplicas": available,
    }
    live = {"metadata": {"generation": 1}, "spec": {"replicas": replicas}, "status": counts}
    status = expected_status(deployment, Observation(live, []), "cluster.local", 0.0)
    found = {condition["type"]: condition["status"] == "True" for condition in status["conditions"]}
    assert found["Available"] is (available > 0)
    assert found["Ready"] is (0 < replicas == updated == available)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OCTAVO_WORKERS", "0"),
        ("OCTAVO_WORKERS", "many"),
        ("OCTAVO_LOG_LEVEL", "loud"),
        ("OCTAVO_LEASE_SECONDS", "1"),
        ("OCTAVO_IMAGE_POLICY", "Latest"),
        ("OCTAVO_IMAGE_ROLLOUTS", "0"),
        ("OCTAVO_ALLOW_PRIVILEGED_PODS", "si"),
    ],
)
def test_settings_that_make_no_sense_are_named(variable: str, value: str) -> None:
    with pytest.raises(ConfigError, match=variable):
        OperatorConfig.from_environment({variable: value})


def test_a_watch_that_is_silent_is_noticed() -> None:
    now = 0.0
    health = WatchHealth(lambda: now)
    begun: list[str] = []
    health.on_restart = begun.append
    health.expect(["/a", "/b"])
    assert health.not_started() == ["/a", "/b"]
    now = 100.0
    health.on_start("/a")
    assert (health.not_started(), health.silent_for(150)) == (["/b"], None)
    now = 160.0
    assert health.silent_for(150) == "/b", "it has never begun"
    health.expect(["/a"])
    assert health.silent_for(150) is None, "its kind is gone"
    now = 260.0
    assert health.silent_for(150) == "/a"
    health.record("/a")
    assert health.silent_for(150) is None
    assert begun == [], "what goes on where it was interrupted has missed nothing"


CLAIM = {"kind": "persistentvolumeclaims"}


@pytest.mark.parametrize(
    ("error", "reason", "words", "passes"),
    [
        (ApiError(500, {"message": 'Internal error: failed calling webhook "a.b.c": no endpoints'}),
         "WebhookUnavailable", "webhook a.b.c does not respond", True),
        (ApiError(429, {"message": "slow down"}), "TooManyRequests", "overloaded", True),
        (ApiError(409, {"message": "modified"}), "Conflict", "retries", True),
        (ApiError(500, {"message": "etcd"}), "APIServerError", "etcd", True),
        (ApiError(401, {"message": "Unauthorized"}), "APIServerError", "Unauthorized", True),
        (TimeoutError(), "APIServerUnreachable", "TimeoutError", True),
        (ApiError(403, {"details": CLAIM, "message": "only dynamically provisioned pvc can be resized and ..."}),
         "PVCCannotGrow", "allowVolumeExpansion", False),
        (ApiError(422, {"details": CLAIM, "message": "field can not be less than status.capacity"}),
         "PVCCannotShrink", "cannot shrink", False),
        (ApiError(400, {"message": 'admission webhook "x" denied the request: no'}), "Forbidden", "policy", False),
        (ApiError(422, {"message": "ValidatingAdmissionPolicy 'x' denied request: no"}), "Forbidden", "policy", False),
        (NameConflictError("Service toy"), "NameConflict", "Service toy", False),
    ],
)  # fmt: skip
def test_what_cannot_be_written_is_told_with_its_cause_and_way_out(
    error: Exception, reason: str, words: str, passes: bool
) -> None:
    assert is_transient(error) is passes
    assert rejection(error).reason == reason
    assert words in rejection(error).message


def test_refusals_have_their_reasons() -> None:
    quota = ApiError(403, {"message": "exceeded quota: x", "reason": "Forbidden"})
    assert rejection(quota).reason == "QuotaExceeded"
    assert rejection(ApiError(403, {"message": "no"})).reason == "Forbidden"
    assert rejection(ApiError(422, {"message": "bad"})).reason == "Refused"
    assert ApiError(409, {}).is_transient and ApiError(503, "down").is_transient and not ApiError(422, {}).is_transient
    assert not ApiError(500, {"message": "failed to create typed patch object (n/m; v1): unknown"}).is_transient
    wrong = "failed to convert new object (n/m; apps/v1, Kind=Deployment) to proper version: quantities must match"
    assert not ApiError(500, {"message": wrong}).is_transient
