"""/octavo/blocks says of every block of the KV cache what it is, without asking the engine."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from base64 import b64decode
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import httpx
import msgspec
import pytest
import zmq
from support.serving import free_port

from octavo.interface.block_map import CACHED, PARTIAL


@pytest.fixture(scope="module")
def server(start, port, events, tiny_model, tmp_path_factory):
    """One of a model that takes several seconds for an answer: there is time to look."""
    folder = tmp_path_factory.mktemp("model") / "slow"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 16, "max_position_embeddings": 2_048}
    (folder / "config.json").write_text(json.dumps(config))
    flags = ("--load-format", "dummy", "--block-size", "16", "--max-num-seqs", "4", "--kv-cache-memory-bytes", "64MiB")
    config = {"enable_kv_cache_events": True, **events}
    return start("--management-port", str(port), *flags, "--kv-events-config", json.dumps(config), model=folder)


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def events() -> Iterator[dict[str, str]]:
    """Where the server publishes KV events. Paths of sockets must be short."""
    with tempfile.TemporaryDirectory() as folder:
        yield {"endpoint": f"ipc://{folder}/events", "replay_endpoint": f"ipc://{folder}/replay"}


@pytest.fixture
def blocks(server, port) -> Iterator[Callable[..., dict[str, Any]]]:
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=90) as client:
        yield lambda **query: client.get("/octavo/blocks", params=query).raise_for_status().json()


def stream(server, prompt: list[int], max_tokens: int) -> Iterator[str]:
    """The id of a request that has begun to answer; it is left when the iterator is closed."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line[6:])["id"]


def settled(blocks, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The map once it is as wanted, or after half a minute."""
    until = time.monotonic() + 90
    while not wanted(found := blocks()) and time.monotonic() < until:
        time.sleep(0.02)
    return found


@pytest.mark.slow
def test_blocks_are_free_used_shared_and_then_cached(server, blocks):
    """Two requests that begin with the same 512 tokens hold 32 blocks together, cached when both have left."""
    assert httpx.post(
        server.url + "/v1/completions", json={"prompt": "warm up", "max_tokens": 1}, timeout=60
    ).is_success
    before = settled(blocks, lambda now: not now["used"])
    cells = b64decode(before["cells"])
    assert before["block_size"] == 16 and before["num_blocks"] == len(cells) > 80
    assert before["free"] + before["cached"] == before["num_blocks"] and not before["used"] | before["shared"]
    prompt = [3 + i % 50 for i in range(512)]
    first, second = stream(server, [*prompt, 7], 1_500), stream(server, [*prompt, 8], 1_500)
    one = next(first)
    two = next(second)
    now = blocks()
    assert now["shared"] == 32 and now["used"] >= 34
    assert now["free"] + now["used"] + now["cached"] == now["num_blocks"]
    assert [request["request_id"] for request in now["running"]] == [one[5:], two[5:]]
    counts = [count for request in now["running"] for count in request["num_tokens"]]
    assert all(513 < count < 2_013 for count in counts) and now["unfilled"] == sum(-count % 16 for count in counts)
    assert sum(cell & 0x3F == 2 for cell in b64decode(now["cells"])) == 32
    [ids], [others] = (blocks(request_id=name)["block_ids"] for name in (one, two))
    assert ids[:32] == others[:32] and not set(ids[32:]) & set(others[32:])
    cells = b64decode(blocks()["cells"])
    assert all(cells[i - 1] & 0x3F for i in ids[:32])
    first.close()
    second.close()
    after = settled(blocks, lambda found: not found["used"])
    assert after["used"] == after["shared"] == after["unfilled"] == 0 and not after["running"]
    assert after["cached"] >= before["cached"] + 32
    assert {b64decode(after["cells"])[i - 1] for i in ids[:32]} == {0x40}, "full, cached and held by nobody"
    assert blocks(request_id=one)["block_ids"] == [], "it has ended"


def told(endpoint: str) -> set[int]:
    """The blocks that one knows of who asks for all KV events."""
    known: set[int] = set()
    numbers = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as replay:
        replay.set(zmq.RCVTIMEO, 30_000)
        replay.connect(endpoint)
        replay.send_multipart((b"", bytes(8)))
        while payload := (frames := replay.recv_multipart())[3]:
            numbers.append(int.from_bytes(frames[2], "big"))
            for event in msgspec.msgpack.decode(payload)[1]:
                if event["type"] == "BlockRemoved":
                    known -= set(event["block_hashes"])
                    continue
                assert event["type"] == "BlockStored"
                assert len(event["token_ids"]) == 16 * len(event["block_hashes"])
                for parent, own in pairwise([event["parent_block_hash"], *event["block_hashes"]]):
                    assert own not in known and (parent is None or parent in known)
                    known.add(own)
    assert numbers == list(range(len(numbers)))
    return known


def test_kv_events_tell_their_reader_which_blocks_are_cached(server, blocks, events):
    """After requests side by side, samples that fork and one that is left."""
    prompt = [3 + i % 50 for i in range(200)]
    left = stream(server, prompt, 300)
    next(left)
    left.close()
    body = {"prompt": [*prompt[:100], *range(60, 90)], "max_tokens": 40, "n": 3, "ignore_eos": True, "cache_salt": "s"}
    assert server.post("/v1/completions", body).is_success
    cells = b64decode(settled(blocks, lambda now: not now["used"])["cells"])
    cached = sum(cell & (CACHED | PARTIAL) == CACHED for cell in cells)
    until = time.monotonic() + 90
    while (known := len(told(events["replay_endpoint"]))) != cached and time.monotonic() < until:
        time.sleep(0.05)  # the last batch may be on its way
    assert known == cached > 12 + 8


def test_the_main_port_has_no_map(server):
    """It tells how busy others are: for operators alone."""
    assert server.get("/octavo/blocks").status_code == 404
