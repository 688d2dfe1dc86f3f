"""Autoscaling without a cluster: the decision, pages of every kind from real HTTP servers, and real TLS."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from support.llmd import manifest, parsed

from octavo_operator.api import API_VERSION, KIND
from octavo_operator.autoscaling import API_SERVICE, certificate
from octavo_operator.autoscaling.decision import decide, estimate, learn
from octavo_operator.autoscaling.front_proxy import BadFrontProxy, FrontProxy
from octavo_operator.autoscaling.metrics_api import BadSelector, MetricsApi, parse_selector
from octavo_operator.autoscaling.page import BadPage, Load, parse
from octavo_operator.autoscaling.reader import DEADLINE_SECONDS, NoReading, Reader, places
from octavo_operator.autoscaling.registration import judge
from octavo_operator.config import OperatorConfig
from octavo_operator.render import render
from octavo_operator.store import Observed, Store

# What an autoscaler does with the metric, as Kubernetes' replica calculator does it.


def horizontal(replicas: int, metric: int, target: int, least: int = 1, most: int = 1000) -> int:
    if replicas and abs(metric / (target * replicas) - 1) <= 0.1:
        return replicas
    return min(max(-(-metric // target), least), most)


def fleet(replicas: int, demand: int, capacity: int) -> list[Load]:
    """Demand spread evenly over replicas that hold `capacity` each."""
    shares = [demand // replicas + (number < demand % replicas) for number in range(replicas)]
    return [Load(min(share, capacity), max(0, share - capacity), max_running=capacity) for share in shares]


def settled(replicas: int, demand: int, capacity: int, target: int) -> list[int]:
    """The numbers of replicas that follow each other while the same demand stays."""
    known: float | None = None
    out = [replicas]
    for _ in range(6):
        loads = fleet(replicas, demand, capacity)
        one = learn(known, loads) or estimate(loads)
        replicas = horizontal(replicas, decide(replicas, target, loads, one).metric, target)
        known = learn(known, loads)
        out.append(replicas)
    return out


@given(st.integers(1, 9), st.integers(0, 120), st.integers(1, 24), st.integers(1, 32))
def test_one_step_reaches_a_number_that_the_same_demand_leaves_alone(
    replicas: int, demand: int, capacity: int, target: int
) -> None:
    assume(demand / capacity <= 9)  # from there on, one replica is within an autoscaler's tolerance
    before, after, *later = settled(replicas, demand, capacity, target)
    assert set(later) == {after}, "it flaps"
    waiting = max(0, demand - after * capacity)
    assert waiting <= after * target, "more wait for each replica than the target"
    if after < before:
        assert waiting == 0, "a queue was made by taking replicas away"
    if after > before:
        assert max(0, demand - (after - 1) * capacity) > (after - 1) * target, "one replica too many was added"
    assert after == 1 or (after - 1) * capacity < demand, "a replica has nothing to do and stays"


@given(st.integers(1, 10), st.integers(1, 100))
def test_an_idle_fleet_shrinks_to_the_least(replicas: int, target: int) -> None:
    decision = decide(replicas, target, [Load(0, 0)] * replicas, None)
    assert decision.metric == 0
    assert horizontal(replicas, decision.metric, target, least=1) == 1


def test_the_queue_counts_and_not_how_busy_replicas_are() -> None:
    assert decide(1, 4, [Load(16, 0, max_running=16)], 16).needed == 1, "full, but nobody waits"
    assert decide(1, 4, [Load(16, 4, max_running=16)], 16).needed == 1, "the target is what may wait"
    assert decide(1, 4, [Load(16, 5, max_running=16)], 16).needed == 2
    assert decide(1, 4, [Load(16, 100, max_running=16)], 16).needed == 6, "each one added takes a batch away, not 4"
    assert decide(2, 4, fleet(2, 32, 16), 16).needed == 2, "the queue is gone because there are two"
    assert decide(2, 4, fleet(2, 16, 16), 16).needed == 1


def test_one_waiting_request_too_many_is_seen_through_the_tolerance() -> None:
    """A ratio of requests would be within a tenth: 261 / 260."""
    decision = decide(1, 4, [Load(256, 5)], 256)
    assert horizontal(1, decision.metric, 4) == 2


@given(
    st.integers(1, 10),
    st.integers(1, 32),
    st.lists(st.builds(Load, st.integers(0, 64), st.integers(0, 64)), max_size=10),
    st.one_of(st.none(), st.integers(1, 64)),
)
def test_what_is_not_known_takes_no_replica_away(
    replicas: int, target: int, loads: list[Load], capacity: int | None
) -> None:
    decision = decide(replicas, target, loads, capacity, unsure=True)
    assert horizontal(replicas, decision.metric, target) >= replicas
    sure = decide(replicas, target, loads, capacity)
    assert decision.needed == max(sure.needed, replicas), "and keeps none from being added"


def test_what_a_replica_holds_is_learnt() -> None:
    assert learn(None, [Load(3, 0, max_running=64)]) is None
    assert learn(None, [Load(7, 2), Load(9, 1), Load(1, 0)]) == 8, "those that are full tell"
    assert learn(8, [Load(5, 0)]) == 8, "remembered when the queue is gone, or the fleet would shrink and grow again"
    assert learn(8, [Load(12, 0)]) == 12, "requests have become smaller"
    assert estimate([Load(5, 0, kv_usage=0.5, max_running=64)]) == 10, "KV memory is the narrower limit"
    assert estimate([Load(5, 0, kv_usage=0.01, max_running=64)]) == 64
    assert estimate([Load(0, 0)], 16) == 16
    assert estimate([Load(5, 0)]) is None


# Pages.

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
    start = time.process_time()
    assert parse(page) == Load(12, 1e6)
    assert time.process_time() - start < 0.5


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
    with pytest.raises(BadPage, match=said.replace("+", r"\+")):
        parse(page)


@given(st.binary(max_size=400))
@example(b'vllm:num_requests_running{"' + b'\\"' * 100)
@example(b"vllm:num_requests_running{" * 50)
def test_any_bytes_are_a_load_or_refused(junk: bytes) -> None:
    try:
        parse(junk)
    except BadPage:
        pass


def test_no_page_takes_long() -> None:
    for part in (b"vllm:num_requests_running{", b'vllm:num_requests_running{a="', b"vllm:num_requests_running "):
        start = time.process_time()
        with pytest.raises(BadPage):
            parse(part * (2**21 // len(part)))
        assert time.process_time() - start < 1


# Which pods are asked.


def pod(name: str, ready: bool = True, address: str | None = "127.0.0.1", port: int = 8001, **status: Any) -> Any:
    conditions = [{"type": "Ready", "status": str(ready)}]
    return {
        "metadata": {
            "name": name, "namespace": "default", "uid": f"uid-{name}", "resourceVersion": "1",
            "labels": {"octavo.dev/llmdeployment": "toy", "pod-template-hash": "a"},
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": {"containers": [{"name": "engine", "ports": [{"name": "management", "containerPort": port}]}]},
        "status": {"phase": "Running", "conditions": conditions, "podIP": address, **status},
    }  # fmt: skip


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
    asked, sure = places(deployment, [pod("a"), leaving, broken, unscheduled], None)
    assert ([place.name for place in asked], sure) == (["a"], True)


def test_pods_that_load_or_are_missing_leave_doubt() -> None:
    deployment = parsed(replicas=2, autoscaling={"maxReplicas": 4})
    assert places(deployment, [pod("a"), pod("b")], None)[1]
    assert not places(deployment, [pod("a"), pod("b", ready=False)], None)[1]
    assert not places(deployment, [pod("a")], None)[1], "one is missing"
    refused = {"status": {"conditions": [{"type": "ReplicaFailure", "status": "True"}]}}
    assert places(deployment, [pod("a")], refused)[1], "a quota forbids it: it will stay missing"


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


def store_of(*pods: Any, **spec: Any) -> Store:
    store = Store()
    body = manifest("toy", **{"autoscaling": {"maxReplicas": 8}, **spec})
    body["metadata"] |= {"uid": "u", "generation": 1, "resourceVersion": "1"}
    store.put(Observed.of(KIND, API_VERSION, body))
    for one in pods:
        store.put(Observed.of("Pod", "v1", one))
    return store


KEY = ("default", "toy")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(
    ("kind", "body", "said"),
    [
        ("silence", b"", "no answer within"),
        ("drip", b"", "no answer within"),
        ("flood", b"", "larger than"),
        ("nonsense", b"", ""),
        ("status", b"", "answers 500"),
        ("redirect", b"", "answers 302"),
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
        reader = Reader(store, told.append, clock=lambda: now[0])
        start = time.monotonic()
        decision = await reader.read(KEY)
        assert time.monotonic() - start < DEADLINE_SECONDS + 1
        assert (decision.needed, decision.held) == (2, True), "the last good decision is kept"
        assert reader.problem(KEY) is None, "a moment's failure is not worth a condition"
        now[0] += 60
        await reader.read(KEY)
        problem = reader.problem(KEY)
        assert problem is not None
        assert problem.reason == "PodsUnreadable"
        assert "1 of 2 pods" in problem.message
        assert "bad: " in problem.message
        assert said in problem.message
        assert told == [KEY]
        await reader.close()

    asyncio.run(run())


def test_when_no_pod_can_be_read_there_is_no_number(engine: Callable[..., int]) -> None:
    store = store_of(pod("a", port=engine("status")), pod("b", port=free_port()), replicas=2)

    async def run() -> None:
        reader = Reader(store, lambda _: None)
        with pytest.raises(NoReading, match="2 of 2 pods"):
            await reader.read(KEY)
        await reader.close()

    asyncio.run(run())


def test_a_good_page_of_ten_thousand_lines_is_read(engine: Callable[..., int]) -> None:
    filler = b"".join(b'other_metric{number="%d"} 1.0\n' % number for number in range(10_000))
    page = filler + b"vllm:num_requests_running 2\nvllm:num_requests_waiting 3\n" + filler
    store = store_of(pod("a", port=engine("page", page)))

    async def run() -> None:
        reader = Reader(store, lambda _: None)
        start = time.monotonic()
        decision = await reader.read(KEY)
        assert time.monotonic() - start < 2
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
        reader = Reader(store, lambda _: None)
        start = time.monotonic()
        decisions = await asyncio.gather(*(reader.read(KEY) for _ in range(20)))
        assert time.monotonic() - start < 2 * DEADLINE_SECONDS + 1
        assert len({id(decision) for decision in decisions}) == 1, "one reading for all who ask"
        assert decisions[0].needed > 1, "what can be read still adds replicas"
        await reader.close()

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
        reader = Reader(store_of(pod("a", port=port)), lambda _: None)
        assert (await reader.read(KEY)).needed == 1
        assert len(asked) == 2
        await reader.close()
        await runner.cleanup()

    asyncio.run(run())


# TLS, as the aggregation layer does it.

NAME = "metrics.system.svc"


def authority(name: str = "front") -> certificate.ServingCertificate:
    return certificate.make([name], timedelta(hours=1))


def front_proxy(one: certificate.ServingCertificate, allowed: tuple[str, ...] = ("proxy",)) -> FrontProxy:
    lists = {"allowed-names": allowed, "username-headers": ["X-Remote-User"], "group-headers": ["X-Remote-Group"]}
    data = {f"requestheader-{key}": json.dumps(value) for key, value in lists.items()}
    data["requestheader-extra-headers-prefix"] = '["X-Remote-Extra-"]'
    return FrontProxy.of({"data": {"requestheader-client-ca-file": one.authority.decode(), **data}})


class FakeReviews:
    """Instead of an API server: who is allowed what. (The real one judges in test_autoscaling_on_cluster.py.)"""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def call(self, method: str, path: str, body: Any, timeout: float) -> Any:
        self.asked.append(body["spec"])
        return {"status": {"allowed": body["spec"]["user"] == "hpa"}}


def client_context(
    server: certificate.ServingCertificate, client: certificate.ServingCertificate | None
) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=server.authority.decode())
    if client:
        with tempfile.TemporaryDirectory() as folder:
            pair = Path(folder, "pair")
            pair.write_bytes(client.certificate + client.key)
            context.load_cert_chain(pair)
    return context


async def ask(port: int, context: ssl.SSLContext, path: str, **headers: str) -> tuple[int, Any]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=NAME)
    lines = [f"GET {path} HTTP/1.1", f"Host: {NAME}", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    writer.write("\r\n".join([*lines, "", ""]).encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), json.loads(body)


@pytest.fixture
def proxy_client() -> certificate.ServingCertificate:
    """A client certificate needs its use: make one by hand."""
    return client_certificate("proxy")


def client_certificate(name: str) -> certificate.ServingCertificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    now = datetime.now(UTC)

    def build(subject: str, key: Any, ca: bool) -> Any:
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "front CA")]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(minutes=1))
            .not_valid_after(now + timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )
        return (builder if ca else builder.add_extension(usage, critical=False)).sign(keys[0], hashes.SHA256())

    pem = serialization.Encoding.PEM
    private = keys[1].private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    ca, leaf = build("front CA", keys[0], True), build(name, keys[1], False)
    return certificate.ServingCertificate(leaf.public_bytes(pem), private, ca.public_bytes(pem), now, now)


ROOT = "/apis/external.metrics.k8s.io/v1beta1"
VALUES = f"{ROOT}/namespaces/default/octavo_queue_depth"


async def serving(store: Store, reviews: FakeReviews, *presented: Any) -> tuple[MetricsApi, int]:
    leading = asyncio.Event()
    leading.set()
    api = MetricsApi(reviews, store, Reader(store, lambda _: None), leading)  # type: ignore[arg-type]
    api.present(*presented)
    return api, await api.listen(0, "127.0.0.1")


def test_only_the_front_proxy_is_believed(proxy_client: certificate.ServingCertificate) -> None:
    async def run() -> None:
        server, reviews = certificate.make([NAME], timedelta(hours=1)), FakeReviews()
        api, port = await serving(store_of(), reviews, server, front_proxy(proxy_client))
        good = client_context(server, proxy_client)
        code, body = await ask(port, good, ROOT, X_Remote_User="anybody")
        assert (code, body["resources"][0]["name"]) == (200, "octavo_queue_depth")
        code, body = await ask(port, good, VALUES, X_Remote_User="hpa", X_Remote_Group="g", X_Remote_Extra_Scopes="s")
        assert (code, body["items"][0]["value"]) == (200, "4"), "no pod is there: one replica is kept"
        assert reviews.asked[0]["groups"] == ["g"]
        assert reviews.asked[0]["extra"] == {"scopes": ["s"]}
        assert reviews.asked[0]["resourceAttributes"]["resource"] == "octavo_queue_depth"
        code, body = await ask(port, good, VALUES, X_Remote_User="eve")
        assert (code, body["kind"], body["reason"]) == (403, "Status", "Forbidden")
        assert (await ask(port, good, VALUES))[0] == 401, "no user"
        assert (await ask(port, client_context(server, None), VALUES, X_Remote_User="hpa"))[0] == 401, "no certificate"
        stranger = client_context(server, client_certificate("proxy"))
        with pytest.raises((ssl.SSLError, ConnectionError, IndexError)):
            await ask(port, stranger, VALUES, X_Remote_User="hpa")
        api.present(server, front_proxy(proxy_client, ("another",)))
        assert (await ask(port, good, VALUES, X_Remote_User="hpa"))[0] == 401, "signed, but not by that name"
        api.present(server, front_proxy(proxy_client, ()))
        assert (await ask(port, good, VALUES, X_Remote_User="hpa"))[0] == 200, "any name"
        await api.close()

    asyncio.run(run())


def test_certificates_and_trust_are_exchanged_under_way(proxy_client: certificate.ServingCertificate) -> None:
    async def run() -> None:
        server, later, other = (
            *(certificate.make([NAME], timedelta(hours=1)) for _ in range(2)),
            client_certificate("proxy"),
        )
        api, port = await serving(store_of(), FakeReviews(), server, front_proxy(proxy_client))
        assert (await ask(port, client_context(server, proxy_client), ROOT, X_Remote_User="a"))[0] == 200
        api.present(later, front_proxy(other))
        with pytest.raises(ssl.SSLCertVerificationError):
            await ask(port, client_context(server, other), ROOT, X_Remote_User="a")
        assert (await ask(port, client_context(later, other), ROOT, X_Remote_User="a"))[0] == 200
        with pytest.raises((ssl.SSLError, ConnectionError, IndexError)):
            await ask(port, client_context(later, proxy_client), ROOT, X_Remote_User="a")
        await api.close()

    asyncio.run(run())


def test_a_connection_of_before_the_trust_changed_is_not_believed(proxy_client: certificate.ServingCertificate) -> None:
    async def run() -> None:
        server = certificate.make([NAME], timedelta(hours=1))
        api, port = await serving(store_of(), FakeReviews(), server, front_proxy(proxy_client))
        context = client_context(server, proxy_client)
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=NAME)
        request = f"GET {ROOT} HTTP/1.1\r\nHost: {NAME}\r\nX-Remote-User: a\r\n\r\n".encode()
        writer.write(request)
        assert b" 200 " in await reader.readline()
        await reader.readuntil(b"]}")
        api.present(server, front_proxy(client_certificate("proxy")))
        writer.write(request)
        assert b" 401 " in await reader.readline()
        writer.close()
        await api.close()

    asyncio.run(run())


def test_a_cluster_without_front_proxy_is_named() -> None:
    for nothing in (None, {}, {"data": {"requestheader-allowed-names": "[]"}}):
        with pytest.raises(BadFrontProxy, match="requestheader-client-ca-file"):
            FrontProxy.of(nothing)
    with pytest.raises(BadFrontProxy, match="allowed-names"):
        FrontProxy.of(
            {"data": {"requestheader-client-ca-file": "BEGIN CERTIFICATE", "requestheader-allowed-names": "{"}}
        )


@pytest.mark.parametrize(
    ("selector", "names"),
    [
        ("", {"a", "b"}),
        ("octavo.dev/llmdeployment=a", {"a"}),
        ("octavo.dev/llmdeployment == a", {"a"}),
        ("octavo.dev/llmdeployment in (a, b)", {"a", "b"}),
        ("octavo.dev/llmdeployment in (a,b),octavo.dev/llmdeployment=b", {"b"}),
        ("octavo.dev/llmdeployment=c", set()),
    ],
)
def test_selectors(selector: str, names: set[str]) -> None:
    fits = parse_selector(selector)
    assert {name for name in ("a", "b") if fits(name)} == names


@pytest.mark.parametrize("selector", ["other=a", "octavo.dev/llmdeployment!=a", "octavo.dev/llmdeployment", "!x"])
def test_selectors_of_other_labels_are_refused(selector: str) -> None:
    with pytest.raises(BadSelector):
        parse_selector(selector)


# The APIService.

SERVICE = {"namespace": "system", "name": "ours", "port": 443}


def api_service(name: str = "ours", bundle: str = "b") -> Any:
    standing = judge(None, True, {**SERVICE, "name": name}, bundle, None)
    assert standing.write
    return {**standing.write, "metadata": {**standing.write["metadata"], "uid": "u", "resourceVersion": "7"}}


def test_the_apiservice_is_made_kept_in_step_and_taken_back() -> None:
    live = api_service()
    assert live["metadata"]["name"] == API_SERVICE
    assert judge(live, True, SERVICE, "b", None).write is None
    renewed = judge(live, True, SERVICE, "c", None).write
    assert renewed
    assert (renewed["spec"]["caBundle"], renewed["metadata"]["resourceVersion"]) == ("c", "7")
    assert judge(live, False, SERVICE, "", None).delete
    assert not judge(None, False, SERVICE, "", None).delete


@pytest.mark.parametrize("wanted", [True, False])
def test_an_apiservice_of_others_is_never_touched(wanted: bool) -> None:
    standing = judge(api_service("keda-operator-metrics-apiserver"), wanted, SERVICE, "b", None)
    assert (standing.write, standing.delete) == (None, False)
    if wanted:
        assert standing.problem
        assert standing.problem.reason == "APIServiceTaken"
        assert "system/keda-operator-metrics-apiserver" in standing.problem.message


# What is rendered.


def rendered(kind: str, **spec: Any) -> Any:
    deployment = parsed(**spec)
    objects = render(deployment, OperatorConfig(), apis=frozenset({"ScaledObject"}))
    return next((one for one in objects if one["kind"] == kind), None)


def test_an_autoscaler_writes_the_llmdeployment_and_reads_our_metric() -> None:
    behavior = {"scaleDown": {"stabilizationWindowSeconds": 5}}
    spec = {"minReplicas": 2, "maxReplicas": 5, "queueDepth": {"targetPerReplica": 3}, "behavior": behavior}
    body = rendered("HorizontalPodAutoscaler", autoscaling=spec)["spec"]
    assert body["scaleTargetRef"] == {"apiVersion": "octavo.dev/v1alpha1", "kind": "LLMDeployment", "name": "toy"}
    assert (body["minReplicas"], body["maxReplicas"], body["behavior"]) == (2, 5, behavior)
    external = body["metrics"][0]["external"]
    assert external["metric"]["name"] == "octavo_queue_depth"
    assert external["target"] == {"type": "AverageValue", "averageValue": "3"}
    assert rendered("HorizontalPodAutoscaler") is None


def test_keda_asks_the_operator() -> None:
    spec = {"maxReplicas": 5, "provider": "keda"}
    assert rendered("HorizontalPodAutoscaler", autoscaling=spec) is None
    body = rendered("ScaledObject", autoscaling=spec)["spec"]
    assert body["scaleTargetRef"]["kind"] == "LLMDeployment"
    (trigger,) = body["triggers"]
    assert trigger["metadata"]["url"].endswith("/queue-depth/default/toy")
    assert trigger["metricType"] == "AverageValue"
