"""Free blocks that clients want kept for a while: they are evicted after all other free blocks, and never refused.

So retention is an order of eviction, not a claim: all of them count as free. They lie in buckets, a bucket for each
minute in which their time ends; what ends first goes first. Above a number of blocks, whoever has most of them loses
the one that was not used for the longest time to the plain queue, so nobody's share shrinks below an equal one by what
others want.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator

from octavo.core.free_queue import FreeKVCacheBlockQueue, KVCacheBlock

MINUTE = 60.0  # seconds
_AT_ONCE = 256  # blocks whose time is over that a step moves at most: no step waits for many


class _Buckets:
    """One owner's blocks, by the minute in which their time ends."""

    __slots__ = ("minutes", "order", "queues")

    def __init__(self) -> None:
        self.queues: dict[int, FreeKVCacheBlockQueue] = {}
        self.minutes: list[int] = []  # ascending
        self.order = OrderedDict[int, KVCacheBlock]()  # by id, as they were left

    def add(self, block: KVCacheBlock, minute: int) -> None:
        queue = self.queues.get(minute)
        if queue is None:
            queue = self.queues[minute] = FreeKVCacheBlockQueue()
            insort(self.minutes, minute)
        queue.append(block)
        self.order[block.block_id] = block

    def remove(self, block: KVCacheBlock, minute: int) -> None:
        queue = self.queues[minute]
        queue.remove(block)
        del self.order[block.block_id]
        if not queue.num_free_blocks:
            del self.queues[minute]
            del self.minutes[bisect_left(self.minutes, minute)]


class RetainedBlocks:
    """All such blocks, ``most`` at most; ``set_aside`` of these are kept for something else."""

    def __init__(self, most: int) -> None:
        self.most, self.set_aside = most, 0
        self.num_blocks = 0
        self._owners: dict[str, _Buckets] = {}

    def __iter__(self) -> Iterator[KVCacheBlock]:
        for buckets in self._owners.values():
            for minute in buckets.minutes:
                yield from buckets.queues[minute]

    def add(self, block: KVCacheBlock, now: float) -> KVCacheBlock | None:
        """Take in a free block that has a mark. Returns the one that has to leave for it, its mark gone."""
        mark = block.mark
        assert mark is not None
        block.bucket = int((now + mark.seconds) // MINUTE) + 1
        self._owners.setdefault(mark.owner, _Buckets()).add(block, block.bucket)
        self.num_blocks += 1
        if self.num_blocks + self.set_aside <= self.most:
            return None
        largest = max(self._owners.values(), key=lambda buckets: len(buckets.order))
        return self._take(next(iter(largest.order.values())))

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block out, because it is used again; it keeps its mark."""
        assert block.mark is not None and block.bucket is not None
        buckets = self._owners[block.mark.owner]
        buckets.remove(block, block.bucket)
        if not buckets.order:
            del self._owners[block.mark.owner]
        block.bucket = None
        self.num_blocks -= 1

    @property
    def first(self) -> KVCacheBlock | None:
        """The block whose time ends first."""
        buckets = min(self._owners.values(), key=lambda buckets: buckets.minutes[0], default=None)
        return buckets.queues[buckets.minutes[0]].first if buckets is not None else None

    def popleft(self) -> KVCacheBlock:
        """Take that block, its mark gone; there must be one."""
        block = self.first
        assert block is not None, "no free block"
        return self._take(block)

    def take_expired(self, now: float) -> list[KVCacheBlock]:
        """Take blocks whose time is over, not all at once, their marks gone."""
        expired: list[KVCacheBlock] = []
        minute = now // MINUTE
        while len(expired) < _AT_ONCE:
            block = self.first
            if block is None or (block.bucket or 0) > minute:
                break
            expired.append(self._take(block))
        return expired

    def take_all(self) -> list[KVCacheBlock]:
        """Take every block, its mark gone."""
        return [self.popleft() for _ in range(self.num_blocks)]

    def _take(self, block: KVCacheBlock) -> KVCacheBlock:
        self.remove(block)
        block.mark = None
        return block

    def check_integrity(self) -> None:
        """Raise AssertionError when buckets lost count. O(blocks)."""
        blocks = list(self)
        assert len(blocks) == self.num_blocks, "retained blocks lost count"
        assert not blocks or self.num_blocks + self.set_aside <= self.most, "more is retained than may be"
        for owner, buckets in self._owners.items():
            assert len(buckets.order) == sum(queue.num_free_blocks for queue in buckets.queues.values()) > 0
            assert buckets.minutes == sorted(buckets.queues), "buckets are not in order"
            for minute, queue in buckets.queues.items():
                for block in queue:
                    assert block.bucket == minute and block.mark is not None and block.mark.owner == owner
                    assert block.ref_cnt == 0 and block.parent_hash is not None, "what is retained is no prefix"
