"""Prefix hits are as long as they can be, shared blocks are copied before they are written, and nothing leaks."""

from __future__ import annotations

import pytest
from core_helpers import examples, request
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.block_pool import common_prefix_len
from octavo.core.free_queue import KVCacheBlock
from octavo.core.kv_cache_manager import Allocation, BlockTable, KVCacheManager
from octavo.core.request import Request

few_tokens = st.lists(st.integers(0, 1), min_size=1, max_size=20)


def prefill(kv: KVCacheManager, sequence: Request) -> Allocation | None:
    """Give a sequence room for all its tokens, as if one step had computed and confirmed them."""
    hit = kv.get_computed_blocks(sequence)
    allocation = kv.allocate_slots(sequence, sequence.num_tokens - hit.num_tokens, hit)
    if allocation is not None:
        confirm(kv, sequence)
    return allocation


def confirm(kv: KVCacheManager, sequence: Request) -> None:
    sequence.num_computed_tokens = sequence.num_tokens
    kv.confirm(sequence, sequence.num_tokens)


def decode(kv: KVCacheManager, sequence: Request, token: int = 7) -> Allocation | None:
    """Room for one token after those computed."""
    sequence.all_token_ids.append(token)
    allocation = kv.allocate_slots(sequence, 1)
    if allocation is not None:
        sequence.num_computed_tokens += 1
    return allocation


def kv_ids(table: BlockTable) -> list[list[int]]:
    return [[block.block_id for block in blocks] for blocks in table.groups]


def state_of(kv: KVCacheManager) -> tuple:
    return (
        [block.block_id for block in kv.pool.free_queue],
        [(block.ref_cnt, block.parent_hash, block.tokens) for block in kv.pool.blocks],
        {req_id: (kv_ids(table), table.first[:]) for req_id, table in kv._tables.items()},
        list(kv._pinned),
    )


@given(
    block_size=st.sampled_from([1, 2, 4, 16]),
    sequences=st.lists(st.tuples(few_tokens, st.sampled_from([None, "salt"]), st.booleans()), max_size=12),
    windows=st.sampled_from([(None,), (None,), (None, 5), (2, None, 9), (3,)]),
)
@examples(200)
def test_a_hit_is_the_longest_common_prefix_with_anything_computed_before(
    block_size: int, sequences: list, windows: tuple[int | None, ...]
) -> None:
    """... under the same salt, and at most all but the last token; as long as nothing had to be evicted, be it that a
    window has passed it."""
    kv = KVCacheManager(2000, block_size, windows=windows, step_tokens=40)
    before: list[tuple[list[int], str | None]] = []
    for i, (tokens, salt, keep_running) in enumerate(sequences):
        sequence = request(str(i), tokens, cache_salt=salt)
        hit = kv.get_computed_blocks(sequence)
        common = max((common_prefix_len(tokens, t) for t, s in before if s == salt), default=0)
        assert hit.num_tokens == min(common, len(tokens) - 1)
        assert prefill(kv, sequence) is not None
        assert sequence.num_kv_tokens == hit.num_blocks * block_size
        assert kv.num_slots_of(sequence) == kv.blocks_for(len(tokens)) * block_size
        if not keep_running:
            kv.free(sequence)
        before.append((tokens, salt))
        kv.check_integrity()
        kv.begin_step()
        kv.check_integrity()


@pytest.mark.parametrize("length", [5, 15, 16, 17, 32, 100, 128])
@pytest.mark.parametrize("still_running", [False, True])
def test_a_prompt_sent_twice_is_found_but_for_its_last_token(length: int, still_running: bool) -> None:
    kv = KVCacheManager(100, 16)
    prompt = [i % 50 for i in range(length)]
    first = request("first", prompt)
    prefill(kv, first)
    if not still_running:
        kv.free(first)
    assert kv.get_computed_blocks(request("second", prompt)).num_tokens == length - 1


def test_a_hit_ends_where_a_group_with_a_window_lost_what_it_needs() -> None:
    """It needs the last window alone; a group without one needs everything before that too."""
    kv = KVCacheManager(1 + 40, 4, windows=(None, 8), step_tokens=40)
    tokens = list(range(32))
    first = request("first", tokens)
    prefill(kv, first)
    kv.free(first)
    full, window = ([kv.pool.cached_blocks[group.key(first.block_hashes[i])] for i in range(8)] for group in kv.groups)

    def found(lost: list[KVCacheBlock]) -> int:
        """What is found once those blocks are used for something else."""
        kept = {block: (block.parent_hash, block.tokens, block.block_hash) for block in lost}
        for block in lost:
            kv.pool._unindex(block)
        hit = kv.get_computed_blocks(request("second", [*tokens, 99]))
        assert [len(blocks) for blocks in hit.blocks] == [hit.num_blocks] * 2
        assert [blocks.count(kv.pool.null_block) for blocks in hit.blocks] == [0, max(0, hit.num_blocks - 2)]
        for block, (parent, contents, own) in kept.items():
            assert parent is not None
            kv.pool.index(block, parent, contents, own)
        return hit.num_tokens

    assert found([]) == 32
    assert found(window[:6]) == 32, "no token to come sees these"
    assert found([window[7]]) == 28 and found([window[6]]) == 24
    assert found([window[1], window[4], window[7]]) == 28, "blocks 5 and 6 are a window"
    assert found([*window[1::2], window[6]]) == 4, "nowhere are two in a row"
    assert found([full[3]]) == 12 and found([full[3], window[2]]) == 8
    assert found([full[0]]) == 0 and found(window) == 0


def test_unconfirmed_blocks_are_not_found() -> None:
    kv = KVCacheManager(10, 4)
    first = request("first", list(range(10)))
    kv.allocate_slots(first, 10, kv.get_computed_blocks(first))
    first.num_computed_tokens = 10  # handed out, and nothing has come back
    assert kv.get_computed_blocks(request("second", list(range(10)))).num_tokens == 0
    kv.confirm(first, 6)  # the first chunk has
    assert kv.get_computed_blocks(request("second", list(range(10)))).num_tokens == 4


def test_no_caching_no_hits() -> None:
    off = KVCacheManager(10, 4, enable_prefix_caching=False)
    first = request("first", [1] * 9)
    prefill(off, first)
    off.free(first)
    assert off.get_computed_blocks(request("second", [1] * 9)).num_tokens == 0
    assert not off.pool.cached_blocks and not off.pool.children

    on = KVCacheManager(10, 4)
    prefill(on, request("first", [1] * 9))
    for needs_every_position in ({"prompt_logprobs": 1}, {"pooling": "mean"}):
        assert on.get_computed_blocks(request("second", [1] * 9, **needs_every_position)).num_tokens == 0


@given(
    block_size=st.sampled_from([1, 2, 4]),
    num_blocks=st.integers(1, 6),
    sequences=st.lists(st.tuples(few_tokens, st.booleans()), max_size=8),
    windows=st.sampled_from([(None,), (None, 3), (2,)]),
)
@examples(200)
def test_nothing_changes_without_room(
    block_size: int, num_blocks: int, sequences: list, windows: tuple[int | None, ...]
) -> None:
    kv = KVCacheManager(len(windows) * num_blocks + 1, block_size, windows=windows, step_tokens=20)
    for i, (tokens, keep_running) in enumerate(sequences):
        sequence = request(str(i), tokens)
        kv.begin_step()
        before = state_of(kv)
        if prefill(kv, sequence) is None:
            assert state_of(kv) == before
            assert sequence.num_computed_tokens == 0
            continue
        before = state_of(kv)
        while decode(kv, sequence) is not None:  # until the pool is full
            before = state_of(kv)
        assert state_of(kv) == before
        sequence.all_token_ids.pop()
        if not keep_running:
            kv.free(sequence)
        kv.check_integrity()


@given(block_size=st.sampled_from([1, 2, 4, 16]), length=st.integers(1, 40), n=st.integers(2, 6))
@examples(100)
def test_samples_share_the_prompt_and_copy_only_its_unfinished_block(block_size: int, length: int, n: int) -> None:
    kv = KVCacheManager(400, block_size)
    leader, *others = samples = [request(f"s{i}", list(range(length))) for i in range(n)]
    prefill(kv, leader)
    free = kv.pool.num_free_blocks
    for sample in others:
        kv.fork(leader, sample)
        assert kv.block_ids(sample) == kv.block_ids(leader)
        assert sample.num_computed_tokens == length - 1 and sample.num_kv_tokens == length
    assert kv.pool.num_free_blocks == free
    for sample in others:
        assert kv.allocate_slots(sample, 1) == Allocation()  # its last prompt token is computed and not written
        sample.num_computed_tokens += 1
    kv.begin_step()
    allocations = [decode(kv, sample) for sample in samples]
    kv.check_integrity()
    copies = [pair for allocation in allocations for pair in allocation.copies]  # type: ignore[union-attr]
    assert len(copies) == (n if length % block_size else 0)
    written = [kv.block_ids(sample)[0][length // block_size] for sample in samples]
    assert len(set(written)) == n, "two samples write one block"
    kv.begin_step()
    assert kv.pool.num_free_blocks == free - (n - 1 if length % block_size else n)
    for sample in samples:
        kv.free(sample)
    assert kv.pool.num_free_blocks == kv.pool.num_usable_blocks
    kv.check_integrity()


def test_the_source_of_a_copy_is_not_reused_in_its_step() -> None:
    """Or a block would be read and overwritten by the same batch of copies."""
    kv = KVCacheManager(1 + 3, 4)
    first = request("first", [1, 2])
    prefill(kv, first)
    kv.free(first)
    second = request("second", [1, 2, 3])
    allocation = prefill(kv, second)
    assert allocation is not None
    [(source, target)] = allocation.copies
    third = request("third", [5])
    prefill(kv, third)
    assert kv.block_ids(third) not in ([[source]], [[target]])
    assert prefill(kv, request("fourth", [6])) is None, "the pinned block was given away"
    assert kv.pinned_ids == {source}
    kv.begin_step()
    assert prefill(kv, request("fourth", [6])) is not None


def test_the_source_of_a_copy_on_write_is_not_reused_in_its_step() -> None:
    kv = KVCacheManager(1 + 3, 4)
    leader, other = request("leader", [1, 2]), request("other", [1, 2])
    prefill(kv, leader)
    kv.fork(leader, other)
    allocation = decode(kv, leader)
    assert allocation is not None
    [(source, _)] = allocation.copies
    kv.free(other)  # aborted: only the copy still needs the block
    assert kv.pinned_ids == {source}
    for name in ("a", "b"):
        prefill(kv, request(name, [9]))
    assert kv.num_blocks_of(request("b", [9])) == 0 and kv.pool.num_free_blocks == 0
    kv.check_integrity()
    kv.begin_step()
    assert kv.pool.num_free_blocks == 1


def test_two_copies_of_one_block_in_a_step_are_no_leak() -> None:
    kv = KVCacheManager(10, 4)
    first = request("first", [1, 2])
    prefill(kv, first)
    [[source]] = kv.block_ids(first)
    kv.free(first)
    for name in ("second", "third"):
        sequence = request(name, [1, 2, 3])
        allocation = kv.allocate_slots(sequence, 1, kv.get_computed_blocks(sequence))
        assert allocation is not None and allocation.copies[0][0] == source
        kv.free(sequence)
    assert kv.pinned_ids == {source}
    assert kv.pool.num_free_blocks + len(kv.pinned_ids) == kv.pool.num_usable_blocks


def test_a_block_is_offered_only_once_its_copy_is_confirmed() -> None:
    """A sample's step is confirmed while the step that copies its unfinished block is in flight, and may yet fail."""
    kv = KVCacheManager(10, 4)
    leader, other = request("leader", [1, 2]), request("other", [1, 2])
    prefill(kv, leader)
    kv.fork(leader, other)
    allocation = decode(kv, leader)
    assert allocation is not None
    [(_, target)] = allocation.copies
    kv.pool.reset_prefix_cache()
    kv.free(leader)  # aborted before the step came back
    assert kv.pool.blocks[target].parent_hash is None
    assert kv.get_computed_blocks(request("new", [1, 2, 3])).num_tokens == 0


def test_the_least_recently_used_prefix_goes_first_and_its_end_before_its_beginning() -> None:
    kv = KVCacheManager(1 + 6, 2)
    old, new = request("old", [1, 1, 2, 2, 3, 3]), request("new", [5, 5, 6, 6, 7, 7])
    for sequence in (old, new):
        prefill(kv, sequence)
        kv.free(sequence)
    found = []
    for _ in range(6):
        found.append(tuple(kv.get_computed_blocks(request("x", [*s.all_token_ids, 9])).num_tokens for s in (old, new)))
        kv.pool.allocate()
    assert found == [(6, 6), (4, 6), (2, 6), (0, 6), (0, 4), (0, 2)]
