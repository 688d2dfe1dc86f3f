"""Slots for states in the pool of blocks: bundles of blocks that stay together as long as no keys need them."""

from __future__ import annotations

from octavo.core.block_pool import BlockPool
from octavo.core.free_queue import KVCacheBlock
from octavo.core.state_slot import Snapshot, StateBlock, StateSlot, slot_of, worth_of
from octavo.core.states.snapshots import Snapshots
from octavo.interface.block_map import CACHED


class StatePool(BlockPool):
    """Blocks for keys, values and states. A slot without holders is a snapshot, or free; both count as free blocks.

    Blocks of a free slot become keys' when no other block is without contents; of snapshots and cached blocks goes
    first what is worth least, see `octavo.core.states.snapshots`.
    """

    def __init__(
        self,
        num_blocks: int,
        prefix_cache_blocks: int | None,
        state_blocks: int,
        num_tokens: int,
        most_retained: int = 0,
    ) -> None:
        """``state_blocks`` of a slot, which take as much memory as the keys and values of ``num_tokens``."""
        super().__init__(num_blocks, prefix_cache_blocks, most_retained)
        self.state_blocks = state_blocks
        self.snapshots = Snapshots(num_tokens)
        self.num_held = 0  # slots with holders
        self._free: list[StateSlot] = []

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated, cached ones and those of snapshots included."""
        slots = len(self._free) + self.snapshots.num_idle
        return super().num_free_blocks + slots * self.state_blocks

    def _make_block(self, block_id: int) -> KVCacheBlock:
        return StateBlock(block_id)

    # -- blocks ------------------------------------------------------------------------------------------------------

    def allocate(self) -> KVCacheBlock:
        """See `BlockPool.allocate`."""
        self._make_way()
        return super().allocate()

    def _make_way(self) -> None:
        """See to it that the next block is taken from what is worth least."""
        first = self.first_free
        if first is not None and first.parent_hash is None:
            return
        if not self._free:
            self._evict_next()
        if self._free:
            self._break_up(self._free.pop())

    def _evict_next(self) -> None:
        """If a snapshot is what is worth least, and something has to go, evict it: its slot is free then."""
        first = self.first_free
        if first is not None and first.parent_hash is None:
            return
        if self._num_unused and len(self.blocks) <= self._prefix_cache_blocks:
            return
        cheapest = self.snapshots.cheapest()
        if cheapest is not None and (first is None or cheapest[0] < worth_of(first)):
            self._evict(cheapest[1])

    def release(self, block: KVCacheBlock) -> None:
        """See `BlockPool.release`."""
        if isinstance(block, StateBlock):
            block.worth = self.snapshots.level + 1
        super().release(block)

    def _unindex(self, block: KVCacheBlock) -> None:
        block_hash = block.block_hash
        if block.ref_cnt == 0 and block.parent_hash is not None:  # it is evicted
            self.snapshots.level += 1 / self.num_usable_blocks
        super()._unindex(block)
        if block_hash is not None:
            for snapshot in self.snapshots.all_behind(block_hash):  # they cannot be reached any more
                self.forget(snapshot)

    def begin_step(self, now: float) -> None:
        """See `BlockPool.begin_step`; snapshots too."""
        super().begin_step(now)
        self.snapshots.begin_step(now)
        self._set_aside()

    def retain_snapshot(self, snapshot: Snapshot, seconds: float) -> None:
        """Keep a snapshot for that time after each use, if blocks that are to be kept leave it room."""
        kept = self.snapshots.num_retained + (not snapshot.seconds)
        if self.retained.num_blocks + kept * self.state_blocks <= self.retained.most:
            self.snapshots.retain(snapshot, seconds)
            self._set_aside()

    def _set_aside(self) -> None:
        self.retained.set_aside = self.snapshots.num_retained * self.state_blocks

    def reset_prefix_cache(self) -> None:
        """See `BlockPool.reset_prefix_cache`; snapshots too."""
        super().reset_prefix_cache()
        for snapshot in list(self.snapshots):
            self.forget(snapshot)

    # -- slots -------------------------------------------------------------------------------------------------------

    def take(self) -> StateSlot:
        """A slot with one holder, whatever it contains. There must be enough free blocks."""
        if not self._free:
            self._evict_next()
        if self._free:
            slot = self._free.pop()
        else:
            blocks = [self.allocate() for _ in range(self.state_blocks)]
            slot = StateSlot([block for block in blocks if isinstance(block, StateBlock)])
            for block in slot.blocks:
                block.slot = slot
        slot.holders = 1
        self.num_held += 1
        self._show(slot)
        return slot

    def _evict(self, snapshot: Snapshot) -> None:
        self.snapshots.level += self.snapshots.credit(snapshot) * self.state_blocks / self.num_usable_blocks
        self.snapshots.stats.num_evicted += snapshot.parent_hash is not None
        self.forget(snapshot)

    def _break_up(self, slot: StateSlot) -> None:
        for block in slot.blocks:
            block.slot = None
            super().release(block)

    def has_room(self, worth: float) -> bool:
        """Evict what is worth less until a slot takes nothing from the prefix cache. Returns False if that is not
        enough."""
        if self._free:
            return True
        blocks = iter(self.free_queue)
        block = next(blocks, None)
        room = max(0, min(self._num_unused, self._prefix_cache_blocks - len(self.blocks) + 1))
        while block is not None and block.parent_hash is None and room < self.state_blocks:
            room += 1
            block = next(blocks, None)
        while room < self.state_blocks and not self._free:
            cheapest = self.snapshots.cheapest()
            if cheapest is not None and (block is None or cheapest[0] < worth_of(block)):
                if cheapest[0] >= worth:
                    return False
                self._evict(cheapest[1])
                return True
            if block is None or worth_of(block) >= worth:
                return False
            victim, block = block, next(blocks, None)
            self.free_queue.remove(victim)
            self._unindex(victim)
            self.free_queue.prepend(victim)
            room += 1
        return True

    def hold(self, slot: StateSlot) -> None:
        """One holder more."""
        slot.holders += 1
        if slot.holders == 1:
            self.num_held += 1
            if slot.snapshot is not None:
                self.snapshots.take(slot.snapshot)
            self._show(slot)

    def drop(self, slot: StateSlot) -> None:
        """One holder less. Without any it is a snapshot, or free."""
        slot.holders -= 1
        if slot.holders:
            return
        self.num_held -= 1
        if slot.snapshot is not None:
            self.snapshots.leave(slot.snapshot)
        else:
            self._free.append(slot)
        self._show(slot)

    def keep(self, slot: StateSlot, snapshot: Snapshot) -> None:
        """Make the slot's state a snapshot; it is held."""
        slot.snapshot, snapshot.slot = snapshot, slot

    def forget(self, snapshot: Snapshot) -> None:
        """End a snapshot; without holders its slot is free."""
        slot = snapshot.slot
        if slot is None:
            return
        self.snapshots.forget(snapshot)
        slot.snapshot = None
        if not slot.holders:
            self._free.append(slot)
            self._show(slot)

    def _show(self, slot: StateSlot) -> None:
        """Write the block map's bytes of its blocks."""
        cell, cells = self.cell_of(slot.blocks[0]), self._cells
        for page in slot.pages:
            cells[page - 1] = cell

    def cell_of(self, block: KVCacheBlock) -> int:
        """See `BlockPool.cell_of`."""
        slot = slot_of(block)
        if slot is None:
            return super().cell_of(block)
        return 1 if slot.holders else CACHED if slot.snapshot is not None else 0

    def slots(self) -> set[StateSlot]:
        """All that there are."""
        return {slot for block in self.blocks if (slot := slot_of(block)) is not None}

    def check_integrity(self) -> None:
        """See `BlockPool.check_integrity`."""
        super().check_integrity()
        self.snapshots.check_integrity()
        slots = self.slots()
        for slot in slots:
            assert len(slot.blocks) == self.state_blocks and all(block.slot is slot for block in slot.blocks)
            assert slot.snapshot is None or slot.snapshot.slot is slot, "a slot and its snapshot disagree"
        free = {slot for slot in slots if not slot.holders and slot.snapshot is None}
        assert free == set(self._free) and len(free) == len(self._free), "a free slot is lost"
        assert self.num_held == sum(slot.holders > 0 for slot in slots), "held slots lost count"
        idle = sum(not slot.holders and slot.snapshot is not None for slot in slots)
        assert idle == self.snapshots.num_idle, "a snapshot is lost"
