"""Chained hashes of full blocks of tokens: equal hash = equal tokens from the start, same salt, same adapter.

SHA-256, because a collision would show one tenant's text to another.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256

from octavo.interface.messages import EngineCoreRequest

HASH_BYTES = 32


def root_hash(cache_salt: str | None, adapter: str | None = None) -> bytes:
    """The parent hash of a sequence's first block, 32 bytes. ``adapter``: its LoRA adapter's key, if it has one."""
    salt = b"-" if cache_salt is None else b"+" + cache_salt.encode("utf-8", "surrogatepass")
    root = sha256(b"octavo-prefix" + salt).digest()
    return root if adapter is None else sha256(b"octavo-adapter" + root + adapter.encode()).digest()


def root_of(request: EngineCoreRequest) -> bytes:
    """`root_hash` of a request: its salt, and its adapter as it is in its files."""
    return root_hash(request.cache_salt, request.adapter.key if request.adapter is not None else None)


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The hash of a full block of ``tokens`` (each below 2**63) after the block of hash ``parent``, 32 bytes."""
    return sha256(parent + array("q", tokens).tobytes()).digest()
