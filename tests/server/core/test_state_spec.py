"""States of recurrent layers: their granules fit the blocks of the pool, and sequences take as many as is said."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from octavo.interface.kv_cache_layout import make_layout
from octavo.interface.kv_cache_spec import KVCacheSpec
from octavo.interface.state_spec import StateSpec

MIB = 1 << 20
SPECS = st.builds(
    lambda shared, **fields: StateSpec(value_heads=shared * fields["key_heads"], **fields),
    shared=st.integers(1, 4),
    num_layers=st.integers(1, 5),
    key_heads=st.integers(1, 4),
    key_size=st.sampled_from([8, 24, 64, 128, 256]),
    value_size=st.sampled_from([8, 16, 40, 48, 128, 256]),
    taps=st.integers(2, 8),
) | st.builds(
    StateSpec,
    num_layers=st.integers(1, 5),
    **dict.fromkeys(("key_heads", "value_heads", "key_size", "value_size"), st.just(0)),
    taps=st.integers(2, 8),
    plain_channels=st.integers(1, 3000),
)


@given(spec=SPECS, layers=st.integers(0, 3), size=st.sampled_from([1, 16]), heads=st.integers(1, 8))
def test_all_numbers_of_a_state_have_a_place_of_their_own(spec: StateSpec, layers: int, size: int, heads: int) -> None:
    layout = make_layout([KVCacheSpec(heads, 16, "int8", 4)] * layers, 1000, size, 32, state=spec)
    per_block = layout.block_bytes // spec.granule_bytes
    assert per_block >= 1 and layout.block_bytes % 64 == 0
    granules = spec.num_layers * (spec.matrix_granules + spec.window_granules)
    assert layout.state_blocks * per_block >= granules > (layout.state_blocks - 1) * per_block
    assert granules * spec.granule_bytes >= spec.num_bytes
    assert spec.channels_of_granule % 8 == 0 < spec.channels_of_granule
    assert spec.channels_of_granule * (spec.taps - 1) * 4 <= spec.granule_bytes
    assert spec.window_granules * spec.channels_of_granule >= spec.channels
    if spec.channels_of_granule > 64:
        assert spec.channels_of_granule % 64 == 0
    of_keys = make_layout(layout.specs, 1000, size, 32)
    assert layout.most_blocks(100) == of_keys.most_blocks(100) + layout.state_blocks
    for few in (0, layout.state_blocks, layout.state_blocks + 7):
        longest = layout.longest(few, 1000)
        assert longest == 0 or layout.most_blocks(longest) <= few


def test_states_of_published_models_have_the_sizes_that_follow_from_their_config() -> None:
    """Qwen3.5 0.8B, 4B and 27B: 18 MiB of matrices and 1.3 of windows, 48 and 2.3, 144 and 5.6. LFM2 1.2B: windows."""
    for layers, heads, mib in ((18, 16, 19.3), (24, 32, 50.3), (48, 48, 149.6)):
        spec = StateSpec(layers, 16, heads, 128, 128, 4)
        assert abs(spec.num_bytes / MIB - mib) < 0.1
    lfm2 = make_layout([KVCacheSpec(8, 64, "int8", 4)] * 6, 1000, 16, 32, state=StateSpec(10, 0, 0, 0, 0, 3, 2048))
    assert lfm2.state_blocks == 2 and abs(lfm2.state.num_bytes / MIB - 0.16) < 0.01  # type: ignore[union-attr]
    small = make_layout([KVCacheSpec(2, 256, "int8", 16)] * 6, 1000, 16, 32, state=StateSpec(18, 16, 16, 128, 128, 4))
    assert small.state_blocks * small.block_bytes < 1.1 * small.state.num_bytes  # type: ignore[union-attr]
