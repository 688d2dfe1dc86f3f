"""The block pool keeps count, evicts the least recently used block, and finds the longest cached continuation."""

from __future__ import annotations

from collections import deque

import pytest
from core_helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.core.block_pool import BlockPool, common_prefix_len
from octavo.core.free_queue import FreeKVCacheBlockQueue, KVCacheBlock, Mark

PARENTS = [b"root", b"other"]
few_tokens = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple)
BLOCK_SIZE = 4


class FreeQueueMachine(RuleBasedStateMachine):
    """FreeKVCacheBlockQueue behaves like a deque."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = FreeKVCacheBlockQueue()
        self.model: deque[KVCacheBlock] = deque()
        self.outside = [KVCacheBlock(i) for i in range(8)]

    @precondition(lambda self: self.outside)
    @rule(which=st.integers(0, 7), front=st.booleans())
    def give(self, which: int, front: bool) -> None:
        block = self.outside.pop(which % len(self.outside))
        (self.queue.prepend if front else self.queue.append)(block)
        (self.model.appendleft if front else self.model.append)(block)

    @precondition(lambda self: self.model)
    @rule()
    def popleft(self) -> None:
        block = self.queue.popleft()
        assert block is self.model.popleft()
        self.outside.append(block)

    @precondition(lambda self: self.model)
    @rule(which=st.integers(0, 7))
    def remove(self, which: int) -> None:
        block = self.model[which % len(self.model)]
        self.queue.remove(block)
        self.model.remove(block)
        self.outside.append(block)

    @invariant()
    def same_order(self) -> None:
        assert list(self.queue) == list(self.model)
        assert self.queue.num_free_blocks == len(self.model)


TestFreeQueue = FreeQueueMachine.TestCase
TestFreeQueue.settings = examples(60, stateful_step_count=30)


def test_an_empty_free_queue_says_so() -> None:
    queue = FreeKVCacheBlockQueue()
    with pytest.raises(AssertionError, match="no free block"):
        queue.popleft()
    with pytest.raises(AssertionError, match="not in the free queue"):
        queue.remove(KVCacheBlock(3))


class BlockPoolMachine(RuleBasedStateMachine):
    """BlockPool against a list of free ids, a dict of counts and a dict of what each block offers."""

    @initialize(num_usable=st.integers(1, 8), cached=st.none() | st.integers(0, 9), most_retained=st.integers(0, 6))
    def start(self, num_usable: int, cached: int | None, most_retained: int) -> None:
        self.pool = BlockPool(num_usable + 1, cached, most_retained)
        self.most_retained = most_retained
        self.marks: dict[int, Mark] = {}
        self.kept: list[tuple[int, int]] = []  # minute of its end and id, as they were left
        self.now = 0.0
        self.cached = num_usable if cached is None else cached
        self.unused = list(range(1, num_usable + 1))
        self.free: list[int] = []  # of those that have been used, the next to be evicted first
        self.counts: dict[int, int] = {}
        self.offers: dict[int, tuple[bytes, tuple[int, ...]]] = {}
        self.most_held = 0

    def _pick(self, ids: list[int], which: int) -> KVCacheBlock:
        return self.pool.blocks[ids[which % len(ids)]]

    def _leave(self, block_id: int) -> None:
        """The model's block ends its use, or gets a mark while it is free."""
        if block_id not in self.offers:
            self.marks.pop(block_id, None)
            self.free.insert(0, block_id)
        elif (mark := self.marks.get(block_id)) is None:
            self.free.append(block_id)
        else:
            self.kept.append((int((self.now + mark.seconds) // 60) + 1, block_id))
            if len(self.kept) > self.most_retained:
                self._expire(self.kept[0])

    def _expire(self, one: tuple[int, int]) -> None:
        self.kept.remove(one)
        del self.marks[one[1]]
        self.free.append(one[1])

    def _take(self, block_id: int) -> None:
        self.free = [i for i in self.free if i != block_id]
        self.kept = [one for one in self.kept if one[1] != block_id]

    @rule(seconds=st.sampled_from([1, 70, 400]))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds
        self.pool.begin_step(self.now)
        while over := [one for one in self.kept if one[0] <= self.now // 60]:
            self._expire(self._ends_first(over))

    def _ends_first(self, among: list[tuple[int, int]]) -> tuple[int, int]:
        return min(among, key=lambda one: one[0])

    @rule(which=st.integers(0, 100), seconds=st.sampled_from([30, 300]))
    def retain(self, which: int, seconds: int) -> None:
        if self.offers:
            block = self._pick(sorted(self.offers), which)
            mark, known = Mark(seconds), self.marks.get(block.block_id)
            self.pool.retain(block, mark)
            if known is None or known.seconds <= seconds:
                if not self.counts[block.block_id]:
                    self._take(block.block_id)
                self.marks[block.block_id] = mark
                if not self.counts[block.block_id]:
                    self._leave(block.block_id)

    @precondition(lambda self: self.free or self.unused or self.kept)
    @rule()
    def allocate(self) -> None:
        block = self.pool.allocate()
        first = self.free[0] if self.free else self._ends_first(self.kept)[1] if self.kept else None
        empty = first is not None and first not in self.offers
        grow = self.unused and not empty and (first is None or len(self.counts) < self.cached)
        assert block.block_id == (self.unused.pop(0) if grow else first)
        self._take(block.block_id)
        self.marks.pop(block.block_id, None)
        assert block.ref_cnt == 1 and block.parent_hash is None and block.block_hash is None
        self.counts[block.block_id] = 1
        self.offers.pop(block.block_id, None)
        self.most_held = max(self.most_held, sum(count > 0 for count in self.counts.values()))

    @rule(which=st.integers(0, 100))
    def touch(self, which: int) -> None:
        ids = [i for i in self.counts if self.counts[i] or i in self.offers]
        if ids:
            block = self._pick(ids, which)
            self.pool.touch(block)
            if not self.counts[block.block_id]:
                self._take(block.block_id)
            self.counts[block.block_id] += 1
            self.most_held = max(self.most_held, sum(count > 0 for count in self.counts.values()))

    @rule(which=st.integers(0, 100))
    def release(self, which: int) -> None:
        ids = [i for i in self.counts if self.counts[i]]
        if ids:
            block = self._pick(ids, which)
            self.pool.release(block)
            self.counts[block.block_id] -= 1
            if not self.counts[block.block_id]:
                self._leave(block.block_id)

    @rule(which=st.integers(0, 100), parent=st.sampled_from(PARENTS), tokens=few_tokens)
    def index(self, which: int, parent: bytes, tokens: tuple[int, ...]) -> None:
        ids = [i for i in self.counts if self.counts[i]]
        if ids:
            block = self._pick(ids, which)
            self.pool.index(block, parent, tokens, self._hash(parent, tokens))
            self.offers.pop(block.block_id, None)
            # What another block offers already, or the beginning of it, is not offered again.
            if not any(p == parent and t[: len(tokens)] == tokens for p, t in self.offers.values()):
                self.offers[block.block_id] = parent, tokens

    @rule()
    def reset(self) -> None:
        self.pool.reset_prefix_cache()
        self.offers.clear()
        while self.kept:
            self._expire(self._ends_first(self.kept))

    @rule(parent=st.sampled_from(PARENTS), tokens=few_tokens)
    def look_up(self, parent: bytes, tokens: tuple[int, ...]) -> None:
        lengths = [common_prefix_len(t, tokens) for p, t in self.offers.values() if p == parent]
        match = self.pool.longest_match(parent, tokens)
        assert (match[1] if match else 0) == max(lengths, default=0)
        if match:
            parent_of_match, offered = self.offers[match[0].block_id]
            assert parent_of_match == parent and offered[: match[1]] == tokens[: match[1]]

    @staticmethod
    def _hash(parent: bytes, tokens: tuple[int, ...]) -> bytes | None:
        return parent + bytes(tokens) if len(tokens) == BLOCK_SIZE else None

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        assert [b.block_id for b in self.pool.free_queue] == self.free
        assert sorted((b.bucket, b.block_id) for b in self.pool.retained) == sorted(self.kept)
        assert {b.block_id: b.mark for b in self.pool.blocks if b.mark} == self.marks
        assert {b.block_id: b.ref_cnt for b in self.pool.blocks[1:]} == self.counts
        assert {b.block_id: (b.parent_hash, b.tokens) for b in self.pool.blocks if b.parent_hash} == self.offers
        full = {self._hash(*offer): i for i, offer in self.offers.items() if len(offer[1]) == BLOCK_SIZE}
        assert {h: b.block_id for h, b in self.pool.cached_blocks.items()} == full
        free, usable = len(self.free) + len(self.kept) + len(self.unused), len(self.counts) + len(self.unused)
        assert (self.pool.num_free_blocks, self.pool.num_usable_blocks) == (free, usable)
        assert self.pool.usage == pytest.approx(1 - free / usable)

    @invariant()
    def grow_only_as_far_as_needed(self) -> None:
        if hasattr(self, "pool"):
            assert len(self.counts) <= max(self.cached, self.most_held)


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = examples(100, stateful_step_count=40)


@given(
    offers=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=8).map(tuple), max_size=30),
    wanted=st.lists(st.integers(0, 3), max_size=8).map(tuple),
)
@examples(200)
def test_longest_match_is_the_best_of_all(offers: list[tuple[int, ...]], wanted: tuple[int, ...]) -> None:
    pool = BlockPool(len(offers) + 1)
    for tokens in offers:
        pool.index(pool.allocate(), b"parent", tokens, None)
    pool.check_integrity()
    best = max((common_prefix_len(tokens, wanted) for tokens in offers), default=0)
    match = pool.longest_match(b"parent", wanted)
    assert (match[1] if match else 0) == best
    assert match is None or match[0].tokens[:best] == wanted[:best]
    assert pool.longest_match(b"another parent", wanted) is None


@given(usable=st.integers(1, 30), cached=st.none() | st.integers(0, 40), at_once=st.integers(1, 30))
@examples(100)
def test_the_prefix_cache_grows_to_its_bound_and_sequences_to_what_they_need(
    usable: int, cached: int | None, at_once: int
) -> None:
    pool = BlockPool(usable + 1, cached)
    for number in range(2 * usable):
        block = pool.allocate()
        pool.index(block, b"parent", (number,), None)
        pool.release(block)
    bound = usable if cached is None else min(max(cached, 1), usable)
    assert len(pool.blocks) - 1 == len(pool.children[b"parent"]) == bound
    held = [pool.allocate() for _ in range(min(at_once, usable))]
    assert len(pool.blocks) - 1 == max(bound, len(held))
    assert len({block.block_id for block in held}) == len(held)
    pool.check_integrity()


def test_integrity_check_sees_a_lost_block() -> None:
    pool = BlockPool(4)
    pool.allocate().ref_cnt = 0
    with pytest.raises(AssertionError, match="neither free nor used"):
        pool.check_integrity()
