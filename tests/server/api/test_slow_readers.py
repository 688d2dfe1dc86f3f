"""Clients that stop reading, or go away without a word, in every dialect at once: others do not notice, memory does not
grow, and the blocks of who has gone are free at once."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.run_queue import OwnTime
from support.serving import free_port

LONG = 30_000  # tokens, of which no test waits for the last
USER = [{"role": "user", "content": "The quick brown fox"}]
# Log-probabilities, where a dialect has them, make a stream that fills every buffer.
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": USER, "max_tokens": LONG, "logprobs": True, "top_logprobs": 60, "stream": True},
    ),
    "completions": ("/v1/completions", {"prompt": "fox", "max_tokens": LONG, "logprobs": 60, "stream": True}),
    "Responses": (
        "/v1/responses",
        {
            "input": USER,
            "max_output_tokens": LONG,
            "top_logprobs": 60,
            "stream": True,
            "include": ["message.output_text.logprobs"],
        },
    ),
    "Messages": ("/v1/messages", {"messages": USER, "max_tokens": LONG, "stream": True}),
    "Ollama's chat": (
        "/api/chat",
        {"messages": USER, "options": {"num_predict": LONG}, "logprobs": True, "top_logprobs": 60},
    ),
    "Ollama's generate": (
        "/api/generate",
        {"prompt": "fox", "options": {"num_predict": LONG}, "logprobs": True, "top_logprobs": 60},
    ),
}


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def server(start, port, tiny_model, tmp_path_factory):
    """One of a model that may talk for minutes, and does: no token ends its answers."""
    folder = tmp_path_factory.mktemp("model") / "endless"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"max_position_embeddings": LONG + 1_000, "eos_token_id": None}
    (folder / "config.json").write_text(json.dumps(config))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": None}))
    flags = (
        "--load-format",
        "dummy",
        "--max-num-seqs",
        "8",
        "--max-logprobs",
        "300",
        "--kv-cache-memory-bytes",
        "128MiB",
    )
    return start("--management-port", str(port), *flags, model=folder)


@contextlib.contextmanager
def unread(server, names: list[str]) -> Iterator[None]:
    """Requests whose answers have begun, and are not read. At the end their sockets are closed."""
    with contextlib.ExitStack() as stack:
        for name in names:
            path, body = STREAMS[name]
            content = json.dumps(body).encode()
            reader = stack.enter_context(socket.socket())
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            reader.settimeout(30)
            reader.connect(("127.0.0.1", server.port))
            reader.sendall(
                b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
                % (path.encode(), len(content), content)
            )
            assert reader.recv(12) == b"HTTP/1.1 200", name
        yield


def used_blocks(port: int) -> int:
    blocks = httpx.get(f"http://127.0.0.1:{port}/octavo/blocks", timeout=90).json()
    number: int = blocks["used"]
    return number


def resident_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def neighbour(server) -> str:
    body = {"messages": USER, "temperature": 0, "max_tokens": 20}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


@pytest.mark.parametrize("name", STREAMS)
def test_clients_that_disconnect_free_their_blocks(server, port, name):
    with unread(server, [name]):
        deadline = time.monotonic() + 90
        while not used_blocks(port):
            assert time.monotonic() < deadline, "nothing has begun"
    deadline = time.monotonic() + 90
    while used_blocks(port) or server.get("/load").json()["server_load"]:
        assert time.monotonic() < deadline, "the engine goes on for nobody"
        time.sleep(0.02)


def test_a_response_that_was_left_is_not_stored(server, port):
    path, body = STREAMS["Responses"]
    with httpx.stream("POST", server.url + path, json=body, timeout=90) as stream:
        lines = stream.iter_lines()
        begun = json.loads(next(line for line in lines if line.startswith("data: "))[6:])["response"]
        assert begun["status"] == "in_progress" and server.get(f"{path}/{begun['id']}").status_code == 404
    deadline = time.monotonic() + 90
    while used_blocks(port):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert server.get(f"{path}/{begun['id']}").status_code == 404


@pytest.mark.slow
def test_clients_that_stop_reading_cost_little_and_harm_no_other(server, port):
    alone = neighbour(server)
    with unread(server, list(STREAMS)):
        time.sleep(2)  # the buffers of the sockets are full
        before = resident_mib(server.process.pid)
        for _ in range(4):
            own = OwnTime(server.pids)
            assert neighbour(server) == alone
            assert own.seconds < 5
            time.sleep(0.5)
        grown = resident_mib(server.process.pid) - before
        assert grown < 100, f"{grown:.0f} MiB more for what nobody reads"
    assert neighbour(server) == alone


@pytest.mark.slow
def test_a_file_of_a_batch_is_not_held_in_memory_for_who_stops_reading(server):
    line = json.dumps({"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x" * 900}})
    files = {"file": ("in.jsonl", f"{line}\n".encode() * 40_000)}
    file_id = httpx.post(f"{server.url}/v1/files", files=files, data={"purpose": "batch"}, timeout=60).json()["id"]
    before = resident_mib(server.process.pid)
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            reader = stack.enter_context(server.connect())
            reader.sendall(f"GET /v1/files/{file_id}/content HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert reader.recv(12) == b"HTTP/1.1 200"
        time.sleep(2)
        assert resident_mib(server.process.pid) - before < 20  # the file has 40
        assert neighbour(server)
    assert server.client().files.delete(file_id).deleted
