"""Engines over several nodes: who may take part, what goes over the wires, and that they end as a whole."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.serving import Engine, are_gone, free_port, rank_pids, tiny_model
from support.split_cases import SMALL
from support.tiny_models import make_model

from octavo import LLM, SamplingParams
from octavo.engine.args import EngineArgs
from octavo.executor.channel_group import ChannelGroup
from octavo.executor.node_group import NodeGroup
from octavo.executor.nodes import NodeRanks, fingerprint
from octavo.executor.stage_links import ChannelLink
from octavo.executor.tls_channel import Greeted, RefusedError, TlsChannel, accept, connect
from octavo.interface.engine_config import ParallelConfig
from octavo.layers.parallel import SharedMemoryGroup, sum_in_order
from octavo.system.channel import Kind
from octavo_kernels.cpu import argmax, create_shared_memory

TOKEN = b"a secret"
WANTED = {(rank, role) for rank in (1, 2) for role in ("control", "tensors", "beats")}


class Listener:
    """Node 0's side of one handshake after another."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.address = self.socket.getsockname()
        self.greeted: list[Greeted | None] = []

    def take(self, token: bytes = TOKEN) -> threading.Thread:
        def run() -> None:
            self.greeted.append(accept(self.socket.accept()[0], token, WANTED))

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def pair(self, rank: int = 1, role: str = "tensors") -> tuple[TlsChannel, TlsChannel]:
        thread = self.take()
        client = connect(self.address, TOKEN, rank, role, 30)
        thread.join()
        greeted = self.greeted[-1]
        assert greeted is not None and (greeted.node, greeted.role) == (rank, role)
        return greeted.channel, client


@pytest.fixture
def listener() -> Listener:
    return Listener()


def received(channel: TlsChannel) -> list[tuple[Kind, bytearray]]:
    channel.wait(30)
    return list(channel.receive())


def test_both_directions_carry_frames(listener: Listener) -> None:
    server, client = listener.pair()
    for number in range(3):
        server.send(Kind.STEP, bytes([number]) * 100_000)
        client.send(Kind.SUM, b"")
        server.flush(5)
        frames: list[tuple[Kind, bytearray]] = []
        while not frames:
            frames = received(client)
        assert frames == [(Kind.STEP, bytearray([number]) * 100_000)] and received(server) == [(Kind.SUM, bytearray())]


def test_a_wrong_token_is_refused_on_both_sides(listener: Listener) -> None:
    thread = listener.take()
    with pytest.raises(RefusedError, match="another OCTAVO_CLUSTER_TOKEN"):
        connect(listener.address, b"wrong", 1, "control", 30)
    thread.join()
    assert listener.greeted == [None]
    thread = listener.take(b"of another node 0")
    with pytest.raises(RefusedError):
        connect(listener.address, TOKEN, 1, "control", 30)
    thread.join()


def test_a_rank_that_is_not_expected_is_not_taken(listener: Listener) -> None:
    thread = listener.take()
    with pytest.raises(ConnectionError, match="node 3"):
        connect(listener.address, TOKEN, 3, "control", 0)
    thread.join()
    assert listener.greeted == [None]


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HTTP/1.1\r\n\r\n" * 20, b"\x16\x03\x01\x00\x20" + bytes(64), b"\x16\x03\x01\xff\xff"]
)
def test_a_port_scan_is_harmless(sent: bytes, listener: Listener) -> None:
    thread = listener.take()
    with socket.create_connection(listener.address) as scanner:
        scanner.sendall(sent)
        with contextlib.suppress(OSError):  # it has been closed already
            scanner.shutdown(socket.SHUT_WR)
        thread.join(60)
    assert listener.greeted == [None]


class Recorder:
    """Between a node and node 0: hands on and keeps what the node sends."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.sent = b""
        self._address = address
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        node = self.listener.accept()[0]
        self.upstream = socket.create_connection(self._address)
        threading.Thread(target=self._copy, args=(self.upstream, node), daemon=True).start()
        while data := node.recv(65536):
            self.sent += data
            self.upstream.sendall(data)

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(65536):
            target.sendall(data)


def test_replayed_messages_are_refused(listener: Listener) -> None:
    """A frame that comes again, and a whole connection."""
    recorder = Recorder(listener.address)
    thread = listener.take()
    client = connect(recorder.listener.getsockname(), TOKEN, 1, "control", 30)
    thread.join()
    handshake = len(recorder.sent)
    client.send(Kind.SUM, b"1")
    greeted = listener.greeted[-1]
    assert greeted is not None and received(greeted.channel) == [(Kind.SUM, b"1")]
    recorder.upstream.sendall(recorder.sent[handshake:])
    with pytest.raises(EOFError, match="not authentic"):
        received(greeted.channel)
    thread = listener.take()
    with socket.create_connection(listener.address) as again:
        again.sendall(recorder.sent)
        thread.join(60)
    assert listener.greeted[-1] is None


@pytest.mark.parametrize("wrong", ["changed", "cut", "left out"])
def test_a_frame_that_was_not_sent_so_is_refused(wrong: str, listener: Listener) -> None:
    server, client = listener.pair()
    client._push = lambda: None  # type: ignore[method-assign]
    client.send(Kind.SUM, b"12345678")
    data = bytearray(client._unsent)
    if wrong == "changed":
        data[-1] ^= 1
    elif wrong == "cut":
        data[4] -= 1
        del data[-1]
    else:
        data.clear()
    client._unsent.clear()
    client.send(Kind.SUM, b"next")
    client._socket.sendall(data + client._unsent)
    with pytest.raises(EOFError, match="not authentic"):
        received(server)


def test_traffic_between_nodes_cannot_be_read(listener: Listener) -> None:
    recorder = Recorder(listener.address)
    thread = listener.take()
    client = connect(recorder.listener.getsockname(), TOKEN, 1, "control", 30)
    thread.join()
    client.send(Kind.SUM, b"a private prompt")
    greeted = listener.greeted[-1]
    assert greeted is not None and received(greeted.channel) == [(Kind.SUM, b"a private prompt")]
    assert b"private" not in recorder.sent and TOKEN not in recorder.sent


def test_one_thread_may_send_while_another_receives(listener: Listener) -> None:
    """Each direction of a connection is whole when both are busy: node 0 hands on stages' states in such a thread."""
    server, client = listener.pair()
    frames = [os.urandom(size) for size in (1, 16_384, 300_000) * 30]

    def send() -> None:
        for data in frames:
            server.send(Kind.TENSOR, data)
            assert server.flush(60)

    thread = threading.Thread(target=send)
    thread.start()
    sent, got, back = iter(frames), list[bytes](), list[bytes]()
    while len(got) < len(frames) or len(back) < len(frames):
        if data := next(sent, b""):
            client.send(Kind.TENSOR, data)
        client.wait(0.01)
        got += [bytes(payload) for _, payload in client.receive()]
        back += [bytes(payload) for _, payload in server.receive()]
    thread.join()
    assert got == frames and back == frames


def test_ranks_add_up_in_order(listener: Listener) -> None:
    pairs = [listener.pair(rank) for rank in (1, 2)]
    groups = [ChannelGroup([server for server, _ in pairs], 0, 3, 10)]
    groups += [ChannelGroup([client], rank, 3, 10) for rank, (_, client) in enumerate(pairs, 1)]
    torch.manual_seed(0)
    values = [torch.randn(5, 300).to(torch.bfloat16) * 10**rank for rank in range(3)]
    expected, results = sum_in_order(values), [value.clone() for value in values]
    smallest: list[list[int]] = []

    def run(rank: int) -> None:
        groups[rank].all_reduce(results[rank])
        smallest.append(groups[rank].smallest([rank + 5, 9 - rank]))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(result.equal(expected) for result in results) and smallest == [[5, 7]] * 3
    pairs[1][1].close()
    groups[1]._send(results[1].view(-1).view(torch.uint8).numpy().tobytes())
    with pytest.raises(RuntimeError, match="rank 2"):
        groups[0].all_reduce(results[0])


def test_ranks_of_several_nodes_add_up_in_order(listener: Listener) -> None:
    """Two on each of three nodes: within a node through shared memory, which shows nowhere."""
    pairs = [listener.pair(node) for node in (1, 2)]
    across = [ChannelGroup([server for server, _ in pairs], 0, 3, 200, "node")]
    across += [ChannelGroup([client], node, 3, 200, "node") for node, (_, client) in enumerate(pairs, 1)]
    groups: list[NodeGroup] = []
    for node in range(3):
        descriptor = create_shared_memory(2, 200.0, has_cores=False)
        for i in range(2):
            local = SharedMemoryGroup(descriptor, i, 2, 2 * node)
            groups.append(NodeGroup(local, None if i else across[node], node, 3))
        os.close(descriptor)
    assert [group.rank for group in groups] == list(range(6))
    torch.manual_seed(0)
    values = [torch.randn(1100, 1000).to(torch.bfloat16) * 10**rank for rank in range(6)]  # more than a slot
    whole = torch.randn(5, 11)
    found: dict[int, tuple[torch.Tensor, ...]] = {}

    def run(group: NodeGroup) -> None:
        mine, own = values[group.rank].clone(), whole[:, 2 * group.rank : 2 * group.rank + 2]
        group.all_reduce(mine)
        assert group.all_reduce(values[group.rank].float(), torch.bfloat16).equal(mine), "rounded once"
        gathered, best = group.all_gather(own, 11), group.best(*argmax(own.contiguous()), 2 * group.rank, 5)
        found[group.rank] = mine, gathered, *best, torch.tensor(group.smallest([group.rank + 5, 9 - group.rank]))
        group.check()

    threads = [threading.Thread(target=run, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    expected = sum_in_order(values), whole, *argmax(whole), torch.tensor([5, 4])
    for rank in range(6):
        assert all(ours.equal(theirs) for ours, theirs in zip(found[rank], expected, strict=True)), rank


def test_a_node_that_goes_before_all_have_come_may_come_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CLUSTER_TOKEN", TOKEN.decode())
    args = EngineArgs(
        str(tiny_model(tmp_path)), load_format="dummy", nnodes=2, tensor_parallel_size=2, master_port=free_port()
    )
    config = replace(args.create_engine_config(), parallel=ParallelConfig(3, nnodes=3, master_port=args.master_port))
    found: list[NodeRanks] = []
    waiting = threading.Thread(target=lambda: found.append(NodeRanks(config)))
    waiting.start()

    def join(rank: int, said: str) -> list[TlsChannel]:
        address = "127.0.0.1", args.master_port
        channels = [connect(address, TOKEN, rank, role, 10) for role in ("control", "tensors", "beats")]
        channels[0].send(Kind.JOIN, said.encode())
        return channels

    nodes = [join(1, fingerprint(config)), join(2, "of another model")]
    assert received(nodes[1][0]) == [(Kind.FAILED, bytearray())]
    for channel in nodes[0]:
        channel.close()
    nodes.append(join(2, fingerprint(config)))
    waiting.join(1)
    assert waiting.is_alive()
    last = join(1, fingerprint(config))
    waiting.join(60)
    assert received(last[0]) == [(Kind.JOIN, bytearray())]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", args.master_port))
    found[0].close()


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.sampled(share=4)
@pytest.mark.parametrize(
    ("victim", "flags"), [(0, ("-tp", "2")), (1, ("-tp", "2")), (1, ("-pp", "2")), (3, ("-tp", "4"))]
)
def test_two_nodes_serve_and_end_together(victim: int, flags: tuple[str, str], tmp_path: Path) -> None:
    """On addresses of their own. Node 0 is not ready without the other, and goes on waiting after one that has another
    token, and one that has other flags. One of its ranks is killed: of each node the first, or another of the second.
    The other node tells probes how it is, and serves nothing else."""
    port, env = free_port(), {"OCTAVO_CLUSTER_TOKEN": "secret", "OMP_NUM_THREADS": "1"}
    ranks = int(flags[1])
    shared = [*flags, "--nnodes", "2", "--master-addr", "127.0.0.2", "--master-port", str(port)]
    command = [
        sys.executable,
        "-m",
        "octavo.cli.main",
        "serve",
        str(tiny_model(tmp_path / "other")),
        "--load-format",
        "dummy",
        *shared,
        "--node-rank",
        "1",
        "--headless",
        "--host",
        "127.0.0.3",
        "--port",
        str(port),
    ]

    def node(*flags: str, token: str = "secret") -> subprocess.Popen[str]:
        own = {**os.environ, **env, "OCTAVO_CLUSTER_TOKEN": token}
        return subprocess.Popen([*command, *flags], env=own, stderr=subprocess.PIPE, text=True)

    engine = Engine(tmp_path, *shared, env=env)
    nodes: list[subprocess.Popen[str]] = []

    def other_nodes() -> None:
        wait_for(port)
        for name in ("readyz", "health"):
            with pytest.raises(urllib.error.HTTPError, match="503"):
                urllib.request.urlopen(f"http://127.0.0.1:{engine.management_port}/{name}")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        if victim == 0:
            wrong, says = node("--seed", "3"), "the same model, flags and version"
        else:
            wrong, says = node(token="other"), "another OCTAVO_CLUSTER_TOKEN"
        assert wrong.wait(60) == 1 and wrong.stderr is not None
        last = wrong.stderr.read().splitlines()[-1]
        assert last.startswith("octavo: error: ") and says in last
        nodes.append(node())
        status, why = probe(port)
        assert status == 503 and why.startswith("not_ready: ") and probe(port, "/livez")[0] == 200

    thread = threading.Thread(target=other_nodes)
    thread.start()
    try:
        with engine:
            thread.join()
            assert engine.complete("hello") == 200
            assert [probe(port, f"/{name}")[0] for name in ("health", "livez", "readyz")] == [200] * 3
            assert probe(port, "/v1/models")[0] == 404 and probe(port, method="POST")[0] == 405
            for rank in range(1, ranks):
                told = re.compile(rf'octavo:rank_steps_total\{{[^}}]*rank="{rank}"\}} [1-9]')
                engine.wait_until_told(told.search)
            crowd = engine.crowd(2, 1000)
            time.sleep(0.5)
            started = time.monotonic()
            children = [*rank_pids(engine.core_pid), *rank_pids(nodes[0].pid)]
            assert len(children) == ranks - 2
            os.kill((engine.core_pid, nodes[0].pid, *children)[min(victim, ranks - 1)], signal.SIGKILL)
            while victim == 0 and (said := probe(port))[0] == 200:
                time.sleep(0.02)
            assert victim or (said[0] == 503 and "rank 1 (node 1) failed" in said[1])
            assert engine.process.wait(30) == 1
            assert nodes[0].wait(30) == (-signal.SIGKILL if victim == 1 else 1)
            assert are_gone(children)
            assert time.monotonic() - started < 10
            for request in crowd:
                request.join(30)
                assert not request.is_alive()
            # The kernel closes what was killed once it has its memory back, which a busy machine takes seconds for.
            said_there = {
                1: r"rank 1 \(node 1\) has (closed|been silent)",
                3: rf"rank 3 \(process {[0, *children][-1]}\) was",
            }
            assert re.search(said_there.get(victim, ""), engine.log)
    finally:
        for process in nodes:
            process.kill()


@pytest.mark.sampled(share=2)
@pytest.mark.slow
@pytest.mark.parametrize(("flags", "count"), [(("-tp", "2", "-pp", "2"), 2), (("-pp", "3"), 3)])
def test_each_node_has_a_stage(flags: tuple[str, ...], count: int, tmp_path: Path) -> None:
    """On addresses of their own, and the answers are those of one process, after guesses too. When the last node, whose
    samples count, is killed, all end."""
    port, env = free_port(), {"OCTAVO_CLUSTER_TOKEN": "secret", "OMP_NUM_THREADS": "1"}
    guesses = json.dumps({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2})
    shared = [
        *flags,
        "--nnodes",
        str(count),
        "--master-addr",
        "127.0.0.2",
        "--master-port",
        str(port),
        "--dtype",
        "float32",
        "--load-format",
        "auto",
        "--speculative-config",
        guesses,
        "--max-num-batched-tokens",
        "64",
        "--max-num-seqs",
        "4",
    ]
    engine = Engine(tmp_path, *shared, env=env)
    make_model("LlamaConfig", SMALL | {"num_key_value_heads": 2, "num_hidden_layers": 5}).save_pretrained(
        tmp_path / "model"
    )
    prompts = [[*range(start, start + 40)] * 2 for start in range(6)]
    llm = LLM(str(tmp_path / "model"), dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    answers: dict[int, str] = {}

    def ask(number: int) -> None:
        answers[number] = engine.text(
            {"model": "tiny", "prompt": prompts[number], "temperature": 0, "max_tokens": 30, "ignore_eos": True}
        )

    command = [
        sys.executable,
        "-m",
        "octavo.cli.main",
        "serve",
        str(tmp_path / "model"),
        *shared,
        "--headless",
        "--port",
        str(port),
    ]
    nodes = [
        subprocess.Popen(
            [*command, "--node-rank", str(number), "--host", f"127.0.0.{number + 2}"], env={**os.environ, **env}
        )
        for number in range(1, count)
    ]
    try:
        with engine:
            clients = [threading.Thread(target=ask, args=(number,)) for number in range(len(prompts))]
            for client in clients:
                client.start()
            for client in clients:
                client.join(60)
            assert [answers.get(number) for number in range(len(prompts))] == [out.outputs[0].text for out in outputs]
            crowd = engine.crowd(2, 150)
            time.sleep(0.2)
            nodes[-1].kill()
            assert engine.process.wait(30) == 1
            assert [node.wait(30) for node in nodes] == [1] * (count - 2) + [-signal.SIGKILL]
            for request in crowd:
                request.join(5)
    finally:
        for process in nodes:
            process.kill()


def test_node_0_hands_on_what_stages_elsewhere_send(listener: Listener) -> None:
    """From each node to the next, in their order, whatever the size; beside what it sends itself."""
    channels, clients = zip(*(listener.pair(node) for node in (1, 2)), strict=True)
    first = ChannelLink(channels[0], 1, 10, channels)
    (middle, last), states = (ChannelLink(client, 0, 10) for client in clients), torch.randn(3, 5)
    first.send([states])
    assert torch.equal(middle.receive()[0], states)
    for size in (1, 7, 5000):
        sent = [torch.randn(size, 300), torch.randn(size, 2).bfloat16()]
        thread = threading.Thread(target=middle.send, args=(sent,))
        thread.start()
        first.send([states])
        assert all(map(torch.equal, last.receive(), sent))
        thread.join(60)
        assert torch.equal(middle.receive()[0], states)


def probe(port: int, path: str = "/health", method: str = "GET") -> tuple[int, str]:
    """The other node's answer, and what it says is wrong. Waits until it listens."""
    url, until = f"http://127.0.0.3:{port}{path}", time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=5) as answer:
                return answer.status, ""
        except urllib.error.HTTPError as error:
            said = json.load(error)["error"]
            return error.code, f"{said['code']}: {said['message']}"
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.05)


def wait_for(port: int) -> None:
    until = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.2", port)).close()
            return
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.1)
