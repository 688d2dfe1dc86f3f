"""Block tables of all sequences: allocation, sharing with copy-on-write, prefix hits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.core.block_pool import BlockPool
from octavo.core.free_queue import KVCacheBlock, Mark
from octavo.core.kv_events import KVEventLog
from octavo.core.kv_group_managers import FullAttentionManager, make_manager
from octavo.core.prefix_finder import PrefixFinder, PrefixHit, hash_of, parent_hash
from octavo.core.request import NO_LIMIT, Request
from octavo.core.states.manager import SequenceState, StateManager, StatePlaces, StateSettings
from octavo.core.states.points import Points
from octavo.core.states.slots import StatePool


@dataclass
class Allocation:
    """Changes to one sequence's block tables."""

    new_block_ids: list[list[int]] = field(default_factory=list)  # of each group, or nothing at all
    replaced_blocks: list[tuple[int, int, int]] = field(default_factory=list)  # (group, index, id) after copy-on-write
    copies: list[tuple[int, int]] = field(default_factory=list)  # (src, dst) block ids
    state: StatePlaces | None = None  # where the step reads and writes the state; None: where it is


@dataclass(slots=True)
class BlockTable:
    """One sequence's blocks, from their first allocation until `KVCacheManager.free`."""

    groups: list[list[KVCacheBlock]]  # of each group, all of one length; the null block once no token to come sees it
    first: list[int]  # of each group: the index of the first block that is held
    num_slots: int  # positions that they have room for
    release_at: int  # once so many positions are confirmed, a window has passed another block
    num_hashed_blocks: int = 0  # full ones offered to other sequences
    partial_indexed: bool = False  # the prompt's last, not full block was offered too
    shares_tail: bool = False  # the last block may have other holders
    confirm_limit: int = NO_LIMIT  # higher positions are in a block whose copy is still in flight
    state: SequenceState | None = None  # of its recurrent layers
    state_limit: int = NO_LIMIT  # until so many tokens are computed there is nothing to decide about it

    def __len__(self) -> int:
        return len(self.groups[0])

    @property
    def num_held(self) -> int:
        """Number of blocks, of all groups and the state."""
        of_state = len(self.state.slot.pages) if self.state is not None else 0
        return len(self) * len(self.groups) - sum(self.first) + of_state


class KVCacheManager:
    """Block tables of all sequences over one BlockPool, one for each group of layers
    (`octavo.interface.kv_cache_layout`). Groups know
    what they keep and find; here they are made to agree, and get blocks all together or not at all.

    Contents are written only past what other holders can see: shared full blocks are never written, a shared partial
    block is copied before its first write. Sources of copies are pinned until `begin_step`, so that no block is source
    and target within one step. States are `octavo.core.states.manager`'s.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        prefix_cache_blocks: int | None = None,
        windows: Sequence[int | None] = (None,),
        step_tokens: int = NO_LIMIT,
        states: StateSettings | None = None,
        retention_share: float = 0.0,
    ) -> None:
        """``num_blocks`` counts the null block; ``prefix_cache_blocks``: see `BlockPool`; ``windows`` of the groups and
        ``step_tokens``: see `KVCacheLayout`. ``states``: None for a model without. ``retention_share``: the part of the
        blocks, at most, that are kept longer than others because clients want that."""
        self.block_size, self.state_blocks = block_size, states.num_blocks if states is not None else 0
        self.enable_prefix_caching = enable_prefix_caching
        most_retained = int((num_blocks - 1) * retention_share)
        self.pool = BlockPool(num_blocks, prefix_cache_blocks, most_retained)
        if states is not None:
            num_tokens = max(1, states.num_blocks * block_size // len(windows))
            self.pool = StatePool(num_blocks, prefix_cache_blocks, states.num_blocks, num_tokens, most_retained)
        self.groups: list[FullAttentionManager] = [
            make_manager(i, self.pool, window, block_size, step_tokens) for i, window in enumerate(windows)
        ]
        self._finder = PrefixFinder(self.pool, self.groups, block_size)
        self.states: StateManager | None = None
        if states is not None and isinstance(self.pool, StatePool):
            points = Points(block_size, states.interval, states.gap) if enable_prefix_caching else None
            self.states = StateManager(self.pool, self._finder, points, states.headroom)
        self._tables: dict[str, BlockTable] = {}
        self._pinned: list[KVCacheBlock] = []

    @property
    def usage(self) -> float:
        """Share of the blocks that sequences hold, from 0 to 1."""
        return self.pool.usage

    def share_block_map(self, cells: memoryview) -> None:
        """Keep a byte for each usable block in ``cells``, as `octavo.interface.block_map` says, from now on."""
        self.pool.share_block_map(cells)

    def log_events(self) -> KVEventLog:
        """Log what the prefix cache gains and loses from now on; the caller takes it from the returned log."""
        self.pool.events = KVEventLog()
        return self.pool.events

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks of one group that ``num_tokens`` take."""
        return -(-num_tokens // self.block_size)

    def most_blocks(self, num_tokens: int) -> int:
        """Number of blocks that a sequence of ``num_tokens`` holds at most at any time, of all groups."""
        blocks = self.blocks_for(num_tokens)
        return sum(min(blocks, group.most_blocks) for group in self.groups) + self.state_blocks

    def block_ids(self, request: Request) -> list[list[int]]:
        """The ids in the sequence's block tables, of each group in order."""
        table = self._tables.get(request.req_id)
        return [[block.block_id for block in blocks] for blocks in table.groups] if table is not None else []

    def state_pages(self, request: Request) -> list[int]:
        """The ids of the blocks that hold the sequence's state."""
        table = self._tables.get(request.req_id)
        return table.state.slot.pages if table is not None and table.state is not None else []

    def num_blocks_of(self, request: Request) -> int:
        """Number of blocks that the sequence holds, of all groups."""
        table = self._tables.get(request.req_id)
        return table.num_held if table is not None else 0

    def num_slots_of(self, request: Request) -> int:
        """Number of positions that the sequence's blocks have room for."""
        table = self._tables.get(request.req_id)
        return table.num_slots if table is not None else 0

    def missing_blocks(self, request: Request, hit: PrefixHit | None = None) -> int:
        """Blocks that its known tokens take at most beyond those it has, or would have after ``hit``."""
        total, table = self.blocks_for(request.num_tokens), self._tables.get(request.req_id)
        if hit is not None:
            revived = sum(block.ref_cnt == 0 for blocks in hit.blocks for block in blocks)
            missing = revived + self._most_missing(total, hit.num_blocks, self._first_held(hit.blocks))
            return missing + self.state_blocks
        if table is None:
            return self._most_missing(total, 0, [0] * len(self.groups)) + self.state_blocks
        of_state = self.state_blocks if table.state is not None and table.state.slot.holders > 1 else 0
        return self._most_missing(total, len(table), table.first) + of_state

    def _most_missing(self, total: int, have: int, first: list[int]) -> int:
        return sum(group.most_missing(total, have, begin) for group, begin in zip(self.groups, first, strict=True))

    def _first_held(self, tables: list[list[KVCacheBlock]]) -> list[int]:
        """The number of null blocks that each table begins with."""
        null = self.pool.null_block
        return [next((i for i, block in enumerate(blocks) if block is not null), len(blocks)) for blocks in tables]

    @property
    def pinned_ids(self) -> set[int]:
        """Blocks held only as sources of copies in the last scheduled step."""
        pins = Counter(block.block_id for block in self._pinned)
        return {block_id for block_id, count in pins.items() if self.pool.blocks[block_id].ref_cnt == count}

    def begin_step(self, now: float = 0.0) -> None:
        """The previous step's copies are scheduled: unpin their sources. ``now``: the time in seconds."""
        self.pool.begin_step(now)
        for block in self._pinned:
            self.pool.release(block)
        self._pinned.clear()
        if self.states is not None:
            self.states.begin_step()

    # -- prefix cache ------------------------------------------------------------------------------------------------

    def get_computed_blocks(self, request: Request) -> PrefixHit:
        """The longest cached prefix of the sequence's tokens. Takes no references."""
        if not self.enable_prefix_caching or request.skip_prefix_cache:
            return PrefixHit([[] for _ in self.groups])
        hit = self._finder.find(request)
        if self.states is None:
            return hit
        hit = self.states.cut(request, hit)
        self.states.plan(request, hit)
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
        if num_tokens >= table.release_at:
            self._release_passed(table, num_tokens)

    def confirm_state(self, request: Request, num_tokens: int) -> None:
        """A step's results show that the state has seen ``num_tokens``; after `confirm`, in a model with states."""
        table = self._tables[request.req_id]
        if self.states is not None and table.state is not None:
            self.states.confirm(request, table.state, num_tokens)

    def _release_passed(self, table: BlockTable, position: int) -> None:
        """Give back the blocks that the tokens from ``position`` on do not see. The device may keep them in its tables:
        it does not look at them."""
        for i, (group, blocks) in enumerate(zip(self.groups, table.groups, strict=True)):
            until = group.first_visible(position)
            for index in range(table.first[i], until):
                self.pool.release(blocks[index])
                blocks[index] = self.pool.null_block
            table.first[i] = max(until, table.first[i])
        table.release_at = self._next_release(table.first)

    def _next_release(self, first: list[int]) -> int:
        return min(group.first_release(begin) for group, begin in zip(self.groups, first, strict=True))

    def _cache_blocks(self, request: Request, table: BlockTable) -> None:
        """Offer what is confirmed: full blocks, and once the prompt's last part."""
        if not self.enable_prefix_caching:
            return
        num_full = min(request.num_confirmed_tokens, request.num_tokens) // self.block_size
        for i in range(table.num_hashed_blocks, num_full):
            tokens = tuple(request.key_token_ids[i * self.block_size : (i + 1) * self.block_size])
            own_hash, parent = hash_of(request, self.block_size, i), parent_hash(request, self.block_size, i)
            for g, group in enumerate(self.groups):
                block, key = table.groups[g][i], group.key(own_hash)
                if block.block_hash != key and block is not self.pool.null_block:
                    self.pool.index(block, group.key(parent), tokens, key)
                    if self.pool.events is not None and block.block_hash == key:  # no other block offers it already
                        salt = None if i else request.core_request.cache_salt
                        adapter = request.adapter.key if request.adapter is not None else None
                        self.pool.events.add((g, own_hash, parent if i else None, tokens, salt, adapter))
        if request.core_request.retain:
            self._retain(request, table, table.num_hashed_blocks, num_full)
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
        tokens, parent = tuple(request.key_token_ids[start:confirmed]), parent_hash(request, self.block_size, index)
        for group, blocks in zip(self.groups, table.groups, strict=True):
            if len(blocks[index].tokens) < len(tokens) and blocks[index] is not self.pool.null_block:
                self.pool.index(blocks[index], group.key(parent), tokens, None)
        if request.core_request.retain:
            self._retain(request, table, index, index + 1)

    def _retain(self, request: Request, table: BlockTable, first: int, until: int) -> None:
        """Mark the blocks from ``first`` to ``until`` that belong to what the request wants kept, as far as those who
        go on from there see them."""
        pool, size, begin = self.pool, self.block_size, first
        for wish in request.core_request.retain or ():
            end = min(until, self.blocks_for(wish.num_tokens))
            mark = Mark(wish.seconds, request.core_request.owner)
            for group, blocks in zip(self.groups, table.groups, strict=True):
                for index in range(max(begin, group.first_visible(wish.num_tokens - 1)), end):
                    block: KVCacheBlock | None = blocks[index]
                    if (index + 1) * size <= request.num_confirmed_tokens:  # another block may be the one that is found
                        block = pool.cached_blocks.get(group.key(hash_of(request, size, index)))
                    if block is not None and block.parent_hash is not None:
                        pool.retain(block, mark)
            begin = max(begin, end)

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
        if last_position <= table.num_slots and not table.shares_tail and last_position <= table.state_limit:
            return _NOTHING  # nearly always
        num_new = max(self.blocks_for(last_position) - len(table), 0)
        to_copy, index = _NO_GROUPS, 0  # groups in which another sequence holds the block that is written first
        if table.shares_tail:
            write_from = max(request.num_computed_tokens, request.num_kv_tokens)
            index = write_from // self.block_size
            if write_from < last_position and index < len(table):
                to_copy = [i for i, blocks in enumerate(table.groups) if blocks[index].ref_cnt > 1]
        if not num_new and not to_copy and last_position <= table.state_limit:
            return _NOTHING
        must_move = last_position > table.state_limit and self._must_move_state(request, table, last_position)
        needed = num_new * len(self.groups) + len(to_copy) + (self.state_blocks if must_move else 0)
        if needed > self.pool.num_free_blocks:
            return None
        allocation = Allocation()
        for i in to_copy:
            source, target = table.groups[i][index], self.pool.allocate()
            self._pinned.append(source)  # our reference becomes the pin
            table.groups[i][index] = target
            table.confirm_limit = index * self.block_size
            request.num_confirmed_tokens = min(request.num_confirmed_tokens, table.confirm_limit)
            allocation.copies.append((source.block_id, target.block_id))
            allocation.replaced_blocks.append((i, index, target.block_id))
        if table.shares_tail and write_from < last_position:
            table.shares_tail = False
        if num_new:
            allocation.new_block_ids = [self._append(blocks, num_new) for blocks in table.groups]
            table.num_slots += num_new * self.block_size
        if last_position > table.state_limit:
            allocation.state = self._place_state(request, table, last_position)
        return allocation

    def _must_move_state(self, request: Request, table: BlockTable, until: int) -> bool:
        if self.states is None or table.state is None:
            return False
        return self.states.must_move(request, table.state, until)

    def _place_state(self, request: Request, table: BlockTable, until: int) -> StatePlaces | None:
        if self.states is None or table.state is None:
            return None
        places = self.states.place(request, table.state, until)
        table.state_limit = places.limit
        return places

    def _append(self, blocks: list[KVCacheBlock], count: int) -> list[int]:
        """Append ``count`` new blocks; returns their ids."""
        new = [self.pool.allocate() for _ in range(count)]
        blocks += new
        return [block.block_id for block in new]

    def _allocate_first(self, request: Request, num_new_tokens: int, hit: PrefixHit) -> Allocation | None:
        num_shared = hit.num_blocks
        until = hit.num_tokens + num_new_tokens
        num_new = max(0, self.blocks_for(until) - num_shared)
        copied = hit.partial or []  # pinned while they are copied
        num_revived = sum(block.ref_cnt == 0 for blocks in (*hit.blocks, copied) for block in blocks)
        if num_new * len(self.groups) + num_revived + self.state_blocks > self.pool.num_free_blocks:
            return None
        first = self._first_held(hit.blocks)
        for blocks, begin in zip(hit.blocks, first, strict=True):
            for block in blocks[begin:]:
                self.pool.touch(block)
        for block in copied:
            self.pool.touch(block)
            self._pinned.append(block)
        state = self.states.start(request, hit) if self.states is not None else None  # takes nothing of the hit now
        allocation, groups = Allocation(), [list(blocks) for blocks in hit.blocks]
        for blocks in groups:
            self._append(blocks, num_new)
            allocation.new_block_ids.append([block.block_id for block in blocks])
        table = self._tables[request.req_id] = BlockTable(
            groups, first, (num_shared + num_new) * self.block_size, self._next_release(first), num_shared
        )
        if request.core_request.retain:
            self._retain(request, table, 0, num_shared)
        for block, blocks in zip(copied, groups, strict=False):
            allocation.copies.append((block.block_id, blocks[num_shared].block_id))
        request.num_computed_tokens = hit.num_tokens
        request.num_kv_tokens = request.num_confirmed_tokens = num_shared * self.block_size
        if state is not None:
            table.state, table.state_limit = state, 0
            request.num_confirmed_tokens = min(request.num_confirmed_tokens, hit.num_tokens)
            allocation.state = self._place_state(request, table, until)
        return allocation

    def fork(self, parent: Request, child: Request) -> None:
        """Let ``child`` share the blocks of ``parent``'s prompt, whose KV has been handed to the device.

        The child recomputes only the prompt's last token, for its logits, and holds what that token and later ones see:
        of the parent, steps in flight may see more. The state of both is that before this token.
        """
        table, last = self._tables[parent.req_id], parent.num_prompt_tokens - 1
        count = self.blocks_for(parent.num_prompt_tokens)
        first = [max(begin, group.first_visible(last)) for group, begin in zip(self.groups, table.first, strict=True)]
        groups = []
        for blocks, begin in zip(table.groups, first, strict=True):
            groups.append([self.pool.null_block] * begin + blocks[begin:count])
            for block in blocks[begin:count]:
                self.pool.touch(block)
        self._tables[child.req_id] = BlockTable(
            groups,
            first,
            count * self.block_size,
            self._next_release(first),
            shares_tail=True,
        )
        table.shares_tail = True
        if self.states is not None and table.state is not None:
            self._tables[child.req_id].state = self.states.fork(table.state)
            self._tables[child.req_id].state_limit = table.state_limit = 0
        child.num_state_tokens = parent.num_state_tokens
        child.num_computed_tokens = last
        child.num_kv_tokens = child.num_prompt_tokens

    def free(self, request: Request) -> None:
        """Release all blocks, the tail to be evicted first. What is confirmed stays in the prefix cache."""
        table = self._tables.pop(request.req_id, None)
        if table is None:
            return
        if self.enable_prefix_caching:
            self._cache_blocks(request, table)
            self._cache_partial(request, table)
        if self.states is not None and table.state is not None:
            self.states.free(request, table.state)
        for column in zip(*map(reversed, table.groups), strict=True):
            for block in column:
                if block is not self.pool.null_block:
                    self.pool.release(block)

    def check_integrity(self) -> None:
        """Raise AssertionError when tables, pins and reference counts do not add up. O(blocks)."""
        self.pool.check_integrity()
        null = self.pool.null_block
        holders = Counter(
            block.block_id
            for table in self._tables.values()
            for blocks, first in zip(table.groups, table.first, strict=True)
            for block in blocks[first:]
        )
        holders.update(block.block_id for block in self._pinned)
        if self.states is not None:
            states = [table.state for table in self._tables.values() if table.state is not None]
            assert len(states) == len(self._tables), "a sequence lacks a state"
            self.states.check_integrity(states)
            holders.update(page for slot in self.states.pool.slots() for page in slot.pages)
        assert 0 not in holders, "the null block is held"
        holders[0] += 1
        for block in self.pool.blocks:
            assert block.ref_cnt == holders[block.block_id], (
                f"block {block.block_id} counts {block.ref_cnt} references, {holders[block.block_id]} exist"
            )
        for req_id, table in self._tables.items():
            assert {len(blocks) * self.block_size for blocks in table.groups} == {table.num_slots}, "groups differ"
            held = [block.block_id for blocks in table.groups for block in blocks if block is not null]
            held += table.state.slot.pages if table.state is not None else []
            assert len(set(held)) == len(held) == table.num_held, f"{req_id} holds a block twice"


_NO_GROUPS: list[int] = []
_NOTHING = Allocation()
