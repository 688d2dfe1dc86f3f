"""Chained hashes of full blocks of tokens: equal hash = equal tokens from the start, same salt.

SHA-256, because a collision would show one tenant's text to another.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256

HASH_BYTES = 32


def root_hash(cache_salt: str | None) -> bytes:
    """The parent hash of a sequence's first block, 32 bytes."""
    salt = b"-" if cache_salt is None else b"+" + cache_salt.encode("utf-8", "surrogatepass")
    return sha256(b"octavo-prefix" + salt).digest()


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The hash of a full block of ``tokens`` (each below 2**63) after the block of hash ``parent``, 32 bytes."""
    return sha256(parent + array("q", tokens).tobytes()).digest()
