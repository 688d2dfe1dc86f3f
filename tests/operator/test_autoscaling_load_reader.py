"""How loaded pods are: pages of every kind, from real HTTP servers, good and bad ones."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support import cpu_time
from support.llmd import parsed, store_of
from support.serving import free_port

from octavo_operator.autoscaling.load_reader import TIMEOUT_SECONDS, LoadReader, MetricUnavailableError, scrape_targets
from octavo_operator.autoscaling.metrics_page import Load, MetricsPageError, parse
from octavo_operator.kube.store import Store

PAGE = b"""# HELP vllm:num_requests_running Sequences
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a \\"b\\" } 7"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0 1700000000000
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 99
vllm:kv_cache_usage_perc{engine="0"} 0.5
octavo:max_num_seqs 16.0
"""


def test_a_page_is_understood() -> None:
    assert parse(PAGE) == Load(5, 4, 0.5, 16)


def test_a_real_page_is_understood() -> None:
    """That of the library which the engine uses."""
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    for name, value in (("vllm:num_requests_running", 12), ("vllm:num_requests_waiting", 1e6)):
        prometheus.Gauge(name, "text", ["model_name"], registry=registry).labels('we"ird\\\n}').set(value)
    for number in range(10_000):
        prometheus.Gauge(f"other_{number}", "text", registry=registry)
    page = prometheus.generate_latest(registry)
    with cpu_time.at_most(0.5):
        assert parse(page) == Load(12, 1e6)


@pytest.mark.parametrize(
    ("page", "said"),
    [
        (b"", "no vllm:num_requests_running"),
        (b"<html>hello</html>", "no vllm:num_requests_running"),
        (b"vllm:num_requests_running 1\n", "no vllm:num_requests_waiting"),
        (b"vllm:num_requests_running many\nvllm:num_requests_waiting 0\n", "'many', not a number"),
        (b"vllm:num_requests_running NaN\nvllm:num_requests_waiting 0\n", "NaN"),
        (b"vllm:num_requests_running 1\nvllm:num_requests_waiting +Inf\n", "Inf"),
        (b"vllm:num_requests_running -3\nvllm:num_requests_waiting 0\n", "'-3'"),
        (b"\xff\xfe\x00" * 1000, "no vllm:num_requests_running"),
    ],
)
def test_nonsense_is_named(page: bytes, said: str) -> None:
    with pytest.raises(MetricsPageError, match=said.replace("+", r"\+")):
        parse(page)


@given(st.binary(max_size=400))
@example(b'vllm:num_requests_running{"' + b'\\"' * 100)
@example(b"vllm:num_requests_running{" * 50)
def test_any_bytes_are_a_load_or_refused(junk: bytes) -> None:
    try:
        parse(junk)
    except MetricsPageError:
        pass


def test_no_page_takes_long() -> None:
    for part in (b"vllm:num_requests_running{", b'vllm:num_requests_running{a="', b"vllm:num_requests_running "):
        with cpu_time.at_most(1), pytest.raises(MetricsPageError):
            parse(part * (2**21 // len(part)))


# Which pods are asked.


def pod(name: str, ready: bool = True, address: str | None = "127.0.0.1", port: int = 8001, **status: Any) -> Any:
    conditions = [{"type": "Ready", "status": str(ready)}]
    return {
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": f"uid-{name}",
            "resourceVersion": "1",
            "labels": {
                "octavo.dev/llmdeployment": "toy",
                "app.kubernetes.io/component": "engine",
                "pod-template-hash": "a",
            },
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": {"containers": [{"name": "engine", "ports": [{"name": "management", "containerPort": port}]}]},
        "status": {"phase": "Running", "conditions": conditions, "podIP": address, **status},
    }


def test_pods_that_go_or_cannot_run_hold_nothing() -> None:
    deployment = parsed(replicas=2, autoscaling={"maxReplicas": 4})
    leaving = pod("leaving")
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    waiting = {"name": "engine", "state": {"waiting": {"reason": "ImagePullBackOff"}}}
    broken = pod("broken", ready=False, containerStatuses=[waiting])
    unscheduled = pod("unscheduled", ready=False, address=None, phase="Pending")
    unscheduled["status"]["conditions"] = [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "Insufficient x"}
    ]
    asked, sure = scrape_targets(deployment, [pod("a"), leaving, broken, unscheduled], None)
    assert ([place.name for place in asked], sure) == (["a"], True)


def test_pods_that_load_or_are_missing_leave_doubt() -> None:
    deployment = parsed(replicas=2, autoscaling={"maxReplicas": 4})
    assert scrape_targets(deployment, [pod("a"), pod("b")], None)[1]
    assert not scrape_targets(deployment, [pod("a"), pod("b", ready=False)], None)[1]
    assert not scrape_targets(deployment, [pod("a")], None)[1], "one is missing"
    refused = {"status": {"conditions": [{"type": "ReplicaFailure", "status": "True"}]}}
    assert scrape_targets(deployment, [pod("a")], refused)[1], "a quota forbids it: it will stay missing"


# Real pods' worth of HTTP servers.

SERVER = """
import json, socket, sys, threading, time
def serve(kind, body):
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    while True:
        peer, _ = listener.accept()
        threading.Thread(target=answer, args=(peer, kind, body), daemon=True).start()
def answer(peer, kind, body):
    try:
        peer.recv(65536)
        head = b"HTTP/1.1 200 OK\\r\\nContent-Type: text/plain\\r\\n"
        if kind == "page":
            peer.sendall(head + b"Content-Length: %d\\r\\n\\r\\n" % len(body) + body)
        elif kind == "status":
            peer.sendall(b"HTTP/1.1 500 Oh\\r\\nContent-Length: 0\\r\\n\\r\\n")
        elif kind == "drip":
            peer.sendall(head + b"\\r\\n")
            while True:
                peer.sendall(b"#")
                time.sleep(0.05)
        elif kind == "flood":
            peer.sendall(head + b"\\r\\n")
            while True:
                peer.sendall(b"x 1\\n" * 50000)
        elif kind == "silence":
            time.sleep(60)
        elif kind == "nonsense":
            peer.sendall(b"\\x16\\x03\\x01 what is this\\r\\n\\r\\n")
        elif kind == "redirect":
            peer.sendall(b"HTTP/1.1 302 Go\\r\\nLocation: http://127.0.0.1:1/\\r\\nContent-Length: 0\\r\\n\\r\\n")
        peer.close()
    except OSError:
        pass
serve(sys.argv[1], sys.stdin.buffer.read())
"""
IDLE = b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"


@pytest.fixture
def engine() -> Iterator[Callable[..., int]]:
    """Starts a process that answers on a port as it is told."""
    started = []

    def start(kind: str, body: bytes = b"") -> int:
        process = subprocess.Popen([sys.executable, "-c", SERVER, kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdin and process.stdout
        process.stdin.write(body)
        process.stdin.close()
        return int(process.stdout.readline())

    yield start
    for process in started:
        process.kill()
        process.wait()


KEY = ("default", "toy")


@pytest.mark.parametrize(
    ("kind", "body", "said"),
    [
        ("silence", b"", "no response within"),
        ("drip", b"", "no response within"),
        ("flood", b"", "larger than"),
        ("nonsense", b"", ""),
        ("status", b"", "HTTP status 500"),
        ("redirect", b"", "HTTP status 302"),
        ("page", b"<html></html>", "no vllm:num_requests_running"),
        ("page", b"vllm:num_requests_running NaN\nvllm:num_requests_waiting 0\n", "NaN"),
        (None, b"", ""),
    ],
    ids=["silence", "slow-loris", "flood", "nonsense", "500", "redirect", "wrong-page", "not-a-number", "closed-port"],
)
def test_a_bad_pod_costs_its_deadline_and_no_replica(
    engine: Callable[..., int], kind: str | None, body: bytes, said: str
) -> None:
    bad = engine(kind, body) if kind else free_port()
    store = store_of(pod("good", port=engine("page", IDLE)), pod("bad", port=bad), replicas=2)
    told: list[Any] = []

    async def run() -> None:
        now = [0.0]
        reader = LoadReader(store, told.append, clock=lambda: now[0])
        start = time.monotonic()
        decision = await reader.read(KEY)
        assert time.monotonic() - start < 5 * TIMEOUT_SECONDS
        assert (decision.needed, decision.held) == (2, True), "the last good decision is kept"
        assert reader.problem(KEY) is None, "a moment's failure is not worth a condition"
        now[0] += 60
        await reader.read(KEY)
        problem = reader.problem(KEY)
        assert problem is not None
        assert problem.reason == "PodMetricsUnavailable"
        assert "1 of 2 pods" in problem.message
        assert "bad: " in problem.message
        assert said in problem.message
        assert told == [KEY]
        await reader.close()

    asyncio.run(run())


def test_when_no_pod_can_be_read_there_is_no_number(engine: Callable[..., int]) -> None:
    store = store_of(pod("a", port=engine("status")), pod("b", port=free_port()), replicas=2)

    async def run() -> None:
        reader = LoadReader(store, lambda _: None)
        with pytest.raises(MetricUnavailableError, match="2 of 2 pods"):
            await reader.read(KEY)
        await reader.close()

    asyncio.run(run())


def test_a_good_page_of_ten_thousand_lines_is_read(engine: Callable[..., int]) -> None:
    filler = b"".join(b'other_metric{number="%d"} 1.0\n' % number for number in range(10_000))
    page = filler + b"vllm:num_requests_running 2\nvllm:num_requests_waiting 3\n" + filler
    store = store_of(pod("a", port=engine("page", page)))

    async def run() -> None:
        reader = LoadReader(store, lambda _: None)
        decision = await reader.read(KEY)
        assert (decision.running, decision.waiting) == (2, 3)
        await reader.close()

    asyncio.run(run())


def test_fifty_silent_pods_cost_no_more_than_one(engine: Callable[..., int]) -> None:
    port = engine("silence")
    pods = [pod(f"p{number}", port=port) for number in range(50)]
    store = store_of(
        pod("good", port=engine("page", b"vllm:num_requests_running 4\nvllm:num_requests_waiting 900\n")), *pods
    )

    async def run() -> None:
        reader = LoadReader(store, lambda _: None)
        start = time.monotonic()
        decisions = await asyncio.gather(*(reader.read(KEY) for _ in range(20)))
        assert time.monotonic() - start < 10 * TIMEOUT_SECONDS
        assert len({id(decision) for decision in decisions}) == 1, "one reading for all who ask"
        assert decisions[0].needed > 1, "what can be read still adds replicas"
        await reader.close()

    asyncio.run(run())


def test_an_operator_that_starts_knows_what_a_replica_holds(engine: Callable[..., int]) -> None:
    """Three full replicas and no queue: by what is configured, one could take all of it."""
    full = b"vllm:num_requests_running 8\nvllm:num_requests_waiting 0\noctavo:max_num_seqs 64\n"
    queue = b"vllm:num_requests_running 8\nvllm:num_requests_waiting 30\noctavo:max_num_seqs 64\n"

    async def needed(store: Store, told: list[Any]) -> int:
        reader = LoadReader(store, told.append)
        decision = await reader.read(KEY)
        await reader.close()
        return decision.needed

    async def run() -> None:
        port, told = engine("page", queue), []
        await needed(store_of(pod("a", port=port), replicas=1), told)
        assert told == [KEY], "learnt, and worth a word in the status"
        port, told = engine("page", full), []
        pods = [pod(name, port=port) for name in "abc"]
        assert await needed(store_of(*pods, replicas=3), []) == 1, "nothing is known of them"
        assert await needed(store_of(*pods, replicas=3, status={"replicaCapacity": 8}), told) == 3
        assert told == [], "known already"

    asyncio.run(run())


def test_a_queue_of_a_moment_is_none() -> None:
    """Requests that have just arrived wait for a step of the engine."""
    from aiohttp import web

    asked = []

    async def page(_: web.Request) -> web.Response:
        asked.append(1)
        waiting = 40 if len(asked) == 1 else 0
        return web.Response(
            text=f"vllm:num_requests_running 8\nvllm:num_requests_waiting {waiting}\noctavo:max_num_seqs 64\n"
        )

    async def run() -> None:
        app = web.Application()
        app.add_routes([web.get("/metrics", page)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        reader = LoadReader(store_of(pod("a", port=port)), lambda _: None)
        assert (await reader.read(KEY)).needed == 1
        assert len(asked) == 2
        await reader.close()
        await runner.cleanup()

    asyncio.run(run())
