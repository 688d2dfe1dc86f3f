"""KV events reach subscribers as vLLM's do. That they say what the cache holds, `test_scheduler_machine` shows."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from octavo import LLM, SamplingParams
from octavo.core.kv_events import LogEntry
from octavo.core.prefix_hash import block_hash, root_hash
from octavo.engine.args import EngineArgs
from octavo.engine.kv_events.config import binds, parse_kv_events_config
from octavo.engine.kv_events.publisher import KVEventsPublisher
from octavo.errors import ConfigError


# What vLLM's examples/features/kv_events/kv_events_subscriber.py decodes, field by field.
class Event(msgspec.Struct, tag=True):
    pass


class BlockStored(Event):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class BlockRemoved(Event):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(Event):
    pass


class KVEventBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


decode = msgspec.msgpack.Decoder(KVEventBatch).decode
Frames = list[bytes]


@pytest.fixture
def endpoints(tmp_path: Path) -> dict[str, Any]:
    """A configuration that says where, and nothing else."""
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{tmp_path}/events",
        "replay_endpoint": f"ipc://{tmp_path}/replay",
        "topic": "kv@pod@model",
    }


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    with zmq.Context() as context:
        yield context
        context.destroy(linger=0)


def subscribe(context: zmq.Context, endpoint: str, hwm: int = 1000) -> zmq.Socket:
    socket = context.socket(zmq.SUB)
    socket.set_hwm(hwm)
    socket.setsockopt(zmq.RCVTIMEO, 30_000)
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    socket.subscribe(b"kv@")
    socket.connect(endpoint)
    assert monitor.poll(30_000)
    socket.disable_monitor()
    time.sleep(0.5)  # until the publisher knows of it: what was sent before is not for it
    return socket


def ask_again(context: zmq.Context, endpoint: str, first: int) -> list[Frames]:
    """The batches from that number on that are kept, as a subscriber of vLLM's asks for them."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.RCVTIMEO, 30_000)
    socket.connect(endpoint)
    socket.send_multipart((b"", first.to_bytes(8, "big")))
    batches = []
    while (frames := socket.recv_multipart())[-1]:
        assert frames[0] == b""
        batches.append(frames[1:])
    assert frames == [b"", b"", b"\xff" * 8, b""]
    return batches


def number_of(frames: Frames) -> int:
    return int.from_bytes(frames[1], "big")


def test_a_subscriber_of_vllms_reads_them(endpoints, context) -> None:
    publisher = KVEventsPublisher(parse_kv_events_config(endpoints))
    publisher.start((None, 128))
    socket = subscribe(context, endpoints["endpoint"])
    first = block_hash(root_hash("tenant \ud800"), [1, 2])
    second = block_hash(first, [3, 4])
    log: list[LogEntry] = []
    for group in (0, 1):
        log += [(group, first, None, (1, 2), "tenant \ud800", None), (group, second, first, (3, 4), None, None)]
    log += [second + b"\1", first + b"\1", (1, first, None, (1, 2), None, "a@b@digest")]
    publisher.publish(log)
    publisher.publish([None])
    names = [int.from_bytes(one[-8:], "big") for one in (first, second)]
    stored = BlockStored(
        names, None, [1, 2, 3, 4], 2, None, "GPU", None, [("tenant ?",), None], 0, "full_attention", None
    )
    window = msgspec.structs.replace(
        stored, group_idx=1, kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=128
    )
    again = msgspec.structs.replace(window, block_hashes=names[:1], token_ids=[1, 2], extra_keys=None, lora_name="a@b")
    topic, number, payload = socket.recv_multipart()
    batch = decode(payload)
    assert (topic, number) == (b"kv@pod@model", bytes(8)) and abs(batch.ts - time.time()) < 60
    assert batch.events == [stored, window, BlockRemoved(names[::-1], "GPU", 1), again]
    assert batch.data_parallel_rank == 0
    topic, number, payload = socket.recv_multipart()
    assert number == b"\0\0\0\0\0\0\0\1" and decode(payload).events == [AllBlocksCleared()]
    publisher.close()


def test_a_subscriber_that_is_late_or_slow_asks_again(endpoints, context) -> None:
    """What it does not take is dropped, and the numbers say so: nobody waits and nothing grows."""
    config = parse_kv_events_config(endpoints | {"hwm": 10, "buffer_steps": 3000})
    publisher = KVEventsPublisher(config)
    publisher.start([None])
    tokens = tuple(range(10**6, 10**6 + 1000))

    def publish(count: int) -> None:
        for _ in range(count):
            publisher.publish([(0, bytes(32), None, tokens, None, None)])
        while publisher._waiting.qsize():
            time.sleep(0.01)

    publish(1)
    slow, taken = subscribe(context, endpoints["endpoint"], hwm=10), []
    publish(4000)
    while slow.poll(1000):
        taken.append(number_of(slow.recv_multipart()))
    assert taken[:10] == list(range(1, 11)), "the oldest are kept"
    assert taken == sorted(set(taken)) and len(taken) < 3000, "its queue has no end"
    publish(1)
    gap = number_of(slow.recv_multipart())
    assert gap == 4001 > taken[-1] + 1
    late = ask_again(context, endpoints["replay_endpoint"], 0)
    assert [number_of(frames) for frames in late] == list(range(1002, 4002)), "buffer_steps are kept"
    assert late[0][0] == b"kv@pod@model" and decode(late[-1][2]).events[0].token_ids == list(tokens)
    assert [number_of(frames) for frames in ask_again(context, endpoints["replay_endpoint"], 4000)] == [4000, 4001]
    publisher.close()


def test_batches_that_nobody_sends_in_time_are_dropped_by_number(endpoints, context) -> None:
    publisher = KVEventsPublisher(parse_kv_events_config(endpoints | {"max_queue_size": 3}))
    for _ in range(5):
        publisher.publish([None])
    publisher.start([None])
    while publisher._waiting.qsize():
        time.sleep(0.01)
    publisher.publish([None])
    numbers: list[int] = []
    while 5 not in numbers:
        numbers = [number_of(frames) for frames in ask_again(context, endpoints["replay_endpoint"], 0)]
    assert numbers == [0, 1, 2, 5]
    publisher.close()


def test_an_offline_engine_publishes_and_ends(endpoints, context, tiny_checkpoints: dict[str, Path]) -> None:
    llm = LLM(
        str(tiny_checkpoints["llama"]),
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=128,
        kv_events_config=endpoints,
        num_gpu_blocks_override=16,
    )
    socket = subscribe(context, endpoints["endpoint"])
    prompt = [(i * 7) % 90 + 1 for i in range(40)]
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    [answer] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    assert llm.reset_prefix_cache()
    events: list[Any] = []
    while not events or not isinstance(events[-1], AllBlocksCleared):
        events += decode(socket.recv_multipart()[2]).events
    tokens = [token for event in events[:-1] for token in event.token_ids]
    assert tokens == [*prompt, *answer.outputs[0].token_ids][:48], "of three whole blocks"
    assert [event.parent_block_hash for event in events[:-1]] == [None, events[0].block_hashes[-1]]
    with pytest.raises(ConfigError, match=r"^kv_events_config: endpoint 'tcp://.*' cannot be used: .* in use; give"):
        taken = context.socket(zmq.PUB)
        port = taken.bind_to_random_port("tcp://127.0.0.1")
        LLM(str(tiny_checkpoints["llama"]), kv_events_config={**endpoints, "endpoint": f"tcp://127.0.0.1:{port}"})


def test_publishers_bind_wildcards_and_connect_to_hosts() -> None:
    """As vLLM, so that one that connects to a subscriber still does; and loopback can be bound to."""
    assert parse_kv_events_config({"enable_kv_cache_events": True}).endpoint == "tcp://127.0.0.1:5557"
    for endpoint in ("*:1", "[::]:1", "[::1]:1", "0.0.0.0:1", "127.0.0.1:1", "localhost:1"):
        assert binds(f"tcp://{endpoint}"), endpoint
    assert binds("ipc:///tmp/events")
    for endpoint in ("picker:5557", "10.0.0.7:5557", "[fd00::1]:5557"):
        assert not binds(f"tcp://{endpoint}"), endpoint


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"enable_kv_cache_event": True}, "no key 'enable_kv_cache_event'; did you mean enable_kv_cache_events"),
        ({"enable_kv_cache_events": "yes"}, "enable_kv_cache_events must be true or false, got 'yes'"),
        ({"publisher": "nats"}, "publisher must be zmq or null, got 'nats'"),
        ({"endpoint": "inproc://cache"}, "endpoint must be tcp://HOST:PORT or ipc://PATH"),
        ({"endpoint": "tcp://*:70000"}, "endpoint must be"),
        ({"endpoint": "ipc:///" + "x" * 110}, "endpoint must be"),
        ({"replay_endpoint": "tcp://127.0.0.1:5557"}, "endpoint and replay_endpoint are both"),
        ({"buffer_steps": 0}, "buffer_steps must be an integer from 1"),
        ({"hwm": 2**40}, "hwm must be an integer from 1"),
        ({"topic": 7}, "topic must be a string, got 7"),
        ({"max_queue_size": True}, "max_queue_size must be an integer"),
        ([1], "must be a JSON object"),
    ],
)
def test_a_mistake_is_named(config: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineArgs(kv_events_config=config).create_engine_config()
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_off_is_off_and_takes_no_library() -> None:
    off = ({}, {"publisher": "zmq"}, {"enable_kv_cache_events": True, "publisher": "null"}, {"replay_endpoint": None})
    assert not any(parse_kv_events_config(config).is_on for config in off)
    code = "import sys, octavo, octavo.engine.core; sys.exit('zmq' in sys.modules or 'msgspec' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
