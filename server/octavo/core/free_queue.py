"""Blocks of the KV cache, and an O(1) queue of free ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Mark:
    """A wish that a block stay for so many ``seconds`` after each use, and whose it is ('': nobody's in particular)."""

    seconds: float
    owner: str = ""


class KVCacheBlock:
    """``block_size`` slots of the KV cache of a group of layers."""

    __slots__ = (
        "block_hash",
        "block_id",
        "bucket",
        "mark",
        "next_free",
        "parent_hash",
        "prev_free",
        "ref_cnt",
        "tokens",
    )

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: bytes | None = None  # set when full and indexed
        self.parent_hash: bytes | None = None  # set when indexed in ``children``
        self.tokens: Tokens = ()  # what the index promises of its contents
        self.prev_free: KVCacheBlock | None = None
        self.next_free: KVCacheBlock | None = None
        self.mark: Mark | None = None  # how long it is to stay after its last use
        self.bucket: int | None = None  # in which it is retained; None: in the plain queue, or used

    def __repr__(self) -> str:
        return f"KVCacheBlock({self.block_id}, ref={self.ref_cnt}, {len(self.tokens)} indexed tokens)"


class FreeKVCacheBlockQueue:
    """Doubly linked list through the blocks themselves: front = next to be evicted. Every operation is O(1)."""

    def __init__(self) -> None:
        self.num_free_blocks = 0
        self._head = KVCacheBlock(-1)
        self._tail = KVCacheBlock(-1)
        self._head.next_free, self._tail.prev_free = self._tail, self._head

    def _link(self, block: KVCacheBlock, before: KVCacheBlock) -> None:
        previous = before.prev_free
        assert previous is not None
        block.prev_free, block.next_free = previous, before
        previous.next_free = before.prev_free = block
        self.num_free_blocks += 1

    def append(self, block: KVCacheBlock) -> None:
        """Make ``block`` the last to be evicted."""
        self._link(block, self._tail)

    def prepend(self, block: KVCacheBlock) -> None:
        """Make ``block`` the next to be evicted."""
        first = self._head.next_free
        assert first is not None
        self._link(block, first)

    def remove(self, block: KVCacheBlock) -> None:
        """Take ``block`` out of the queue."""
        before, after = block.prev_free, block.next_free
        assert before is not None and after is not None, f"{block} is not in the free queue"
        before.next_free, after.prev_free = after, before
        block.prev_free = block.next_free = None
        self.num_free_blocks -= 1

    @property
    def first(self) -> KVCacheBlock | None:
        """The next block to be evicted."""
        block = self._head.next_free
        return block if block is not self._tail else None

    def popleft(self) -> KVCacheBlock:
        """Take the next block to be evicted; there must be one."""
        block = self.first
        assert block is not None, "no free block"
        self.remove(block)
        return block

    def __iter__(self) -> Iterator[KVCacheBlock]:
        block = self._head.next_free
        while block is not None and block is not self._tail:
            yield block
            block = block.next_free
