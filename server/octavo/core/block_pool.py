"""The pool of KV-cache blocks: reference counts, queues of free ones and the prefix-cache index over them.

A cached block is found in two ways. ``cached_blocks`` maps the chained hash of a full block to the block. ``children``
keeps, for every parent hash, the token contents of the blocks that continue it, sorted, so that the one with the
longest common prefix is a neighbour of where the wanted tokens would be inserted: that finds partly filled and partly
matching blocks in O(log children).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from octavo.core.free_queue import FreeKVCacheBlockQueue, KVCacheBlock, Mark, Tokens
from octavo.core.kv_events import KVEventLog
from octavo.core.retention import RetainedBlocks
from octavo.interface.block_map import CACHED, PARTIAL, REFERENCES


def common_prefix_len(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning of two sequences."""
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length


class BlockPool:
    """All blocks. Block 0 is the null block: it pads block tables and is never allocated.

    Blocks are used for the first time in the order of their ids, as late as possible: memory of the host that no block
    has used is never touched.
    """

    def __init__(self, num_blocks: int, prefix_cache_blocks: int | None = None, most_retained: int = 0) -> None:
        """``num_blocks`` counts the null block, so ``num_blocks - 1`` can be used.

        Once ``prefix_cache_blocks`` have been used (None: all), a cached block that no sequence holds is evicted before
        another one is used for the first time. ``most_retained``: blocks that are kept as their marks say.
        """
        self.num_usable_blocks = num_blocks - 1
        self._prefix_cache_blocks = self.num_usable_blocks if prefix_cache_blocks is None else prefix_cache_blocks
        self.null_block = KVCacheBlock(0)
        self.null_block.ref_cnt = 1
        self.blocks = [self.null_block]  # and those that have been used
        self.free_queue = FreeKVCacheBlockQueue()  # of these, but for `retained`
        self.retained = RetainedBlocks(most_retained)
        self.now = 0.0  # seconds, of the step
        self._cells: memoryview | bytearray = bytearray(self.num_usable_blocks)  # see `octavo.interface.block_map`
        self.cached_blocks: dict[bytes, KVCacheBlock] = {}
        self.children: dict[bytes, list[tuple[Tokens, KVCacheBlock]]] = {}
        self.events: KVEventLog | None = None  # of the whole blocks that leave the prefix cache

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated, cached ones included."""
        return self.free_queue.num_free_blocks + self.retained.num_blocks + self._num_unused

    @property
    def _num_unused(self) -> int:
        return self.num_usable_blocks - (len(self.blocks) - 1)

    @property
    def usage(self) -> float:
        """Share of the blocks that running sequences hold, 0 to 1."""
        return 1.0 - self.num_free_blocks / self.num_usable_blocks if self.num_usable_blocks else 0.0

    def share_block_map(self, cells: memoryview) -> None:
        """Keep the block map in ``cells``, a byte for each usable block, from now on."""
        cells[:] = bytes(self._cells)
        self._cells = cells

    def _note(self, block: KVCacheBlock) -> None:
        """Write the block's byte of the map."""
        self._cells[block.block_id - 1] = self.cell_of(block)

    def cell_of(self, block: KVCacheBlock) -> int:
        """The block's byte of the map."""
        offers = 0 if block.parent_hash is None else CACHED if block.block_hash is not None else CACHED | PARTIAL
        return min(block.ref_cnt, REFERENCES) | offers

    # -- allocation ------------------------------------------------------------------------------------------------

    def allocate(self) -> KVCacheBlock:
        """A block without contents, or else the least recently used free one, which leaves the prefix cache; what is
        retained goes last. It has one reference."""
        block = self._use_another() if self._should_use_another() else self._pop_free()
        self._unindex(block)
        block.ref_cnt = 1
        self._note(block)
        return block

    def _should_use_another(self) -> bool:
        """True if a block that was never used is taken rather than the first of the queue."""
        if not self._num_unused:
            return False
        first = self.first_free
        return first is None or (first.parent_hash is not None and len(self.blocks) <= self._prefix_cache_blocks)

    @property
    def first_free(self) -> KVCacheBlock | None:
        """The next of the free blocks to be evicted."""
        return self.free_queue.first or (self.retained.first if self.retained.num_blocks else None)

    def _pop_free(self) -> KVCacheBlock:
        queue = self.free_queue if self.free_queue.num_free_blocks or not self.retained.num_blocks else self.retained
        block = queue.popleft()
        block.mark = None
        return block

    def _use_another(self) -> KVCacheBlock:
        self.blocks.append(self._make_block(len(self.blocks)))
        return self.blocks[-1]

    def _make_block(self, block_id: int) -> KVCacheBlock:
        return KVCacheBlock(block_id)

    def touch(self, block: KVCacheBlock) -> None:
        """Take one more reference; a free block leaves the free queue and keeps its contents."""
        if block.ref_cnt == 0:
            self._leave_queue(block)
        block.ref_cnt += 1
        self._note(block)

    def release(self, block: KVCacheBlock) -> None:
        """Drop one reference. Without any, a block is evicted next when it is not indexed, else last, or as its mark
        says."""
        block.ref_cnt -= 1
        self._note(block)
        if block.ref_cnt == 0:
            if block.parent_hash is None:
                block.mark = None
                self.free_queue.prepend(block)
            elif block.mark is not None:
                self._keep(block)
            else:
                self.free_queue.append(block)

    # -- retention -------------------------------------------------------------------------------------------------

    def retain(self, block: KVCacheBlock, mark: Mark) -> None:
        """Keep ``block``, which the prefix cache offers, for the time of ``mark`` after each use from now on, unless a
        mark of it says longer."""
        if block.mark is not None and block.mark.seconds > mark.seconds:
            return
        if block.ref_cnt:
            block.mark = mark
        else:
            self._leave_queue(block)
            block.mark = mark
            self._keep(block)

    def begin_step(self, now: float) -> None:
        """Note the time, in seconds; what was to be kept until then is no longer."""
        self.now = now
        if self.retained.num_blocks:
            for block in self.retained.take_expired(now):
                self.free_queue.append(block)

    def _keep(self, block: KVCacheBlock) -> None:
        """Put a free block with a mark where it lies until its time is over."""
        displaced = self.retained.add(block, self.now)
        if displaced is not None:
            self.free_queue.append(displaced)

    def _leave_queue(self, block: KVCacheBlock) -> None:
        if block.bucket is None:
            self.free_queue.remove(block)
        else:
            self.retained.remove(block)

    # -- the prefix cache --------------------------------------------------------------------------------------------

    def index(self, block: KVCacheBlock, parent_hash: bytes, tokens: Tokens, block_hash: bytes | None) -> None:
        """Offer ``block``, which holds the KV of ``tokens`` after ``parent_hash``. ``block_hash``: of a full block.

        A block whose contents another block already offers (or more than that) stays out of the index.
        """
        self._unindex(block)
        if block_hash is not None and block_hash in self.cached_blocks:
            return
        siblings = self.children.get(parent_hash, [])
        at = bisect_left(siblings, tokens, key=_tokens_of)
        if at < len(siblings) and siblings[at][0][: len(tokens)] == tokens:
            return
        siblings.insert(at, (tokens, block))
        self.children[parent_hash] = siblings
        block.parent_hash, block.tokens, block.block_hash = parent_hash, tokens, block_hash
        if block_hash is not None:
            self.cached_blocks[block_hash] = block
        self._note(block)

    def longest_match(self, parent_hash: bytes, tokens: Tokens) -> tuple[KVCacheBlock, int] | None:
        """The block after ``parent_hash`` whose contents share the longest prefix with ``tokens``, and its length."""
        siblings = self.children.get(parent_hash)
        if not siblings or not tokens:
            return None
        at = bisect_left(siblings, tokens, key=_tokens_of)
        best: tuple[KVCacheBlock, int] | None = None
        for candidate_tokens, block in siblings[max(at - 1, 0) : at + 1]:
            length = common_prefix_len(candidate_tokens, tokens)
            if length > (best[1] if best else 0):
                best = block, length
        return best

    def _unindex(self, block: KVCacheBlock) -> None:
        if block.parent_hash is None:
            return
        siblings = self.children[block.parent_hash]
        at = bisect_left(siblings, block.tokens, key=_tokens_of)
        assert siblings[at][1] is block
        del siblings[at]
        if not siblings:
            del self.children[block.parent_hash]
        if block.block_hash is not None:
            del self.cached_blocks[block.block_hash]
            if self.events is not None:
                self.events.add(block.block_hash)
        block.block_hash = block.parent_hash = None
        block.tokens = ()
        self._note(block)

    def reset_prefix_cache(self) -> None:
        """Forget every cached block; blocks in use keep their contents but are no longer found."""
        for block in self.retained.take_all():
            self.free_queue.append(block)
        for block in self.blocks:
            self._unindex(block)
        if self.events is not None:
            self.events.add(None)

    def check_integrity(self) -> None:
        """Raise AssertionError when the pool contradicts itself. O(blocks)."""
        free = list(self.free_queue)
        assert len(free) == self.free_queue.num_free_blocks, "free queue lost count"
        assert all(block.mark is None and block.bucket is None for block in free), "what is retained is not kept"
        self.retained.check_integrity()
        free += self.retained
        assert len({b.block_id for b in free}) == len(free), "a block is in the free queue twice"
        assert all(b.ref_cnt == 0 for b in free), "a block in use is in the free queue"
        assert self.null_block.ref_cnt == 1 and self.null_block.parent_hash is None, "the null block was used"
        unreferenced = sum(b.ref_cnt == 0 for b in self.blocks)
        assert unreferenced == len(free), f"{unreferenced - len(free)} blocks are neither free nor used"
        for block_hash, block in self.cached_blocks.items():
            assert block.block_hash == block_hash, "the hash index points to another block"
        for block in self.blocks[1:]:
            cell = self._cells[block.block_id - 1]
            assert cell == self.cell_of(block), f"the block map says {cell:#x} of {block}"
        assert not any(self._cells[len(self.blocks) - 1 :]), "the block map knows of blocks that were never used"
        indexed = 0
        for parent_hash, siblings in self.children.items():
            assert siblings, "an empty list of children was kept"
            keys = [tokens for tokens, _ in siblings]
            assert keys == sorted(set(keys)), "children are not sorted, or one is there twice"
            for tokens, block in siblings:
                assert block.parent_hash == parent_hash and block.tokens == tokens, "children index is stale"
            indexed += len(siblings)
        assert indexed == sum(b.parent_hash is not None for b in self.blocks), "an indexed block is not among children"


def _tokens_of(entry: tuple[Tokens, KVCacheBlock]) -> Tokens:
    return entry[0]
