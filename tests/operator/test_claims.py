"""Two operators over the same LLMDeployments: one serves each of them, the other one says so and writes nothing."""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.llmd import manifest

from octavo_operator.api import KIND
from octavo_operator.autoscaling.load_reader import LoadReader
from octavo_operator.claims.claims import Claims, claimant, selects, serves
from octavo_operator.config import OperatorConfig
from octavo_operator.controller import Controller
from octavo_operator.kube.client import ApiError
from octavo_operator.kube.lease import scope_annotations
from octavo_operator.kube.store import Observed, Store

Json = dict[str, Any]
KEY = ("default", "toy")
A = OperatorConfig(namespace="a", identity="a-1")
B = OperatorConfig(namespace="b", identity="b-1")


class ApiServer:
    """Keeps objects, tells every operator of each change, and takes a write of an old version for a conflict."""

    def __init__(self) -> None:
        self.version = 100
        self.objects: dict[tuple[str, str], Json] = {}
        self.leases: dict[str, Json] = {}
        self.unreadable: set[str] = set()
        self.has_field = True
        self.watchers: list[Controller] = []
        self.writes: list[tuple[str, str]] = []
        self.events: list[tuple[str, str]] = []

    def put(self, kind: str, body: Json) -> Json:
        self.version += 1
        body = copy.deepcopy(body)
        body["metadata"] |= {"uid": kind, "resourceVersion": str(self.version)}
        body["metadata"].setdefault("generation", 1)
        self.objects[kind, body["metadata"]["name"]] = body
        for controller in self.watchers:
            controller.on_change(kind, copy.deepcopy(body))
        return copy.deepcopy(body)

    def renew(self, config: OperatorConfig) -> None:
        self.version += 1
        self.leases[config.operator_id] = {
            "metadata": {"resourceVersion": str(self.version), "annotations": scope_annotations(config)},
            "spec": {"holderIdentity": config.identity, "leaseDurationSeconds": 15},
        }


class Way:
    """One operator's way to it."""

    def __init__(self, server: ApiServer, who: str) -> None:
        self.server, self.who = server, who
        self.on_response: Any = None

    async def get(self, kind: str, namespace: str, name: str, timeout: float = 15) -> Json | None:
        await asyncio.sleep(0)
        if kind == "Lease":
            if namespace in self.server.unreadable:
                raise ApiError(403, {"message": "no"})
            return self.server.leases.get(f"{namespace}/{name}")
        return self.server.objects.get((kind, name))

    async def call(self, method: str, path: str, body: Json | None = None, **_: Any) -> Json:
        await asyncio.sleep(0)
        assert body is not None and path.endswith("/events")
        self.server.events.append((self.who, body["reason"]))
        return body

    async def apply(self, one: Json, manager: str, subresource: str | None = None) -> Json:
        await asyncio.sleep(0)
        kind, meta = one["kind"], one["metadata"]
        live = self.server.objects.get((kind, meta["name"]))
        if "operator" in one.get("status", {}) and not self.server.has_field:
            raise ApiError(
                500,
                {
                    "message": "failed to create typed patch object (default/toy; ...): "
                    ".status.operator: field not declared in schema"
                },
            )
        if live and meta.get("resourceVersion") not in (None, live["metadata"]["resourceVersion"]):
            raise ApiError(409, {"message": "the object has been modified"})
        self.server.writes.append((self.who, kind))
        if subresource:
            assert live is not None
            return self.server.put(kind, {**live, "status": one["status"]})
        return self.server.put(kind, one)


class Lease:
    is_held = True

    def __init__(self) -> None:
        self.leading = asyncio.Event()
        self.leading.set()


def operator(server: ApiServer, config: OperatorConfig) -> Controller:
    one = Controller(Way(server, config.namespace), config, Lease())  # type: ignore[arg-type]
    one.on_all_listed()
    server.watchers.append(one)
    server.renew(config)
    return one


async def settle(*controllers: Controller) -> None:
    """Everybody works until nobody has anything to do, or for ever."""
    tasks = [asyncio.create_task(one.run_worker()) for one in controllers]
    quiet = 0
    async with asyncio.timeout(30):
        while quiet < 50:
            await asyncio.sleep(0.001)
            quiet = 0 if any(len(one.queue) for one in controllers) else quiet + 1
    for task in tasks:
        task.cancel()


AUTOSCALED = manifest(autoscaling={"maxReplicas": 3})  # whose NetworkPolicy names the operator's namespace


def test_two_operators_do_not_fight() -> None:
    async def run() -> ApiServer:
        server = ApiServer()
        one, other = operator(server, A), operator(server, B)
        server.put(KIND, AUTOSCALED)
        await settle(one, other)
        return server

    server = asyncio.run(run())
    body = server.objects[KIND, "toy"]
    winner = claimant(body)
    assert winner in (A.operator_id, B.operator_id)
    who = str(winner)[0]
    loser = "b" if who == "a" else "a"
    assert {by for by, _ in server.writes} == {who}, "the other one writes nothing"
    assert len(server.writes) < 12, "and nothing is written over and over"
    assert (loser, "ManagedByAnotherOperator") in server.events
    policy = json.dumps(server.objects["NetworkPolicy", "toy"]["spec"])
    assert f'"kubernetes.io/metadata.name": "{who}"' in policy


def test_the_other_one_says_so_in_its_metrics_and_does_not_scale() -> None:
    async def run() -> Controller:
        server = ApiServer()
        one, other = operator(server, A), operator(server, B)
        server.put(KIND, AUTOSCALED)
        await settle(one)
        await settle(other)
        return other

    other = asyncio.run(run())
    assert b"octavo_operator_llmdeployments_of_others 1.0" in other.metrics.expose()
    assert b"octavo_llmdeployment_condition{" not in other.metrics.expose(), "nothing is counted twice"
    assert LoadReader(other.store, lambda _: None, operator=B.operator_id).scaled() == []
    assert len(LoadReader(other.store, lambda _: None, operator=A.operator_id).scaled()) == 1


@pytest.mark.parametrize("how", ["lease deleted", "lease unchanged for long", "other selector", "other namespaces"])
def test_a_void_claim_is_taken_over(how: str) -> None:
    async def run() -> ApiServer:
        server, now = ApiServer(), [1000.0]
        one, other = operator(server, A), operator(server, B)
        other.claims._clock = lambda: now[0]
        server.put(KIND, AUTOSCALED)
        await settle(one)
        server.watchers.remove(one)
        await settle(other)
        server.writes.clear()
        if how == "lease deleted":
            del server.leases[A.operator_id]
        elif how == "other selector":
            server.leases[A.operator_id]["metadata"] |= {"annotations": {"octavo.dev/selector": "team=x"}}
        elif how == "other namespaces":
            server.leases[A.operator_id]["metadata"] |= {"annotations": {"octavo.dev/watch-namespaces": "x,y"}}
        else:
            now[0] += 55
            other.queue.add(KEY)
            await settle(other)
            assert server.writes == [], "an operator that is being upgraded comes back"
        now[0] += 6
        other.queue.add(KEY)
        await settle(other)
        return server

    server = asyncio.run(run())
    assert claimant(server.objects[KIND, "toy"]) == B.operator_id
    assert ("b", "NetworkPolicy") in server.writes


def test_a_lease_that_may_not_be_read_counts_until_a_change_is_not_noticed() -> None:
    """An operator with rights in some namespaces only cannot know whether the other one lives."""
    body = copy.deepcopy(AUTOSCALED)
    body["metadata"] |= {"generation": 2, "uid": "u"}
    body["status"] = {"operator": A.operator_id, "observedGeneration": 2}

    async def run() -> list[bool]:
        server, now = ApiServer(), [0.0]
        server.unreadable = {"a"}
        claims = Claims(Way(server, "b"), B, lambda: now[0])  # type: ignore[arg-type]
        found = [await claims.is_valid(A.operator_id, body)]
        now[0] += 1000
        found.append(await claims.is_valid(A.operator_id, body))
        body["metadata"]["generation"] = 3
        found.append(await claims.is_valid(A.operator_id, body))
        now[0] += 61
        found.append(await claims.is_valid(A.operator_id, body))
        return found

    assert asyncio.run(run()) == [True, True, True, False]


def test_a_kind_of_an_earlier_version_is_served_all_the_same_and_claimed_once_it_is_upgraded() -> None:
    async def run() -> None:
        server, now = ApiServer(), [1000.0]
        server.has_field = False
        one, other = operator(server, A), operator(server, B)
        one.claims._clock = lambda: now[0]
        server.put(KIND, AUTOSCALED)
        await settle(one)
        assert ("a", "Deployment") in server.writes
        body = server.objects[KIND, "toy"]
        assert body["status"]["conditions"] and claimant(body) is None
        server.has_field = True
        now[0] += 61
        await settle(other)
        assert claimant(server.objects[KIND, "toy"]) == B.operator_id
        server.writes.clear()
        await settle(one, other)
        assert {by for by, _ in server.writes} <= {"b"}, "an operator that was there before the field heeds it, too"

    asyncio.run(run())


def test_claims_are_known_after_a_restart_without_a_write() -> None:
    async def run() -> list[tuple[str, str]]:
        server = ApiServer()
        await settle(operator(server, A))
        server.put(KIND, AUTOSCALED)
        await settle(server.watchers[0])
        server.watchers.clear()
        server.writes.clear()
        again = operator(server, A)
        for (kind, _), body in server.objects.items():
            again.store.put(Observed.of(kind, body.get("apiVersion", ""), body))
        again.queue.add(KEY)
        await settle(again)
        return server.writes

    assert asyncio.run(run()) == []


LABELS = {"team": "a", "tier": "gold"}


@pytest.mark.parametrize(
    ("selector", "found"),
    [
        ("", True),
        ("team=a", True),
        ("team==b", False),
        ("team!=b", True),
        ("none!=b", True),
        ("team", True),
        ("none", False),
        ("!none", True),
        ("! team", False),
        ("team in (a, b),tier=gold", True),
        ("team in (c)", False),
        ("team notin (a,b)", False),
        ("none notin (a)", True),
        ("team in (a,b),tier notin (gold)", False),
        ("example.com/x=", False),
        ("what is this?", True),
    ],
)
def test_label_selectors(selector: str, found: bool) -> None:
    assert selects(selector, LABELS) is found


@given(st.lists(st.sampled_from(["default", "other"]), max_size=2), st.sampled_from(["", "team=a", "team=b"]))
def test_the_scope_that_a_lease_tells_is_the_operators(namespaces: list[str], selector: str) -> None:
    config = OperatorConfig(watch_namespaces=tuple(namespaces), selector=selector)
    body = {"metadata": {"name": "toy", "namespace": "default", "labels": {"team": "a"}}}
    lease = {"metadata": {"annotations": scope_annotations(config)}}
    assert serves(lease, body) is ((not namespaces or "default" in namespaces) and selector != "team=b")


def test_a_store_without_claims_is_scaled_as_before() -> None:
    store = Store()
    body = copy.deepcopy(AUTOSCALED)
    body["metadata"] |= {"uid": "u", "resourceVersion": "1"}
    store.put(Observed.of(KIND, body["apiVersion"], body))
    assert len(LoadReader(store, lambda _: None, operator=B.operator_id).scaled()) == 1
