"""Block tables of all sequences: allocation, sharing with copy-on-write, prefix hits."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from octavo.core.block_pool import BlockPool, KVCacheBlock
from octavo.core.prefix_hash import block_hash, root_hash
from octavo.core.request import NO_LIMIT, Request


@dataclass
class PrefixHit:
    """A cached prefix: whole blocks to share, then perhaps a block to copy and continue."""

    blocks: list[KVCacheBlock] = field(default_factory=list)
    partial: KVCacheBlock | None = None
    num_tokens: int = 0  # that need not be computed; at most num_tokens - 1, because the last one must give logits


@dataclass
class Allocation:
    """Changes to one sequence's block table."""

    new_block_ids: list[int] = field(default_factory=list)
    replaced_blocks: list[tuple[int, int]] = field(default_factory=list)  # (index, block id) after copy-on-write
    copies: list[tuple[int, int]] = field(default_factory=list)  # (src, dst) block ids


@dataclass(slots=True)
class BlockTable:
    """One sequence's blocks, from their first allocation until `KVCacheManager.free`."""

    blocks: list[KVCacheBlock]
    num_hashed_blocks: int = 0  # full ones offered to other sequences
    partial_indexed: bool = False  # the prompt's last, not full block was offered too
    shares_tail: bool = False  # the last block may have other holders
    confirm_limit: int = NO_LIMIT  # higher positions are in a block whose copy is still in flight


class KVCacheManager:
    """Block tables of all sequences over one BlockPool.

    Contents are written only past what other holders can see: shared full blocks are never written, a shared partial
    block is copied before its first write. Sources of copies are pinned until `begin_step`, so that no block is source
    and target within one step.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        prefix_cache_blocks: int | None = None,
    ) -> None:
        """``num_blocks`` counts the null block; ``prefix_cache_blocks``: see `BlockPool`."""
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks, prefix_cache_blocks)
        self._tables: dict[str, BlockTable] = {}
        self._pinned: list[KVCacheBlock] = []

    @property
    def usage(self) -> float:
        """Share of the blocks that sequences hold, from 0 to 1."""
        return self.pool.usage

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that ``num_tokens`` need."""
        return -(-num_tokens // self.block_size)

    def block_ids(self, request: Request) -> list[int]:
        """The ids in the sequence's block table, in order."""
        table = self._tables.get(request.req_id)
        return [block.block_id for block in table.blocks] if table is not None else []

    def num_blocks_of(self, request: Request) -> int:
        """Number of blocks that the sequence holds."""
        table = self._tables.get(request.req_id)
        return len(table.blocks) if table is not None else 0

    @property
    def pinned_ids(self) -> set[int]:
        """Blocks held only as sources of copies in the last scheduled step."""
        pins = Counter(block.block_id for block in self._pinned)
        return {block_id for block_id, count in pins.items() if self.pool.blocks[block_id].ref_cnt == count}

    def begin_step(self) -> None:
        """The previous step's copies are scheduled: unpin their sources."""
        for block in self._pinned:
            self.pool.release(block)
        self._pinned.clear()

    # -- prefix cache ------------------------------------------------------------------------------------------------

    def get_computed_blocks(self, request: Request) -> PrefixHit:
        """The longest cached prefix of the sequence's tokens. Takes no references."""
        if not self.enable_prefix_caching or request.skip_prefix_cache:
            return PrefixHit()
        size, tokens = self.block_size, request.all_token_ids
        blocks: list[KVCacheBlock] = []
        for i in range(len(tokens) // size):
            block = self.pool.cached_blocks.get(self._hash(request, i))
            if block is None:
                break
            blocks.append(block)
        hit = PrefixHit(blocks, None, len(blocks) * size)
        rest = tuple(tokens[hit.num_tokens : hit.num_tokens + size])
        match = self.pool.longest_match(self._parent_hash(request, len(blocks)), rest) if rest else None
        if match is not None:
            hit.partial = match[0]
            hit.num_tokens += match[1]
        if hit.num_tokens == len(tokens):
            hit.num_tokens -= 1
            if hit.num_tokens == len(blocks) * size:
                hit.partial = None  # one token matched and it must be computed anyway: nothing to gain from a copy
        return hit

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes. Returns False, and drops nothing, while sequences hold blocks."""
        if self._tables:
            return False
        self.pool.reset_prefix_cache()
        return True

    def confirm(self, request: Request, num_tokens: int, copied: bool = False) -> None:
        """A step's results show that the KV of the first ``num_tokens`` is written: offer its blocks to others.
        ``copied``: a block of the sequence was copied in that step."""
        table = self._tables[request.req_id]
        if copied:
            table.confirm_limit = NO_LIMIT
        if num_tokens > table.confirm_limit:
            num_tokens = table.confirm_limit
        request.num_confirmed_tokens = num_tokens
        if not table.partial_indexed or num_tokens // self.block_size > table.num_hashed_blocks:
            self._cache_blocks(request, table)

    def _cache_blocks(self, request: Request, table: BlockTable) -> None:
        """Offer what is confirmed: full blocks, and once the prompt's last part."""
        if not self.enable_prefix_caching:
            return
        num_full = min(request.num_confirmed_tokens, request.num_tokens) // self.block_size
        for i in range(table.num_hashed_blocks, num_full):
            tokens = tuple(request.all_token_ids[i * self.block_size : (i + 1) * self.block_size])
            own_hash = self._hash(request, i)
            if table.blocks[i].block_hash != own_hash:
                self.pool.index(table.blocks[i], self._parent_hash(request, i), tokens, own_hash)
        table.num_hashed_blocks = max(num_full, table.num_hashed_blocks)
        if not table.partial_indexed and request.num_confirmed_tokens >= request.num_prompt_tokens:
            table.partial_indexed = True
            self._cache_partial(request, table)

    def _cache_partial(self, request: Request, table: BlockTable) -> None:
        """Offer the confirmed part of the last, not yet full block."""
        confirmed = min(request.num_confirmed_tokens, request.num_tokens)
        start = confirmed // self.block_size * self.block_size
        if start == confirmed:
            return
        index = start // self.block_size
        block = table.blocks[index]
        tokens = tuple(request.all_token_ids[start:confirmed])
        if len(block.tokens) < len(tokens):
            self.pool.index(block, self._parent_hash(request, index), tokens, None)

    def _hash(self, request: Request, index: int) -> bytes:
        """Chained hash of the sequence's ``index``-th block, which must be full of known tokens."""
        hashes, size = request.block_hashes, self.block_size
        while len(hashes) <= index:
            i = len(hashes)
            hashes.append(block_hash(self._parent_hash(request, i), request.all_token_ids[i * size : (i + 1) * size]))
        return hashes[index]

    def _parent_hash(self, request: Request, index: int) -> bytes:
        if index:
            return self._hash(request, index - 1)
        return root_hash(request.core_request.cache_salt)

    # -- allocation --------------------------------------------------------------------------------------------------

    def allocate_slots(self, request: Request, num_new_tokens: int, hit: PrefixHit | None = None) -> Allocation | None:
        """Room for ``num_new_tokens`` after ``request.num_computed_tokens``; None (and no change) when there is none.

        With ``hit`` (a first allocation) the shared blocks are taken over and ``request.num_computed_tokens`` and
        ``num_kv_tokens`` are set from it.
        """
        if hit is not None:
            return self._allocate_first(request, num_new_tokens, hit)
        table = self._tables[request.req_id]
        last_position = request.num_computed_tokens + num_new_tokens
        blocks = table.blocks
        if last_position <= len(blocks) * self.block_size and not table.shares_tail:
            return _NOTHING  # nearly always
        num_new = self.blocks_for(last_position) - len(blocks)
        write_from = max(request.num_computed_tokens, request.num_kv_tokens)
        copy_index = -1
        if table.shares_tail:
            index = write_from // self.block_size
            if write_from < last_position and index < len(blocks) and blocks[index].ref_cnt > 1:
                copy_index = index
        if num_new <= 0 and copy_index < 0:
            return _NOTHING
        if max(num_new, 0) + (copy_index >= 0) > self.pool.num_free_blocks:
            return None
        allocation = Allocation()
        if copy_index >= 0:
            source, target = blocks[copy_index], self.pool.allocate()
            self._pinned.append(source)  # our reference becomes the pin
            blocks[copy_index] = target
            table.confirm_limit = copy_index * self.block_size
            request.num_confirmed_tokens = min(request.num_confirmed_tokens, table.confirm_limit)
            allocation.copies.append((source.block_id, target.block_id))
            allocation.replaced_blocks.append((copy_index, target.block_id))
        if write_from < last_position:
            table.shares_tail = False
        for _ in range(num_new):
            blocks.append(self.pool.allocate())
            allocation.new_block_ids.append(blocks[-1].block_id)
        return allocation

    def _allocate_first(self, request: Request, num_new_tokens: int, hit: PrefixHit) -> Allocation | None:
        num_shared = len(hit.blocks)
        num_new = self.blocks_for(hit.num_tokens + num_new_tokens) - num_shared
        num_revived = sum(block.ref_cnt == 0 for block in hit.blocks)
        if hit.partial is not None:
            num_revived += hit.partial.ref_cnt == 0  # pinned while it is copied
        if num_new + num_revived > self.pool.num_free_blocks:
            return None
        for block in hit.blocks:
            self.pool.touch(block)
        if hit.partial is not None:
            self.pool.touch(hit.partial)
            self._pinned.append(hit.partial)
        blocks = [*hit.blocks, *(self.pool.allocate() for _ in range(num_new))]
        self._tables[request.req_id] = BlockTable(blocks, num_hashed_blocks=num_shared)
        allocation = Allocation([block.block_id for block in blocks])
        if hit.partial is not None:
            allocation.copies.append((hit.partial.block_id, blocks[num_shared].block_id))
        request.num_computed_tokens = hit.num_tokens
        request.num_kv_tokens = request.num_confirmed_tokens = num_shared * self.block_size
        return allocation

    def fork(self, parent: Request, child: Request) -> None:
        """Let ``child`` share every block of ``parent``'s prompt, whose KV has been handed to the device.

        The child recomputes only the prompt's last token, for its logits.
        """
        table = self._tables[parent.req_id]
        blocks = table.blocks[: self.blocks_for(parent.num_prompt_tokens)]
        for block in blocks:
            self.pool.touch(block)
        self._tables[child.req_id] = BlockTable(blocks, shares_tail=True)
        table.shares_tail = True
        child.num_computed_tokens = child.num_prompt_tokens - 1
        child.num_kv_tokens = child.num_prompt_tokens

    def free(self, request: Request) -> None:
        """Release all blocks, the tail to be evicted first. What is confirmed stays in the prefix cache."""
        table = self._tables.pop(request.req_id, None)
        if table is None:
            return
        if self.enable_prefix_caching:
            self._cache_blocks(request, table)
            self._cache_partial(request, table)
        for block in reversed(table.blocks):
            self.pool.release(block)

    def check_integrity(self) -> None:
        """Raise AssertionError when tables, pins and reference counts do not add up. O(blocks)."""
        self.pool.check_integrity()
        holders = Counter(block.block_id for table in self._tables.values() for block in table.blocks)
        holders.update(block.block_id for block in self._pinned)
        holders[0] += 1
        for block in self.pool.blocks:
            assert block.ref_cnt == holders[block.block_id], (
                f"block {block.block_id} counts {block.ref_cnt} references, {holders[block.block_id]} exist"
            )
        for req_id, table in self._tables.items():
            block_ids = {block.block_id for block in table.blocks}
            assert len(block_ids) == len(table.blocks), f"{req_id} holds a block twice"
            assert 0 not in block_ids, f"{req_id} holds the null block"


_NOTHING = Allocation()
