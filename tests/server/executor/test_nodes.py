"""Engines over several nodes: who may take part, what goes over the wires, and that they end as a whole."""

from __future__ import annotations

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
from support.node_listener import TOKEN, Listener, received
from support.real_durations import ENDS_SECONDS, timed_alone
from support.serving import Engine, are_gone, free_port, rank_pids, tiny_model
from support.split_cases import SMALL
from support.tiny_models import make_model

from octavo import LLM, SamplingParams
from octavo.engine.args import EngineArgs
from octavo.executor.channel_group import ChannelGroup
from octavo.executor.node_group import NodeGroup
from octavo.executor.nodes import NodeRanks, fingerprint
from octavo.executor.stage_links import ChannelLink
from octavo.executor.tls_channel import TlsChannel, connect
from octavo.interface.engine_config import ParallelConfig
from octavo.layers.parallel import SharedMemoryGroup, sum_in_order
from octavo.system.channel import Kind
from octavo_kernels.cpu import argmax, create_shared_memory


@pytest.fixture
def listener() -> Listener:
    return Listener()


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
@timed_alone
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
            killed = time.monotonic()
            children = [*rank_pids(engine.core_pid), *rank_pids(nodes[0].pid)]
            assert len(children) == ranks - 2
            os.kill((engine.core_pid, nodes[0].pid, *children)[min(victim, ranks - 1)], signal.SIGKILL)
            while victim == 0 and (said := probe(port))[0] == 200:
                time.sleep(0.02)
            assert victim or (said[0] == 503 and "rank 1 (node 1) failed" in said[1])
            assert engine.process.wait(90) == 1
            assert nodes[0].wait(90) == (-signal.SIGKILL if victim == 1 else 1)
            assert are_gone(children)
            assert time.monotonic() - killed < ENDS_SECONDS
            for request in crowd:
                request.join(90)
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
            assert engine.process.wait(90) == 1
            assert [node.wait(90) for node in nodes] == [1] * (count - 2) + [-signal.SIGKILL]
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
