"""To zero and back: replicas stop when it is certain that nobody asks, and a request that a router holds starts one."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from support.llmd import manifest, parsed
from support.serving import free_port
from support.worlds import world

from octavo_operator import api
from octavo_operator.api import LLMDeployment
from octavo_operator.autoscaling import zero, zero_scaler
from octavo_operator.autoscaling.condition import Scaling, autoscaler_ready
from octavo_operator.autoscaling.decision import decide
from octavo_operator.autoscaling.load_reader import LoadReader
from octavo_operator.autoscaling.metrics_page import Load
from octavo_operator.autoscaling.zero import Idle, RouterLoad, Sample, may_stop, sample_seconds, watch_idle
from octavo_operator.autoscaling.zero_scaler import ZeroScaler
from octavo_operator.config import OperatorConfig
from octavo_operator.deployment.reconcile import reconcile
from octavo_operator.kube.client import ApiError
from octavo_operator.kube.store import Observed, Store
from octavo_operator.render import names, render

Json = dict[str, Any]
SPEC = {"routing": {"strategy": "prefix"}, "autoscaling": {"minReplicas": 0, "maxReplicas": 4, "idleSeconds": 60}}
BEHIND = {"autoscaling": SPEC["autoscaling"]}  # a gateway, whose routers hold requests
QUIET = RouterLoad(0, 0)


def engines(demand: int = 0, finished: float = 0, unsure: bool = False) -> Any:
    return decide(1, 4, [Load(demand, 0, finished=finished)], 8, unsure=unsure)


@pytest.mark.parametrize(
    "sample",
    [
        Sample(False, engines(), [QUIET]),
        Sample(True, None, [QUIET]),
        Sample(True, engines(demand=1), [QUIET]),
        Sample(True, engines(unsure=True), [QUIET]),
        Sample(True, decide(1, 4, [], 8, unsure=True), [QUIET]),
        Sample(True, engines(), []),
        Sample(True, engines(), [QUIET, None]),
        Sample(True, engines(), [QUIET, RouterLoad(1, 0)]),
        Sample(True, engines(), [RouterLoad(0, 1), QUIET]),
    ],
    ids=["rollout", "unreadable", "busy", "unsure", "no pod", "no router", "router unreadable", "held", "under way"],
)
def test_doubt_is_not_idleness(sample: Sample) -> None:
    assert Sample(True, engines(), [QUIET, QUIET]).is_idle
    assert watch_idle(Idle(0.0, 0), sample, 1000.0) is None


# What happens between two samples: a short request (ended when they look), a long one (they see it), nothing, a start.
STEPS = st.lists(st.sampled_from(["nothing"] * 6 + ["short", "long", "held", "start", "unreadable"]), max_size=80)


@given(STEPS, st.sampled_from([30, 60, 90, 120, 300]))  # whole seconds between samples
def test_replicas_stop_after_that_time_without_a_request_and_no_sooner(steps: list[str], seconds: int) -> None:
    deployment = parsed(**{**SPEC, "autoscaling": {"minReplicas": 0, "maxReplicas": 4, "idleSeconds": seconds}})
    every, idle, finished = sample_seconds(deployment), None, 0.0
    quiet_since = started = 0.0  # the last moment at which somebody may have asked, or a replica was not there
    for number, step in enumerate(steps):
        now = number * every
        if step in ("short", "long"):
            finished += 1
        sample = {
            "long": Sample(True, engines(1, finished), [QUIET]),
            "held": Sample(True, engines(0, finished), [RouterLoad(1, 0)]),
            "start": Sample(False, None, ()),
            "unreadable": Sample(True, engines(0, finished), [None]),
        }.get(step, Sample(True, engines(0, finished), [QUIET]))
        if step != "nothing":
            quiet_since = now
        idle = watch_idle(idle, sample, now)
        stops = may_stop(deployment, idle, now)
        assert not stops or now - quiet_since >= seconds, "somebody has asked since"
        assert stops or now - quiet_since < seconds + every, "nobody has asked for long"
        if stops:
            assert now - started >= seconds, "it flaps"
            idle, started, quiet_since = None, now, now + every


def test_only_those_that_may_be_at_zero_are_stopped() -> None:
    idle = Idle(0.0, 0)
    assert may_stop(parsed(**SPEC), idle, 60.0)
    assert not may_stop(parsed(**SPEC, suspend=True), idle, 60.0)
    assert not may_stop(parsed(**SPEC, replicas=0), idle, 60.0)
    assert not may_stop(parsed(autoscaling={"maxReplicas": 4}), idle, 1e9)
    assert not Sample(True, engines(), ()).is_idle, "nothing holds requests"
    assert [parsed(**SPEC, replicas=count).is_woken_by_requests for count in (0, 1)] == [True, False]
    assert not parsed(**SPEC, replicas=0, suspend=True).is_woken_by_requests


def test_the_autoscaler_has_replicas_from_one_on() -> None:
    def rendered(**spec: Any) -> dict[str, Json]:
        deployment = parsed(**{**SPEC, **spec})
        found = render(deployment, OperatorConfig(), apis=frozenset({"ScaledObject", "PodMonitor"}))
        return {f"{one['kind']} {one['metadata']['name']}": one for one in found}

    assert rendered()["HorizontalPodAutoscaler toy"]["spec"]["minReplicas"] == 1
    keda = {"autoscaling": {**SPEC["autoscaling"], "provider": "keda"}}
    scaled = rendered(**keda)["ScaledObject toy"]
    assert (scaled["spec"]["minReplicaCount"], scaled["metadata"].get("annotations")) == (1, None)
    paused = rendered(**keda, replicas=0)["ScaledObject toy"]["metadata"]["annotations"]
    assert paused == {"autoscaling.keda.sh/paused": "true"}, "KEDA starts minReplicaCount replicas otherwise"
    verdict = autoscaler_ready(parsed(**SPEC, replicas=0), None, Scaling(), frozenset())
    assert verdict is not None
    assert verdict[:2] == (True, "Idle")


def test_zero_counts_as_one_if_nobody_holds_requests() -> None:
    def condition(*gateways: str, **spec: Any) -> str:
        status = reconcile(parsed(**spec), world(gateways=gateways), OperatorConfig()).status
        assert status is not None
        return next(str(one["reason"]) for one in status["conditions"] if one["type"] == "AutoscalerReady")

    assert condition(**BEHIND, replicas=0) == "ScaleToZeroUnavailable"
    assert condition(**BEHIND, replicas=1) == "ScaleToZeroUnavailable"
    assert condition("all", **BEHIND, replicas=0) == "Idle"
    assert condition(**SPEC, replicas=0) == "Idle"
    assert condition(**BEHIND, replicas=0, suspend=True) == "Suspended"


# The operator beside real HTTP servers that answer as pickers do.


class Picker:
    """What a router with one pool answers."""

    def __init__(self) -> None:
        self.held = self.in_flight = self.arrivals = self.asked = 0
        self.refused: list[str] = []
        self.told: dict[str, str] = {}
        self.paused: list[bool] = []
        self.may_pause = True
        self._changed = asyncio.Event()

    def arrive(self, count: int) -> None:
        self.held, self.arrivals = self.held + count, self.arrivals + count
        self._changed.set()
        self._changed = asyncio.Event()

    async def serve(self, address: str, port: int) -> web.AppRunner:
        app = web.Application()
        app.add_routes([web.get("/held", self._held), web.post("/refuse", self._refuse)])
        app.add_routes([web.post("/pause", self._pause), web.post("/resume", self._resume)])
        runner = web.AppRunner(app, shutdown_timeout=0)
        await runner.setup()
        await web.TCPSite(runner, address, port).start()
        return runner

    async def _held(self, request: web.Request) -> web.Response:
        self.asked += 1
        self.told = dict(request.query)
        if int(request.query["since"]) == self.arrivals:
            try:
                await asyncio.wait_for(self._changed.wait(), float(request.query["wait"]))
            except TimeoutError:
                pass
        body = {"arrivals": self.arrivals, "held": {"toy": self.held} if self.held else {}}
        return web.json_response({**body, "in_flight": {"toy": self.in_flight}})

    async def _refuse(self, request: web.Request) -> web.Response:
        assert request.query["pool"] == "toy"
        self.refused.append(request.query["reason"])
        self.held = 0
        return web.json_response({})

    async def _pause(self, request: web.Request) -> web.Response:
        assert request.query["pool"] == "toy"
        self.paused.append(self.may_pause)
        return web.json_response({"paused": self.may_pause})

    async def _resume(self, request: web.Request) -> web.Response:
        self.paused.append(False)
        return web.json_response({})


class Scales:
    """The API server, as far as /scale is concerned."""

    def __init__(self, store: Store, spec: Json) -> None:
        self.store, self.written, self.conflicts = store, list[int](), 0
        self.body = manifest(**spec, replicas=0)
        self.version = 0
        self.change()

    def change(self, status: Json | None = None, **spec: Any) -> None:
        self.version += 1
        self.body["spec"] |= spec
        self.body["status"] = status or {}
        self.body["metadata"] |= {"uid": "u", "generation": 1, "resourceVersion": str(self.version)}
        self.store.put(Observed.of(api.KIND, api.API_VERSION, self.body))

    async def scale(self, kind: str, namespace: str, name: str, replicas: int, version: str, manager: str) -> None:
        assert (kind, namespace, name) == (api.KIND, "default", "toy")
        await asyncio.sleep(0.01)
        if version != str(self.version):
            self.conflicts += 1
            raise ApiError(409, {"message": "the object has been modified"})
        self.written.append(replicas)
        self.change(replicas=replicas)


def pod(
    name: str, address: str, component: str = "router", container: str = names.PICKER, owner: str = "toy", **status: Any
) -> Json:
    labels = {"octavo.dev/llmdeployment": owner, "app.kubernetes.io/component": component, "pod-template-hash": "a"}
    meta = {"name": name, "namespace": "default", "uid": name, "resourceVersion": "1", "labels": labels}
    return {"metadata": meta, "spec": {"containers": [{"name": container}]}, "status": {"podIP": address, **status}}


async def until(what: Callable[[], Any], seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while not what():
            await asyncio.sleep(0.02)


Work = Callable[[Scales, ZeroScaler, list[Picker], list[str]], Awaitable[None]]


def run(work: Work, port: int, holder: str, clock: Callable[[], float] = time.monotonic) -> None:
    """`work` with an operator that leads, and two routers: its own, or those of a gateway."""

    async def main() -> None:
        store, events = Store(), list[str]()
        scales, pickers = Scales(store, SPEC if holder == "toy" else BEHIND), [Picker(), Picker()]
        addresses = ["127.0.0.1", "127.0.0.2"]
        runners = [await one.serve(at, port) for one, at in zip(pickers, addresses, strict=True)]
        for number, address in enumerate(addresses):
            store.put(Observed.of("Pod", "v1", pod(f"r{number}", address, owner=holder)))

        async def post(_: Any, reason: str, message: str) -> None:
            events.append(f"{reason}: {message}")

        def gateways(_: LLMDeployment) -> tuple[tuple[str, str], ...]:
            return (("default", holder),) if holder == "gateway" else ()

        reader = LoadReader(store, lambda _: None)
        scaler = ZeroScaler(scales, store, reader, post, lambda: True, clock, gateways)  # type: ignore[arg-type]
        leading = asyncio.Event()
        leading.set()
        running = asyncio.create_task(scaler.run(leading))
        try:
            await work(scales, scaler, pickers, events)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await scaler.close()
            await reader.close()
            for one in pickers:
                one.arrive(0)  # ends their answers
            for runner in runners:
                await runner.cleanup()

    asyncio.run(main())


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    found = free_port()
    monkeypatch.setattr(zero.names, "PICKER_PORT", found)
    monkeypatch.setattr(zero_scaler, "_PERIOD_SECONDS", 0.05)
    return found


@pytest.mark.parametrize("holder", ["toy", "gateway"])
def test_a_held_request_starts_one_replica_and_rest_costs_one_connection(port: int, holder: str) -> None:
    async def work(scales: Scales, scaler: ZeroScaler, pickers: list[Picker], events: list[str]) -> None:
        await until(lambda: all(one.asked == 2 for one in pickers))  # how it is, and then waiting
        await asyncio.sleep(0.3)
        assert [one.asked for one in pickers] == [2, 2], "it polls"
        for one in pickers:
            one.arrive(25)
        await until(lambda: scales.written)
        await asyncio.sleep(0.6)
        assert scales.written == [1], "once, though both routers hold some"
        assert scaler.wakes == {("default", "toy"): 1}
        assert events == ["ScaledFromZero: 25 requests wait in a router: the first replica starts"]
        assert not any(one.refused for one in pickers)
        crash = {"type": "Degraded", "status": "True", "reason": "CrashLoop", "message": "exit status 1; see its log"}
        scales.change({"conditions": [{**crash, "reason": "InsufficientGPU"}]})
        await asyncio.sleep(1.2)
        assert not any(one.refused for one in pickers), "a node may come yet"
        scales.change({"conditions": [crash]})
        await until(lambda: all(one.refused for one in pickers))
        assert {one.refused[0] for one in pickers} == {"CrashLoop: exit status 1; see its log"}
        pickers[0].arrive(1)
        await until(lambda: len(pickers[0].refused) == 2)
        assert scales.written == [1]
        scales.change({"replicaCapacity": 4, "start": {"ready": 6.5}})
        pickers[0].arrive(1)
        await until(lambda: (pickers[0].told.get("room"), pickers[0].told.get("start")) == ("4", "6.5"))

    run(work, port, holder)


@pytest.mark.parametrize(
    ("spec", "seen", "room"), [(None, None, None), (4, None, "4"), (None, 9, "9"), (4, 9, "4"), (9, 4, "4")]
)
def test_routers_are_told_the_room_that_the_spec_allows(spec: int | None, seen: int | None, room: str | None) -> None:
    one = parsed(**SPEC, **({"engine": {"maxNumSeqs": spec}} if spec else {}))
    one.status["replicaCapacity"] = seen
    assert zero_scaler._known(one).get("room") == room


@pytest.mark.parametrize("holder", ["toy", "gateway"])
def test_the_wake_is_repeated_until_it_is_written(port: int, holder: str) -> None:
    async def work(scales: Scales, _: ZeroScaler, pickers: list[Picker], __: list[str]) -> None:
        scale, failures = scales.scale, [ApiError(500, {}), TimeoutError(), ApiError(409, {})]

        async def failing(*arguments: Any) -> None:
            if failures:
                raise failures.pop()
            await scale(*arguments)

        scales.scale = failing  # type: ignore[method-assign]
        pickers[1].arrive(1)
        await until(lambda: scales.written == [1])
        assert not failures

    run(work, port, holder)


@pytest.mark.parametrize("holder", ["toy", "gateway"])
def test_idle_replicas_are_stopped_unless_something_changes_meanwhile(
    port: int, holder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = {"finished": 0}

    async def fetch(_: LoadReader, __: str) -> bytes:
        lines = "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"
        return f'{lines}vllm:request_success_total{{finished_reason="stop"}} {page["finished"]}\n'.encode()

    clock = {"ahead": 0.0}
    monkeypatch.setattr(LoadReader, "_fetch", fetch)
    monkeypatch.setattr(zero_scaler, "sample_seconds", lambda _: 0.0)

    async def work(scales: Scales, scaler: ZeroScaler, pickers: list[Picker], _: list[str]) -> None:
        status = {"observedGeneration": 1, **dict.fromkeys(("replicas", "updatedReplicas", "availableReplicas"), 1)}
        live = {
            "metadata": {
                "name": "toy",
                "namespace": "default",
                "uid": "d",
                "resourceVersion": "1",
                "generation": 1,
                "labels": {"octavo.dev/llmdeployment": "toy"},
            },
            "spec": {"replicas": 1},
            "status": status,
        }
        scales.store.put(Observed.of("Deployment", "apps/v1", live))
        ready = {"conditions": [{"type": "Ready", "status": "True"}]}
        scales.store.put(Observed.of("Pod", "v1", pod("engine", "127.0.0.1", "engine", "engine", **ready)))
        scales.change({"availableReplicas": 1}, replicas=1)
        key = ("default", "toy")
        await until(lambda: scaler._idle.get(key))
        pickers[0].in_flight = 1
        await until(lambda: not scaler._idle.get(key))
        clock["ahead"] += 100
        await asyncio.sleep(0.2)
        assert not scales.written
        pickers[0].in_flight = 0
        await until(lambda: scaler._idle.get(key))
        page["finished"] += 1  # a request between two samples
        clock["ahead"] += 59
        await asyncio.sleep(1.3)  # a decision is kept for a second
        clock["ahead"] += 2
        await asyncio.sleep(0.2)
        assert not scales.written, "not idle for as long"
        pickers[1].may_pause = False  # a request has just come
        clock["ahead"] += 60
        await until(lambda: pickers[0].paused[1:])
        assert (pickers[0].paused, scales.written) == ([True, False], []), "the other one goes on, too"
        pickers[1].may_pause = True
        await until(lambda: scaler._idle.get(key))
        clock["ahead"] += 61
        await until(lambda: scales.written)
        assert scales.written == [0]
        assert [one.paused[-1] for one in pickers] == [True, True]
        assert json.loads(scales.store.get(api.KIND, *key).text)["spec"]["replicas"] == 0  # type: ignore[union-attr]

    run(work, port, holder, lambda: time.monotonic() + clock["ahead"])


def test_a_model_that_no_request_can_wake_is_started(port: int) -> None:
    async def work(scales: Scales, _: ZeroScaler, pickers: list[Picker], events: list[str]) -> None:
        await until(lambda: scales.written)
        await until(lambda: events)
        assert (scales.written, events[0].partition(":")[0]) == ([1], "ScaleToZeroUnavailable")
        assert not any(one.asked for one in pickers), "they are somebody else's"

    run(work, port, "nobody")
