"""Slots for states in the pool of blocks, and which snapshot or block gives way: by the pool, and by a model of it."""

from __future__ import annotations

from core_helpers import examples
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.core.free_queue import KVCacheBlock
from octavo.core.state_slot import Snapshot, StateSlot, worth_of
from octavo.core.states.slots import StatePool
from octavo.interface.block_map import count_blocks

TOKENS = 16  # whose keys take as much as a state


class StatePoolMachine(RuleBasedStateMachine):
    """Blocks and slots are taken and left; of what is cached the model says what is worth least."""

    @initialize(slots=st.integers(1, 6), size=st.integers(1, 4), extra=st.integers(0, 9), share=st.integers(0, 30))
    def start(self, slots: int, size: int, extra: int, share: int) -> None:
        self.pool = StatePool(slots * size + extra + 1, share or None, size, TOKENS)
        self.cells = memoryview(bytearray(self.pool.num_usable_blocks))
        self.pool.share_block_map(self.cells)
        self.blocks: list[KVCacheBlock] = []
        self.slots: list[StateSlot] = []
        self.worth: dict[object, float] = {}  # of what is cached and not held, when it was left
        self.num_added = 0

    def _worth_of(self, snapshot: Snapshot) -> float:
        base = snapshot.base
        while base is not None and base.slot is None:
            base = base.base
        gap = snapshot.position - (base.position if base is not None else 0)
        return snapshot.level + min(1.0, gap / TOKENS)

    def _cached(self) -> dict[object, float]:
        """What may be evicted, and what it is worth."""
        slots = [slot.snapshot for slot in self.pool.slots() if not slot.holders and slot.snapshot is not None]
        blocks = [block for block in self.pool.blocks[1:] if block.ref_cnt == 0 and block.parent_hash is not None]
        return {one: self._worth_of(one) for one in slots} | {one: worth_of(one) for one in blocks}

    def _check_evicted(self, before: dict[object, float]) -> None:
        """What is gone was worth no more than what is left."""
        gone = [worth for one, worth in before.items() if one not in self._cached()]
        left = [worth for one, worth in before.items() if one in self._cached()]
        assert not gone or not left or max(gone) <= min(left) + 1e-9 or len(gone) > 1

    @precondition(lambda self: hasattr(self, "pool") and self.pool.num_free_blocks)
    @rule()
    def take_block(self) -> None:
        before, free = self._cached(), self.pool.num_free_blocks
        self.blocks.append(self.pool.allocate())
        assert self.pool.num_free_blocks == free - 1
        self._check_evicted(before)

    @precondition(lambda self: hasattr(self, "pool") and self.pool.num_free_blocks >= self.pool.state_blocks)
    @rule()
    def take_slot(self) -> None:
        free = self.pool.num_free_blocks
        slot = self.pool.take()
        assert slot.snapshot is None and slot.holders == 1
        assert self.pool.num_free_blocks == free - self.pool.state_blocks
        self.slots.append(slot)

    @precondition(lambda self: getattr(self, "blocks", None))
    @rule(which=st.integers(0, 100), cached=st.booleans())
    def leave_block(self, which: int, cached: bool) -> None:
        block = self.blocks.pop(which % len(self.blocks))
        if cached:
            self.num_added += 1
            self.pool.index(block, b"root", (self.num_added,), b"%d" % self.num_added)
        self.pool.release(block)

    @precondition(lambda self: getattr(self, "slots", None))
    @rule(which=st.integers(0, 100), position=st.integers(1, 3 * TOKENS), kept=st.booleans(), after=st.integers(0, 100))
    def leave_slot(self, which: int, position: int, kept: bool, after: int) -> None:
        slot = self.slots.pop(which % len(self.slots))
        if kept and slot.snapshot is None:
            earlier = [one for one in self.pool.snapshots if one.position < position]
            snapshot = Snapshot(position, "end", earlier[after % len(earlier)] if earlier else None)
            self.pool.keep(slot, snapshot)
            self.num_added += 1
            parents = [*self.pool.cached_blocks, b"root"]
            assert self.pool.snapshots.offer(snapshot, parents[after % len(parents)], (self.num_added,))
        self.pool.drop(slot)

    @precondition(lambda self: hasattr(self, "pool") and list(self.pool.snapshots))
    @rule(which=st.integers(0, 100), holds=st.booleans())
    def use_snapshot(self, which: int, holds: bool) -> None:
        snapshot = list(self.pool.snapshots)[which % self.pool.snapshots.num_offered]
        assert snapshot.slot is not None
        if holds:
            self.pool.hold(snapshot.slot)
            self.slots.append(snapshot.slot)
        self.pool.snapshots.renew(snapshot)

    @precondition(lambda self: hasattr(self, "pool"))
    @rule(worth=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 5.0]))
    def make_room(self, worth: float) -> None:
        """What is worth as much stays; if there is room, a slot displaces nothing."""
        before, free = self._cached(), self.pool.num_free_blocks
        has_room = self.pool.has_room(worth)
        after = self._cached()
        unreachable = {one for one in before if isinstance(one, Snapshot)}
        assert all(value < worth for one, value in before.items() if one not in after and one not in unreachable)
        assert self.pool.num_free_blocks == free
        if has_room:
            slot = self.pool.take()
            assert self._cached().keys() == after.keys(), "a slot displaces something"
            self.pool.drop(slot)

    @rule()
    def reset(self) -> None:
        if hasattr(self, "pool"):
            self.pool.reset_prefix_cache()
            assert not list(self.pool.snapshots)

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        held = len(self.blocks) + self.pool.state_blocks * len(set(self.slots))
        assert self.pool.num_free_blocks == self.pool.num_usable_blocks - held
        assert count_blocks(bytes(self.cells)).used == held


TestStatePool = StatePoolMachine.TestCase
TestStatePool.settings = examples(150, stateful_step_count=60)
