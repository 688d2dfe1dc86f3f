"""Groups of layers have blocks of one size, and sequences take no more of them than is said."""

from __future__ import annotations

from core_helpers import examples, request
from hypothesis import example, given
from hypothesis import strategies as st

from octavo.core.kv_cache_manager import KVCacheManager
from octavo.interface.kv_cache_layout import KVCacheGroup, make_groups, make_layout
from octavo.interface.kv_cache_spec import KVCacheSpec

LENGTH = 1000


def specs(*windows: int | None, sizes: dict[int | None, int] | None = None) -> list[KVCacheSpec]:
    return [KVCacheSpec(1, (sizes or {}).get(window, 8), "float32", window=window) for window in windows]


def sizes_of(given: list[KVCacheSpec]) -> list[tuple[int, int | None]]:
    return [(len(group.layers), group.window) for group in make_groups(given, LENGTH)]


def test_layers_that_keep_the_same_positions_are_one_group() -> None:
    assert make_groups(specs(None, None, None), LENGTH) == [KVCacheGroup((0, 1, 2))]
    assert make_groups(specs(20, 20), LENGTH) == [KVCacheGroup((0, 1), 20)]
    assert make_groups(specs(LENGTH, None, LENGTH + 1), LENGTH) == [KVCacheGroup((0, 1, 2))], "no sequence leaves them"


def test_groups_have_as_many_layers_as_the_rarest_kind() -> None:
    five_to_one = [20, 20, 20, 20, 20, None]
    assert sizes_of(specs(*five_to_one * 3)) == [(3, None)] + [(3, 20)] * 5  # Gemma 3 270M
    found = sizes_of(specs(*five_to_one * 5, 20, 20, 20, 20))  # Gemma 3 4B
    assert found[0] == (5, None) and sorted(count for count, _ in found[1:]) == [4, 5, 5, 5, 5, 5]
    assert sizes_of(specs(*[20, None] * 12)) == [(12, None), (12, 20)]  # gpt-oss
    assert sizes_of(specs(*[20] * 9, *[None] * 8)) == [(8, None), (9, 20)]  # a padded layer, not 8 more groups
    wide = specs(*[20] * 6, None, sizes={None: 16, 20: 8})
    assert sizes_of(wide) == [(1, None), (2, 20), (2, 20), (2, 20)]  # as many bytes


@given(windows=st.lists(st.sampled_from([None, 5, 40]), min_size=1, max_size=40), wide=st.integers(1, 5))
@examples(100)
def test_every_layer_is_in_one_group_and_fits_its_block(windows: list[int | None], wide: int) -> None:
    layers = specs(*windows, sizes={None: 8 * wide})
    layout = make_layout(layers, LENGTH, 16, 32)
    assert sorted(layer for group in layout.groups for layer in group.layers) == list(range(len(layers)))
    for group in layout.groups:
        assert {layers[layer].window for layer in group.layers} == {group.window}
        assert 16 * sum(layers[layer].bytes_per_token() for layer in group.layers) <= layout.block_bytes
    assert 0 <= layout.padding < 1
    whole = make_layout(layers, LENGTH, 16, 32, grouped=False)
    assert len(whole.groups) == 1 and whole.padding == 0
    most = layout.most_blocks(LENGTH)
    assert layout.longest(most, LENGTH) == LENGTH and layout.longest(most, 10) == 10
    for few in (0, 1, most // 2, most - 1):
        longest = layout.longest(few, LENGTH)
        assert layout.most_blocks(longest) <= few < layout.most_blocks(longest + 1)


def test_a_window_of_512_takes_a_quarter_at_8192() -> None:
    layers = specs(*[512, 512, 512, 512, 512, None] * 3)
    grouped, whole = (make_layout(layers, 8320, 16, 192, grouped) for grouped in (True, False))
    assert grouped.most_blocks(8320) * grouped.block_bytes < 0.25 * whole.most_blocks(8320) * whole.block_bytes


@given(
    block_size=st.sampled_from([1, 4, 16]),
    windows=st.lists(st.sampled_from([None, 1, 5, 40]), min_size=1, max_size=3),
    chunks=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    late=st.integers(0, 2),
    cached=st.sampled_from([0, 0, 1, 20]),
)
@example(block_size=1, windows=[1], chunks=[1, 1, 1], late=2, cached=1)  # it holds what it found, unseen
@examples(200)
def test_a_sequence_keeps_what_later_tokens_see_and_no_more_than_is_said(
    block_size: int, windows: list[int | None], chunks: list[int], late: int, cached: int
) -> None:
    """``late``: as many steps are confirmed one after they were scheduled. ``cached``: an earlier sequence had as many
    tokens of it."""
    step = (late + 1) * max(chunks)
    kv = KVCacheManager(1200, block_size, windows=windows, step_tokens=step)
    tokens = list(range(cached + sum(chunks) + 1))
    if cached:
        earlier = request("earlier", tokens[: cached + 1])
        assert kv.allocate_slots(earlier, cached, kv.get_computed_blocks(earlier)) is not None
        kv.confirm(earlier, cached)
        kv.free(earlier)
    sequence = request("only", tokens)
    under_way: list[int] = []
    for i, chunk in enumerate(chunks):
        hit = kv.get_computed_blocks(sequence) if i == 0 else None
        missing = kv.missing_blocks(sequence, hit)
        before = kv.num_blocks_of(sequence)
        assert kv.allocate_slots(sequence, chunk, hit) is not None
        assert kv.num_blocks_of(sequence) - before <= missing
        sequence.num_computed_tokens += chunk
        assert kv.num_blocks_of(sequence) <= kv.most_blocks(sequence.num_computed_tokens)
        under_way.append(sequence.num_computed_tokens)
        if len(under_way) > late:
            confirmed = under_way.pop(0)
            kv.confirm(sequence, confirmed)
            for window, ids in zip(windows, kv.block_ids(sequence), strict=True):
                first = 0 if window is None else max(0, confirmed - window + 1) // block_size
                assert not any(ids[:first]) and all(ids[first:])
        kv.check_integrity()
    kv.free(sequence)
    kv.begin_step()  # nothing is copied any more
    assert kv.pool.num_free_blocks == kv.pool.num_usable_blocks
