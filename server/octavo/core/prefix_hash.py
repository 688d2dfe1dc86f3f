"""Chained hashes of full blocks of tokens: equal hash = equal tokens from the start, same adapter, same salt.

SHA-256, because a collision would show one tenant's text to another.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256


def root_hash(lora_name: str | None, cache_salt: str | None) -> bytes:
    """The parent of a sequence's first block."""
    digest = sha256(b"octavo-prefix")
    for part in (lora_name, cache_salt):
        encoded = b"" if part is None else part.encode("utf-8", "surrogatepass")
        digest.update(b"-" if part is None else b"+%d:" % len(encoded) + encoded)
    return digest.digest()


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    return sha256(parent + array("q", tokens).tobytes()).digest()
