"""The pool of KV-cache blocks: reference counts, an O(1) LRU free queue and the prefix-cache index over them.

A cached block is found in two ways. ``cached_blocks`` maps the chained hash of a full block to the block. ``children``
keeps, for every parent hash, the token contents of the blocks that continue it, sorted, so that the one with the
longest common prefix is a neighbour of where the wanted tokens would be inserted: that finds partly filled and partly
matching blocks in O(log children).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from octavo.core.kv_events import KVEventLog
from octavo.interface.block_map import CACHED, PARTIAL, REFERENCES

Tokens = tuple[int, ...]


class KVCacheBlock:
    """``block_size`` slots of the KV cache of a group of layers."""

    __slots__ = ("block_hash", "block_id", "next_free", "parent_hash", "prev_free", "ref_cnt", "tokens")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: bytes | None = None  # set when full and indexed
        self.parent_hash: bytes | None = None  # set when indexed in ``children``
        self.tokens: Tokens = ()  # what the index promises of its contents
        self.prev_free: KVCacheBlock | None = None
        self.next_free: KVCacheBlock | None = None

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

    def __init__(self, num_blocks: int, prefix_cache_blocks: int | None = None) -> None:
        """``num_blocks`` counts the null block, so ``num_blocks - 1`` can be used.

        Once ``prefix_cache_blocks`` have been used (None: all), a cached block that no sequence holds is evicted before
        another one is used for the first time.
        """
        self.num_usable_blocks = num_blocks - 1
        self._prefix_cache_blocks = self.num_usable_blocks if prefix_cache_blocks is None else prefix_cache_blocks
        self.null_block = KVCacheBlock(0)
        self.null_block.ref_cnt = 1
        self.blocks = [self.null_block]  # and those that have been used
        self.free_queue = FreeKVCacheBlockQueue()  # of these
        self._cells: memoryview | bytearray = bytearray(self.num_usable_blocks)  # see `octavo.interface.block_map`
        self.cached_blocks: dict[bytes, KVCacheBlock] = {}
        self.children: dict[bytes, list[tuple[Tokens, KVCacheBlock]]] = {}
        self.events: KVEventLog | None = None  # of the whole blocks that leave the prefix cache

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated, cached ones included."""
        return self.free_queue.num_free_blocks + self._num_unused

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
        """A block without contents, or else the least recently used free one, which leaves the prefix cache. It has one
        reference."""
        block = self._use_another() if self._should_use_another() else self.free_queue.popleft()
        self._unindex(block)
        block.ref_cnt = 1
        self._note(block)
        return block

    def _should_use_another(self) -> bool:
        """True if a block that was never used is taken rather than the first of the queue."""
        if not self._num_unused:
            return False
        first = self.free_queue.first
        return first is None or (first.parent_hash is not None and len(self.blocks) <= self._prefix_cache_blocks)

    def _use_another(self) -> KVCacheBlock:
        self.blocks.append(self._make_block(len(self.blocks)))
        return self.blocks[-1]

    def _make_block(self, block_id: int) -> KVCacheBlock:
        return KVCacheBlock(block_id)

    def touch(self, block: KVCacheBlock) -> None:
        """Take one more reference; a free block leaves the free queue and keeps its contents."""
        if block.ref_cnt == 0:
            self.free_queue.remove(block)
        block.ref_cnt += 1
        self._note(block)

    def release(self, block: KVCacheBlock) -> None:
        """Drop one reference. Without any, a block is evicted next when it is not indexed, else last."""
        block.ref_cnt -= 1
        self._note(block)
        if block.ref_cnt == 0:
            if block.parent_hash is None:
                self.free_queue.prepend(block)
            else:
                self.free_queue.append(block)

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
        for block in self.blocks:
            self._unindex(block)
        if self.events is not None:
            self.events.add(None)

    def check_integrity(self) -> None:
        """Raise AssertionError when the pool contradicts itself. O(blocks)."""
        free = list(self.free_queue)
        assert len(free) == self.free_queue.num_free_blocks, "free queue lost count"
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
