"""KV events as vLLM writes them: msgpack, an array of the time, the events (maps with a key ``type``) and the rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from octavo.core.kv_events import BlockRemoved, BlockStored, KVEvent, LogEntry, merge_events

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
