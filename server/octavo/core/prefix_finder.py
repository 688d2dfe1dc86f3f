"""The longest cached prefix of a sequence: whole blocks to share, then perhaps a part of one to copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from octavo.core.block_pool import BlockPool
from octavo.core.free_queue import KVCacheBlock
from octavo.core.kv_group_managers import FullAttentionManager
from octavo.core.prefix_hash import block_hash, root_of
from octavo.core.request import Request
from octavo.core.state_slot import Snapshot


@dataclass
class PrefixHit:
    """A cached prefix: whole blocks to share, then perhaps a block to copy and continue.

    In models with states it ends at ``snapshot``, and may share blocks behind its end: their tokens are computed again,
    but their keys and values are there.
    """

    blocks: list[list[KVCacheBlock]]  # of each group; the null block where no token to come sees it
    partial: list[KVCacheBlock] | None = None  # of each group
    num_tokens: int = 0  # that need not be computed; at most num_tokens - 1, because the last one must give logits
    snapshot: Snapshot | None = None  # None: there are no states, or none that it could go on from
    num_found: int = 0  # tokens whose keys and values are cached, where there are states

    @property
    def num_blocks(self) -> int:
        """Number of whole blocks."""
        return len(self.blocks[0])

    def without_copy(self, block_size: int) -> PrefixHit:
        """The same without a block to copy."""
        if self.snapshot is None:
            return PrefixHit(self.blocks, None, self.num_blocks * block_size, None, self.num_found)
        is_whole = all(block.block_id for blocks in self.blocks for block in blocks[:1])  # from the first token on
        return PrefixHit(self.blocks if is_whole else [[] for _ in self.blocks], None, 0, None, self.num_found)


def hash_of(request: Request, block_size: int, index: int) -> bytes:
    """Chained hash of the sequence's ``index``-th block, which must be full of known tokens."""
    hashes = request.block_hashes
    while len(hashes) <= index:
        i = len(hashes)
        tokens = request.key_token_ids[i * block_size : (i + 1) * block_size]
        hashes.append(block_hash(parent_hash(request, block_size, i), tokens))
    return hashes[index]


def parent_hash(request: Request, block_size: int, index: int) -> bytes:
    """Chained hash of the blocks before the ``index``-th one."""
    return hash_of(request, block_size, index - 1) if index else root_of(request.core_request)


class PrefixFinder:
    """Finds prefixes in the pool's cache that all groups of layers can serve. Takes no references."""

    def __init__(self, pool: BlockPool, groups: Sequence[FullAttentionManager], block_size: int) -> None:
        self._pool, self._groups, self.block_size = pool, groups, block_size

    def find(self, request: Request) -> PrefixHit:
        """The longest one of the sequence's tokens."""
        size, tokens = self.block_size, request.key_token_ids
        blocks = self._find_blocks(request)
        hit = PrefixHit(blocks, None, len(blocks[0]) * size)
        rest = tuple(tokens[hit.num_tokens : hit.num_tokens + size])
        if rest:
            self._find_partial(hit, parent_hash(request, size, hit.num_blocks), rest)
        if hit.num_tokens == len(tokens):
            hit.num_tokens -= 1
            if hit.num_tokens == hit.num_blocks * size:
                hit.partial = None  # one token matched and it must be computed anyway: nothing to gain from a copy
        return hit

    def find_until(self, request: Request, position: int, found: PrefixHit) -> PrefixHit | None:
        """The part of ``found`` that ends at ``position``, with the whole blocks behind it that are cached; None if a
        group cannot serve it."""
        size, whole = self.block_size, position // self.block_size
        if len(self._groups) == 1 and self._groups[0].sees_all:
            blocks = [found.blocks[0][: found.num_tokens // size]]
        else:  # the blocks behind it are not shared: a group would keep more than it may
            keys = partial(hash_of, request, size)
            blocks = [group.find_prefix(keys, whole, position) for group in self._groups]
        if any(len(of_group) < whole for of_group in blocks):
            return None
        hit = PrefixHit(blocks, None, len(blocks[0]) * size, num_found=found.num_tokens)
        if hit.num_tokens < position:
            rest = tuple(request.key_token_ids[whole * size : position])
            self._find_partial(hit, parent_hash(request, size, whole), rest)
            if hit.num_tokens < position:
                return None
        hit.num_tokens = position
        return hit

    def _find_blocks(self, request: Request) -> list[list[KVCacheBlock]]:
        """The whole blocks of the longest prefix that every group can serve."""
        tokens, keys = request.key_token_ids, partial(hash_of, request, self.block_size)
        most, last = len(tokens) // self.block_size, len(tokens) - 1
        found: list[list[KVCacheBlock]] = []
        for group in self._groups:
            found.append(group.find_prefix(keys, most, last))
            most = len(found[-1])
        while any(len(blocks) > most for blocks in found):  # what a later group has cut short
            for i, group in enumerate(self._groups):
                if len(found[i]) > most:
                    found[i] = group.find_prefix(keys, most, last)
                    most = len(found[i])
        return found

    def _find_partial(self, hit: PrefixHit, parent: bytes, rest: tuple[int, ...]) -> None:
        """Lengthen ``hit`` by as many of the tokens ``rest`` that follow its blocks as a block of every group begins
        with."""
        found = []
        for group in self._groups:
            match = self._pool.longest_match(group.key(parent), rest)
            if match is None:
                return
            found.append(match[0])
            rest = rest[: match[1]]
        hit.partial = found
        hit.num_tokens += len(rest)
