"""Starting, stopping, dying: what a supervisor sees of the processes."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import signal
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest
from support.real_durations import ENDS_SECONDS
from support.serving import free_port

# Plain torch: with the C kernels the tiny model is through with a long answer in 0.2 s.
SMALL = ("--kv-cache-memory-bytes", str(32 << 20), "--max-num-seqs", "8", "--attention-backend", "reference")
LONG_STREAM = {"prompt": "The quick", "max_tokens": 1000, "temperature": 0, "ignore_eos": True, "stream": True}
LONG_CHAT = {**LONG_STREAM, "max_tokens": 500, "messages": [{"role": "user", "content": "x"}]}


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def engine_metric(server, name: str) -> float:
    text = server.get("/metrics").text
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"octavo:engine_{name}{{"))


def wait_until(condition, seconds: float) -> float:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "it did not happen in time"
        time.sleep(0.02)
    return time.monotonic() - start


def post(server, path: str, body: dict) -> socket.socket:
    """A connection over which a request has been sent."""
    connection = server.connect()
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


class Stream(threading.Thread):
    """A client in the middle of a long answer."""

    def __init__(self, server, body=LONG_STREAM) -> None:
        super().__init__(daemon=True)
        self.server, self.body = server, body
        self.lines: list[str] = []
        self.error: Exception | None = None
        self.begun = threading.Event()
        self.start()
        assert self.begun.wait(60)

    def run(self) -> None:
        try:
            with httpx.stream("POST", self.server.url + "/v1/completions", json=self.body, timeout=60) as response:
                for line in response.iter_lines():
                    self.lines += [line] if line else []
                    if len(self.lines) == 3:
                        self.begun.set()
        except Exception as error:
            self.error = error
        self.begun.set()

    @property
    def is_whole(self) -> bool:
        if self.error is not None or self.lines[-1] != "data: [DONE]":
            return False
        return json.loads(self.lines[-2][6:])["choices"][0]["finish_reason"] == "length"

    @property
    def error_code(self) -> str:
        return json.loads(self.lines[-2][6:])["error"]["code"]


@pytest.mark.slow
def test_sigterm_lets_running_requests_finish_and_takes_no_new_ones(start):
    server = start(*SMALL, "--shutdown-timeout", "300")
    tree = server.pids
    stream = Stream(server)
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "draining" in server.log, 20)
    refused = 0
    while stream.is_alive() and refused < 3:
        try:
            answer = server.post("/v1/completions", {"prompt": "x"})
            probes = [server.get(path).status_code for path in ("/readyz", "/health", "/livez")]
        except httpx.TransportError:
            break  # drained meanwhile
        assert answer.status_code == 503 and "retry-after" in answer.headers
        assert answer.json()["error"]["code"] == "draining"
        assert probes == [503, 503, 200]
        refused += 1
    assert refused, "the stream was over before the drain could be seen"
    stream.join(60)
    assert stream.is_whole
    assert server.process.wait(90) == 0
    assert not any(map(is_running, tree))


@pytest.mark.slow
def test_a_drain_refuses_nobody_who_cannot_know_better(start):
    """Clients that keep a connection open learn of the drain only by an answer over it."""
    server = start(*SMALL, "--shutdown-timeout", "300")
    body = {"prompt": "x", "max_tokens": 2}

    def last(answer: httpx.Response) -> None:
        assert answer.status_code == 200 and answer.headers["connection"] == "close"

    with contextlib.ExitStack() as stack:
        early, idle, busy = (stack.enter_context(httpx.Client(base_url=server.url, timeout=60)) for _ in range(3))
        with busy.stream("POST", "/v1/completions", json={**body, "max_tokens": 200, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            for client in (early, idle):
                assert client.post("/v1/completions", json=body).headers.get("connection") != "close"
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: "draining" in server.log, 20)
            last(early.post("/v1/completions", json=body))
            assert [line for line in lines if line][-1] == "data: [DONE]"
        last(busy.post("/v1/completions", json=body))  # though its answer from before the drain is over
        assert server.post("/v1/completions", body).status_code == 503  # over a new one
        assert server.process.wait(120) == 0  # and it does not wait for the idle one for ever, or the timeout of 300 s


@pytest.mark.slow
def test_after_the_shutdown_timeout_streams_are_cut_off_with_an_error(start):
    """Streams that still wait for their first token have not begun: not a byte of them is out, and what they get is a
    503, which a proxy sends on to another replica."""
    server = start(*SMALL, "--max-num-seqs", "1", "--shutdown-timeout", "0")
    stream = Stream(server)
    waiting = [post(server, "/v1/completions", LONG_STREAM), post(server, "/v1/chat/completions", LONG_CHAT)]
    wait_until(lambda: server.get("/load").json()["num_queued"] == 2, 20)
    time.sleep(0.2)
    assert not select.select(waiting, [], [], 0)[0], "a head without an event"
    assert stream.is_alive(), "the waiting ones did not wait"
    assert server.stop(timeout=20) == 0
    stream.join(90)
    assert stream.error is None and stream.lines[-1] == "data: [DONE]"
    assert stream.error_code == "aborted"
    for connection in waiting:
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert answer.status == 503 and answer.getheader("retry-after")
        assert json.loads(answer.read())["error"]["code"] == "aborted"


@pytest.mark.slow
def test_a_second_sigterm_ends_at_once_even_with_a_frozen_core(start):
    server = start(*SMALL, "--shutdown-timeout", "600")
    tree = server.pids
    Stream(server)
    os.kill(server.core_pid, signal.SIGSTOP)
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "draining" in server.log, 20)
    time.sleep(0.3)
    assert server.process.poll() is None
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(ENDS_SECONDS)
    wait_until(lambda: not any(map(is_running, tree)), 30)


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize("victim", ["api", "core"])
@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_kill_9_of_either_process_leaves_none_behind(start, victim, stopped):
    """Also when the other one is stopped and cannot notice anything itself (the core then; an API process stays)."""
    server = start(*SMALL)
    tree = server.pids
    api, core = server.process.pid, server.core_pid
    stream = Stream(server)
    if stopped:
        os.kill(core, signal.SIGSTOP)
    os.kill(api if victim == "api" else core, signal.SIGKILL)
    if victim == "api":
        server.process.wait(90)
    wait_until(lambda: not any(map(is_running, tree)), 30)
    stream.join(90)
    assert not stream.is_alive()
    if victim == "core":
        assert server.process.wait(90) == 1
        assert stream.error_code == "engine_dead"
        assert "signal 9 (the kernel does that when memory runs out)" in server.log


@pytest.mark.slow
def test_a_frozen_core_is_not_alive_and_comes_back(start):
    """SIGSTOP, though the watchdog would wait for five minutes; and an idle core that is frozen is seen too. At last a
    drain without requests ends at once."""
    server = start(*SMALL, "--watchdog-seconds", "300", "--shutdown-timeout", "300")
    assert server.get("/livez").status_code == server.get("/health").status_code == 200
    os.kill(server.core_pid, signal.SIGSTOP)
    assert wait_until(lambda: server.get("/livez").status_code == 503, 90) < ENDS_SECONDS
    refused = server.post("/v1/completions", {"prompt": "x", "max_tokens": 2})
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "not_alive", refused.text
    assert refused.headers["retry-after"] == "1"
    answer = server.get("/health")
    assert answer.status_code == 503 and "frozen" in answer.json()["error"]["message"]
    assert engine_metric(server, "alive") == 0 and engine_metric(server, "heartbeat_age_seconds") > 5
    os.kill(server.core_pid, signal.SIGCONT)
    wait_until(lambda: server.get("/health").status_code == 200, 20)
    assert engine_metric(server, "alive") == 1 and engine_metric(server, "heartbeat_age_seconds") < 5
    assert engine_metric(server, "stalled_seconds") == 0  # frozen, but without work
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 2}).status_code == 200
    began = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - began < 1.5 * ENDS_SECONDS


@pytest.mark.sampled(share=2)
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_requests_of_a_frozen_core_end_with_an_error_and_it_serves_again(start, ranks):
    """A stream under way, and a request that was sent while nobody knew."""
    server = start(*SMALL, "-tp", str(ranks), "--watchdog-seconds", "300")
    stream, core = Stream(server), server.core_pid
    os.kill(core, signal.SIGSTOP)
    waiting = server.post("/v1/completions", {"prompt": "x", "max_tokens": 2})
    stream.join(60)
    assert not stream.is_alive()
    assert waiting.status_code == 503 and waiting.json()["error"]["code"] == "engine_dead", waiting.text
    assert stream.error_code == "engine_dead" and "frozen" in stream.lines[-2]
    os.kill(core, signal.SIGCONT)
    wait_until(lambda: server.get("/health").status_code == 200, 20)
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 2}).status_code == 200
    assert server.stop() == 0


@pytest.mark.slow
def test_a_frozen_core_among_several_ends_its_own_requests_alone(start):
    server = start(*SMALL, "-dp", "2", "--watchdog-seconds", "300")
    streams = [Stream(server), Stream(server)]  # one on each: the second goes where there is less to do
    cores = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    os.kill(int(cores[0]), signal.SIGSTOP)
    for stream in streams:
        stream.join(60)
    failed = [stream for stream in streams if '"engine_dead"' in stream.lines[-2]]
    assert len(failed) == 1 and all(stream.is_whole for stream in streams if stream not in failed)
    os.kill(int(cores[0]), signal.SIGCONT)
    wait_until(lambda: server.get("/health").status_code == 200, 20)


STALL_ON_SIGNAL = """
import signal, time
signal.signal(signal.SIGUSR1, lambda *_: time.sleep(1000))
"""


@pytest.mark.slow
def test_a_stalled_core_is_noticed_dumps_its_stacks_and_ends(start, tmp_path):
    """Its main loop hangs while its other threads live on: a signal handler that sleeps does just that."""
    (tmp_path / "sitecustomize.py").write_text(STALL_ON_SIGNAL)
    server = start(*SMALL, "--health-stall-seconds", "1", "--watchdog-seconds", "30", env={"PYTHONPATH": str(tmp_path)})
    stream = Stream(server)
    os.kill(server.core_pid, signal.SIGUSR1)
    wait_until(lambda: server.get("/livez").status_code == 503, 25)
    assert "stalled" in server.get("/health").json()["error"]["message"]
    assert engine_metric(server, "stalled_seconds") > 1 and engine_metric(server, "heartbeat_age_seconds") < 5
    assert server.process.wait(90) == 1
    assert "Timeout (0:00:30)!" in server.log and "core_proc.py" in server.log
    stream.join(90)
    assert stream.error_code == "engine_dead"


@pytest.mark.slow
def test_sigterm_while_the_model_loads(launch):
    server = launch(*SMALL)
    wait_until(lambda: "importing the server" in server.log, 60)
    tree = server.pids
    assert server.stop() in (0, -signal.SIGTERM)
    wait_until(lambda: not any(map(is_running, tree)), 30)


def test_while_the_model_loads_the_server_is_alive_but_not_ready(launch):
    """(The port is taken before the core is ready; its number is found among this process's sockets.)"""
    port = free_port()
    server = launch(*SMALL, "--port", str(port))
    server.url = f"http://127.0.0.1:{port}"
    seen = set()

    def ready() -> bool:
        assert server.process.poll() is None, server.log
        try:
            live, health = server.get("/livez"), server.get("/health")
        except httpx.TransportError:
            return False
        assert live.status_code == 200
        if health.status_code == 503:
            answer = server.post("/v1/completions", {"prompt": "x"})
            seen.add((answer.status_code, answer.headers.get("retry-after")))
        return health.status_code == 200

    wait_until(ready, 120)
    assert seen <= {(503, "2"), (200, None)} and (503, "2") in seen
    assert server.stop() == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-model-len", "99999999"], ["max_model_len", "1024"]),
        (["--max-num-seqs", "0"], ["max_num_seqs"]),
        (["--max-num-batched-tokens", "4", "--max-num-seqs", "8"], ["max_num_batched_tokens"]),
        (["--ssl-keyfile", "x"], ["ssl_certfile"]),
        (["--chat-template", "/nowhere/template"], ["chat_template", "/nowhere/template"]),
        (["--host", "203.0.113.1"], ["203.0.113.1"]),
        (["--kv-cache-memory-bytes", "1"], ["kv"]),
    ],
)
def test_impossible_flags_give_one_line_and_exit_code_1(launch, flags, words):
    server = launch(*flags)
    assert server.process.wait(120) == 1
    lines = [line for line in server.log.splitlines() if "octavo: error:" in line]
    assert len(lines) == 1, server.log
    for word in words:
        assert word.lower() in lines[0].lower()
    assert "Traceback" not in server.log


def test_no_such_model_is_one_line(launch):
    server = launch(model="/nowhere/model")
    assert server.process.wait(120) == 1
    assert server.log.count("\n") == 1 and "/nowhere/model" in server.log
    assert list(server.temporary.iterdir()) == []


def test_a_port_in_use_is_one_line(launch, shared_server):
    server = launch("--port", str(shared_server.port))
    assert server.process.wait(120) == 1
    assert f"cannot listen on 127.0.0.1:{shared_server.port}" in server.log
    assert "Traceback" not in server.log


def test_the_api_process_has_neither_torch_nor_transformers(shared_server):
    """Its mapped files tell: torch cannot be imported without its libraries."""
    assert shared_server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1})
    mapped = Path(f"/proc/{shared_server.process.pid}/maps").read_text()
    assert "tokenizers" in mapped, "the test must be looking at the right thing"
    for name in ("torch", "transformers", "numpy", "sympy"):
        assert f"/{name}/" not in mapped
    assert "torch" in Path(f"/proc/{shared_server.core_pid}/maps").read_text()


@pytest.mark.slow
def test_an_idle_engine_uses_no_cpu(shared_server):
    """Below 1 % of a core over both processes, by the kernel's own count."""

    def ticks() -> int:
        total = 0
        for pid in (shared_server.process.pid, shared_server.core_pid):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
        return total

    shared_server.post("/v1/completions", {"prompt": "x", "max_tokens": 4})
    shares: list[float] = []
    while not shares or (shares[-1] >= 0.01 and len(shares) < 3):  # other programs make it more, never less
        time.sleep(0.5)
        before, seconds = ticks(), 3.0
        time.sleep(seconds)
        shares.append((ticks() - before) / os.sysconf("SC_CLK_TCK") / seconds)
    assert min(shares) < 0.01, shares


def test_nothing_of_us_is_left_on_disk_or_listening(shared_server):
    """Both sockets are gone from the disk once both sides are connected, and no port but ours is open."""
    left = [path.name for path in shared_server.temporary.iterdir()]
    assert [name for name in left if not name.startswith("octavo-batches-")] == []  # files that clients have sent
    inodes = set()
    for pid in (shared_server.process.pid, shared_server.core_pid):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(fd))
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                listening.append(int(fields[1].rsplit(":", 1)[1], 16))
    assert listening == [shared_server.port]
