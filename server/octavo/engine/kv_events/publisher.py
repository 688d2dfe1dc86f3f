"""Publishes what the prefix cache gains and loses over ZeroMQ, so that subscribers of vLLM's events read it.

A batch is three frames: topic, 8-byte big-endian sequence number, payload: msgpack of an array of the time, the events
(maps with a key ``type``) and the rank. A subscriber that finds a gap between the numbers, or has just come, sends the
first number it wants to the replay socket. It gets the batches that are kept, then number -1 with an empty payload.

Imported only where events are on: it needs pyzmq and msgspec, which `octavo.LLM` does without.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import msgspec
import zmq

from octavo.core.kv_events import BlockRemoved, BlockStored, KVEvent, LogEntry, merge_events
from octavo.engine.kv_events.config import binds
from octavo.errors import ConfigError
from octavo.interface.engine_config import KVEventsConfig

MEDIUM = "GPU"  # what vLLM calls the memory that the engine computes in, on CPUs as well


class _Stored(msgspec.Struct, tag="BlockStored", omit_defaults=True, gc=False):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: None
    medium: str
    lora_name: str | None
    extra_keys: list[tuple[str] | None] | None = None  # of each block; a cache_salt goes with a sequence's first block
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved", gc=False):
    block_hashes: list[int]
    medium: str
    group_idx: int


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


class _EventBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_Stored | _Removed | _Cleared]
    data_parallel_rank: int = 0


_encode = msgspec.msgpack.Encoder().encode


def encode_batch(entries: Iterable[LogEntry], timestamp: float, windows: Sequence[int | None]) -> bytes:
    """One batch. ``timestamp``: seconds since the epoch; ``windows``: of the groups of layers, in positions, None where
    they see all."""
    return _encode(_EventBatch(timestamp, [_message(event, windows) for event in merge_events(entries)]))


def _message(event: KVEvent, windows: Sequence[int | None]) -> _Stored | _Removed | _Cleared:
    if isinstance(event, BlockStored):
        window = windows[event.group]
        return _Stored(
            block_hashes=[_number(block) for block in event.hashes],
            parent_block_hash=None if event.parent is None else _number(event.parent),
            token_ids=event.tokens,
            block_size=len(event.tokens) // len(event.hashes),
            lora_id=None,
            medium=MEDIUM,
            lora_name=None if event.adapter is None else event.adapter.rpartition("@")[0],
            extra_keys=_extra_keys(event),
            group_idx=event.group,
            kv_cache_spec_kind="full_attention" if window is None else "sliding_window",
            kv_cache_spec_sliding_window=window,
        )
    if isinstance(event, BlockRemoved):
        return _Removed([_number(block) for block in event.hashes], MEDIUM, event.group)
    return _Cleared()


def _number(block_hash: bytes) -> int:
    """A block's name: an unsigned number of 64 bits, which every subscriber takes. As vLLM makes it of a SHA-256."""
    return int.from_bytes(block_hash[-8:], "big")


def _extra_keys(event: BlockStored) -> list[tuple[str] | None] | None:
    if event.cache_salt is None:
        return None
    salt = event.cache_salt.encode("utf-8", "replace").decode()  # JSON may hold half of a surrogate pair
    return [(salt,), *[None] * (len(event.hashes) - 1)]


logger = logging.getLogger(__name__)

END = (-1).to_bytes(8, "big", signed=True)
_LINGER_MS = 100  # a process that ends waits at most that long for what is being sent

_Waiting = queue.SimpleQueue[tuple[int, float, list[LogEntry]] | None]  # number, time, what happened; None: the end
_Kept = deque[tuple[bytes, bytes]]  # number, payload


class KVEventsPublisher:
    """Sends batches from a thread of its own, never waiting for a subscriber: one that is too slow loses the newest,
    which their numbers tell it. Batches are kept for those who ask for them again."""

    def __init__(self, config: KVEventsConfig) -> None:
        """Open the endpoints. Raises ConfigError where one cannot be used."""
        self._topic = config.topic.encode()
        self._sequence = 0
        self._most_waiting = config.max_queue_size
        self._waiting: _Waiting = queue.SimpleQueue()
        self._kept: _Kept = deque(maxlen=config.buffer_steps if config.replay_endpoint else 0)
        self._threads: list[threading.Thread] = []
        context = zmq.Context()
        self._published, self._replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        sockets = [self._published, self._replay]
        self.close = weakref.finalize(self, _close, context, sockets, self._waiting, self._threads)
        self._published.set_hwm(config.hwm)
        self._replay.set_hwm(config.buffer_steps + 1)  # or it would drop what a subscriber does not take at once
        _open(self._published, "endpoint", config.endpoint, bind=binds(config.endpoint))
        if config.replay_endpoint is not None:
            _open(self._replay, "replay_endpoint", config.replay_endpoint, bind=True)

    def start(self, windows: Sequence[int | None]) -> None:
        """Begin to send. ``windows``: of the groups of layers, in positions; None: they see all."""
        for target, arguments in (
            (_send, (self._published, self._waiting, self._topic, self._kept, tuple(windows))),
            (_answer, (self._replay, self._topic, self._kept)),
        ):
            self._threads.append(_start(target, arguments))

    def publish(self, entries: list[LogEntry]) -> None:
        """Send what has happened as one batch, soon. Where too many wait already it is dropped, but not its number."""
        if self._waiting.qsize() < self._most_waiting:
            self._waiting.put((self._sequence, time.time(), entries))
        self._sequence += 1


def _start(target: Callable[..., None], arguments: tuple[object, ...]) -> threading.Thread:
    thread = threading.Thread(target=target, args=arguments, name=f"kv-events{target.__name__}", daemon=True)
    thread.start()
    return thread


def _open(socket: zmq.Socket[bytes], key: str, endpoint: str, bind: bool) -> None:
    if "[" in endpoint:
        socket.set(zmq.IPV6, 1)
    try:
        if bind:
            socket.bind(endpoint.replace("tcp://localhost:", "tcp://127.0.0.1:"))  # it binds to no names
        else:
            socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"kv_events_config: {key} {endpoint!r} cannot be used: {zmq.strerror(error.errno or 0)}; give another"
        ) from None


def _send(
    socket: zmq.Socket[bytes], waiting: _Waiting, topic: bytes, kept: _Kept, windows: Sequence[int | None]
) -> None:
    """Send batches until the end."""
    while (batch := waiting.get()) is not None:
        sequence, timestamp, entries = batch
        try:
            number, payload = sequence.to_bytes(8, "big"), encode_batch(entries, timestamp, windows)
            socket.send_multipart((topic, number, payload))  # drops it where a subscriber's queue is full
            kept.append((number, payload))
        except zmq.ContextTerminated:
            break
        except Exception:
            logger.exception("a batch of KV events was not sent")
    socket.close(_LINGER_MS)


def _answer(socket: zmq.Socket[bytes], topic: bytes, kept: _Kept) -> None:
    """Send kept batches again to those who ask, until the context ends."""
    while True:
        try:
            request = socket.recv_multipart()
            if len(request) != 3 or len(request[2]) != 8:
                continue  # not from a subscriber
            sender, _, first = request
            for number, payload in kept.copy():
                if number >= first:
                    socket.send_multipart((sender, b"", topic, number, payload))
            socket.send_multipart((sender, b"", b"", END, b""))
        except zmq.ContextTerminated:
            socket.close(_LINGER_MS)
            return
        except zmq.ZMQError:
            logger.exception("a subscriber of KV events got no answer")


def _close(
    context: zmq.Context[zmq.Socket[bytes]],
    sockets: list[zmq.Socket[bytes]],
    waiting: _Waiting,
    threads: list[threading.Thread],
) -> None:
    if not threads:  # which close them otherwise
        for socket in sockets:
            socket.close(0)
    waiting.put(None)
    for thread in threads[:1]:
        thread.join(_LINGER_MS / 1000)  # it sends what waits
    context.term()  # waits until all sockets are closed
