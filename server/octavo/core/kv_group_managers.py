"""Managers for each kind of group of layers: which blocks of a sequence stay, and which cached prefixes serve it."""

from __future__ import annotations

from collections.abc import Callable

from octavo.core.block_pool import BlockPool
from octavo.core.free_queue import KVCacheBlock
from octavo.interface.kv_cache_layout import NO_BOUND, blocks_of_group

HashOf = Callable[[int], bytes]  # the chained hash of a sequence's i-th block


class FullAttentionManager:
    """Manage a group whose layers see all earlier positions: all blocks stay."""

    most_blocks = NO_BOUND
    sees_all = True

    def __init__(self, index: int, pool: BlockPool) -> None:
        """``index``: of the group, whose blocks have keys of their own in the pool's prefix cache."""
        self._pool = pool
        self._suffix = bytes([index]) if index else b""

    def key(self, block_hash: bytes) -> bytes:
        """Return the key of this group's block with that hash in the prefix cache."""
        return block_hash + self._suffix

    def first_visible(self, position: int) -> int:
        """Index of the first block that the token at ``position`` and later ones see."""
        return 0

    def first_release(self, first: int) -> int:
        """The sequence length, in tokens, at which `first_visible` exceeds ``first``."""
        return NO_BOUND

    def find_prefix(self, hash_of: HashOf, most: int, last: int) -> list[KVCacheBlock]:
        """The blocks of the longest cached prefix of at most ``most`` blocks."""
        blocks: list[KVCacheBlock] = []
        cached, suffix = self._pool.cached_blocks, self._suffix
        for i in range(most):
            block = cached.get(hash_of(i) + suffix)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def most_missing(self, num_blocks: int, table_len: int, first: int) -> int:
        """Blocks that a sequence still takes at most until it has ``num_blocks``, of which its table has ``table_len``,
        the ones from ``first`` on held."""
        return max(0, min(self.most_blocks, num_blocks - first) - (table_len - first))


class SlidingWindowManager(FullAttentionManager):
    """Manage a group whose layers see the last ``window`` positions, a token's own included: blocks are given back once
    no later token sees them."""

    sees_all = False

    def __init__(self, index: int, pool: BlockPool, window: int, block_size: int, step_tokens: int) -> None:
        super().__init__(index, pool)
        self._window, self._block_size = window, block_size
        self.most_blocks = blocks_of_group(window, block_size, step_tokens)

    def first_visible(self, position: int) -> int:
        """Index of the first block that the token at ``position`` and later ones see."""
        return max(0, position - self._window + 1) // self._block_size

    def first_release(self, first: int) -> int:
        """The sequence length, in tokens, at which `first_visible` exceeds ``first``."""
        return (first + 1) * self._block_size + self._window - 1

    def find_prefix(self, hash_of: HashOf, most: int, last: int) -> list[KVCacheBlock]:
        """The blocks of the longest prefix of at most ``most`` blocks whose end is cached, as far as tokens after it
        see, one block at least; the null block before. ``last``: the first token to be computed is this one, or an
        earlier one."""
        pool, size = self._pool, self._block_size
        found: list[KVCacheBlock] = []  # from `end` down to `start`
        start = end = most
        while start > min(self.first_visible(min(end * size, last)), max(end - 1, 0)):
            start -= 1
            block = pool.cached_blocks.get(self.key(hash_of(start)))
            if block is None:
                end = start
                found.clear()
            else:
                found.append(block)
        return [pool.null_block] * start + found[::-1]


def make_manager(
    index: int, pool: BlockPool, window: int | None, block_size: int, step_tokens: int
) -> FullAttentionManager:
    """Create the manager of the group ``index`` with that window."""
    if window is None:
        return FullAttentionManager(index, pool)
    return SlidingWindowManager(index, pool, window, block_size, step_tokens)
