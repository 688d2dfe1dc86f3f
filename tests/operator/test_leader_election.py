"""Who may write, and what happens to those who may no longer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.llmd import manifest

from octavo_operator.api import KIND
from octavo_operator.autoscaling.registration import Registration
from octavo_operator.config import OperatorConfig
from octavo_operator.controller import Controller
from octavo_operator.kube.lease import LeaderElector, may_acquire

Json = dict[str, Any]


class ApiServer:
    """Takes everything, and keeps the one Lease."""

    def __init__(self) -> None:
        self.lease: Json | None = None
        self.version = 10
        self.body = wanted(1, 1)
        self.replicas: list[int] = []
        self.on_response: Any = None

    async def get(self, kind: str, namespace: str, name: str, timeout: float = 15) -> Json | None:
        if kind != "Lease" or self.lease is None:
            return None
        return {"metadata": {"resourceVersion": str(self.version)}, "spec": dict(self.lease)}

    async def call(self, method: str, path: str, body: Json, **_: Any) -> Json:
        if "leases" in path:
            self.lease = body["spec"]
            self.version += 1
        return body

    async def apply(self, one: Json, manager: str, subresource: str | None = None) -> Json:
        self.version += 1
        if one["kind"] == "Deployment":
            self.replicas.append(one["spec"]["replicas"])
        base = one
        if one["kind"] == KIND:
            self.body = base = {**self.body, "status": one["status"]}
        return {**base, **one, "metadata": {**base["metadata"], "uid": "u", "resourceVersion": str(self.version)}}


def wanted(replicas: int, version: int) -> Json:
    body = manifest(replicas=replicas)
    body["metadata"] |= {"uid": "u", "generation": version, "resourceVersion": str(version)}
    return body


def test_a_change_heard_of_while_the_lease_is_stale_is_made_once_it_is_renewed() -> None:
    """A process that was frozen wakes: its Lease has run out, nobody took it, and a change is read first."""

    async def run() -> list[int]:
        server = ApiServer()
        config = OperatorConfig(lease_seconds=3)
        lease = LeaderElector(server, config)  # type: ignore[arg-type]
        controller = Controller(server, config, lease)  # type: ignore[arg-type]
        controller.on_all_listed()
        tasks = [asyncio.create_task(lease.run()), asyncio.create_task(controller.run_worker())]
        try:
            controller.on_change(KIND, server.body)
            async with asyncio.timeout(30):
                while server.replicas != [1]:
                    await asyncio.sleep(0.01)
            lease._renewed -= 20  # so much time has passed at once
            assert not lease.is_held
            server.body |= {key: wanted(3, 5000)[key] for key in ("metadata", "spec")}
            server.version = 5000
            controller.on_change(KIND, server.body)
            async with asyncio.timeout(30):
                while 3 not in server.replicas:
                    await asyncio.sleep(0.05)
        finally:
            for task in tasks:
                task.cancel()
        return server.replicas

    assert asyncio.run(run()) == [1, 3]


class Registry:
    """An API server that has one APIService, registered by somebody."""

    def __init__(self, bundle: str) -> None:
        service = {"namespace": "default", "name": "octavo-operator-metrics", "port": 443}
        meta = {"name": "x", "uid": "1", "resourceVersion": "77"}
        self.live: Json = {"metadata": meta, "spec": {"service": service, "caBundle": bundle}}
        self.writes: list[str] = []

    async def call(self, method: str, path: str, body: Json | None = None) -> Json:
        if method != "GET":
            self.writes.append(method)
            assert body is not None
            if method == "DELETE":
                assert body["preconditions"] == {"uid": "1", "resourceVersion": "77"}
        return self.live


def registration(server: Registry, held: bool = True) -> Registration:
    config = OperatorConfig(metrics_api=True)
    api: Any = None
    return Registration(server, config, api, lambda: frozenset(), lambda: None, lambda: held)  # type: ignore[arg-type]


def test_a_former_leader_leaves_the_registration_of_the_next_one() -> None:
    """Both replicas of a release register the same Service; authorities tell whose the registration is."""
    for bundle, writes in (("ours", ["DELETE"]), ("the next one's", [])):
        server = Registry(bundle)
        one = registration(server)
        one._registered = "ours"
        asyncio.run(one.unregister())
        assert server.writes == writes


def test_nothing_is_registered_while_the_lease_is_stale() -> None:
    async def run(held: bool) -> list[str]:
        server = Registry("somebody's")
        leading = asyncio.Event()
        leading.set()
        task = asyncio.create_task(registration(server, held).run(leading))
        await asyncio.sleep(0.2)
        task.cancel()
        return server.writes

    assert asyncio.run(run(held=True)) == ["DELETE"], "nobody is scaled by it"
    assert asyncio.run(run(held=False)) == []


@pytest.mark.parametrize(
    ("holder", "unchanged", "free"),
    [("", 0, True), (None, 0, True), ("me", 0, True), ("other", 14, False), ("other", 16, True)],
)
def test_a_lease_is_taken_only_when_nobody_renews_it(holder: str | None, unchanged: float, free: bool) -> None:
    lease = {"spec": {"holderIdentity": holder, "leaseDurationSeconds": 15}}
    assert may_acquire(lease, "me", unchanged) is free


class Flaky(ApiServer):
    """An API server that is away, or whose store goes back, when a test says so."""

    is_away = False

    async def get(self, *args: Any, **kwargs: Any) -> Json | None:
        if self.is_away:
            raise OSError("away")
        return await super().get(*args, **kwargs)


def watched(events: list[bool], scenario: Any) -> list[bool]:
    """Runs a scenario beside an elector of a Lease of one second; what it told watches."""

    async def run() -> None:
        server = Flaky()
        lease = LeaderElector(server, OperatorConfig(lease_seconds=1))  # type: ignore[arg-type]
        lease.on_break = events.append
        task = asyncio.create_task(lease.run())
        try:
            async with asyncio.timeout(30):
                await lease.leading.wait()
                await scenario(server, lease, task)
        finally:
            task.cancel()

    asyncio.run(run())
    return events


async def _until(what: Any) -> None:
    while not what():
        await asyncio.sleep(0.01)


def test_a_leader_whose_api_server_is_away_writes_nothing_and_leads_again_when_it_is_back() -> None:
    events: list[bool] = []

    async def scenario(server: Flaky, lease: LeaderElector, task: Any) -> None:
        server.is_away = True
        await _until(lambda: not lease.leading.is_set())
        assert not lease.is_held and not task.done() and events == []
        server.is_away = False
        await lease.leading.wait()

    assert watched(events, scenario) in ([False], [True]), "watches are told once"


def test_a_leader_whose_lease_another_took_ends() -> None:
    async def scenario(server: Flaky, lease: LeaderElector, task: Any) -> None:
        server.lease = {"holderIdentity": "another", "leaseDurationSeconds": 1}
        await task
        assert not lease.leading.is_set()

    assert watched([], scenario) == []


def test_versions_that_go_back_start_watches_anew() -> None:
    events: list[bool] = []

    async def scenario(server: Flaky, lease: LeaderElector, task: Any) -> None:
        await asyncio.sleep(0.5)
        assert events == [], "they have only grown"
        server.version = 3
        await _until(lambda: events)

    assert watched(events, scenario)[0] is True
