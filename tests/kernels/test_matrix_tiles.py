"""Products by matrix tiles (AMX): bit for bit those that Intel's manual defines, on any machine by the emulator."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support import emulated_amx
from support.bf16_values import assert_same, spread

from octavo_kernels import cpu, packing
from octavo_kernels.cpu import compiler, latent, library
from octavo_kernels.lora import AdapterTable

FIXTURES = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}
TILE_ISAS = [*emulated_amx.names(), *(isa for isa in compiler.supported_isas() if isa == compiler.AMX)]
pytestmark = [
    pytest.mark.skipif(not TILE_ISAS, reason="neither an x86-64 compiler nor matrix tiles are here"),
    pytest.mark.parametrize("isa", TILE_ISAS, indirect=True),
]


@given(
    shape=st.tuples(st.integers(1, 70), st.integers(1, 70), st.integers(1, 140)),
    exponents=st.sampled_from([0, 20, 60, 110]),
    special=st.lists(st.sampled_from([float("nan"), float("inf"), float("-inf")]), max_size=2),
    seed=st.integers(0, 99),
)
@example((1, 1, 1), 0, [], 0)
@example((33, 65, 97), 60, [], 1)
@example((16, 32, 32), 110, [], 2)
@example((70, 33, 417), 20, [float("nan")], 3)  # so wide that its columns are taken in parts
@settings(max_examples=20, **FIXTURES)
def test_sums_have_the_bits_of_the_manual(isa, threads, shape, exponents, special, seed):
    rows, channels, width = shape
    x, weight = spread((rows, width), seed, exponents), spread((channels, width), seed + 1, exponents)
    for i, value in enumerate(special):
        x[(seed + i) % rows, (seed * 7 + i) % width] = value
    threads(1 + seed % 2)
    out = cpu.dense_linear(x, packing.pack_dense(weight), out_dtype=torch.float32)
    assert_same(out, emulated_amx.linear_by_tiles(x, weight))


def test_a_row_is_the_same_alone_in_a_batch_and_in_a_prompt(isa, threads):
    """Whatever tile it is in: sums are added in one order for all numbers of rows."""
    x, packed = spread((333, 600), 3, 12), packing.pack_dense(spread((40, 600), 4, 12))  # columns in two parts
    threads(1)
    prompt = cpu.dense_linear(x, packed)
    for rows in (1, 2, 15, 16, 17, 31, 32, 33, 64, 70):
        for count in (1, 2):
            threads(count)
            assert torch.equal(cpu.dense_linear(x[-rows:], packed), prompt[-rows:]), rows


def test_steps_after_a_weight_of_no_whole_tiles_stay_out(isa):
    """The last tile along the width reads no step of the next block: NaN times the padding's 0 would be NaN."""
    weight = torch.ones(64, 40).bfloat16()
    weight[32:] = torch.nan
    out = cpu.dense_linear(torch.ones(3, 40).bfloat16(), packing.pack_dense(weight))
    assert torch.equal(out[:, :32], torch.full((3, 32), 40.0).bfloat16()) and out[:, 32:].isnan().all()


@pytest.mark.parametrize("width", [32, 37, 96])
@pytest.mark.parametrize("channels", [1, 33, 128])
@pytest.mark.parametrize("rows", [1, 16, 33, 70])
def test_products_of_heads_have_them_too(isa, threads, rows, channels, width):
    """Rows lie apart, in part of a wider row of each head, and there is nothing but NaN around."""
    heads, around = 3, torch.full((rows, 3, width + 24), torch.nan).bfloat16()
    x, weight = spread((rows, heads, width), 7, 20), spread((heads, width, channels), 8, 20)
    around[..., :width] = x
    expected = torch.stack([emulated_amx.linear_by_tiles(x[:, h], weight[h].T) for h in range(heads)], 1)
    for count in (1, 2):
        threads(count)
        out = torch.full((rows, heads, channels + 3), 5.0).bfloat16()
        latent._head_linear(library.get_library(), around, weight, out)
        assert torch.equal(out[..., :channels], expected.bfloat16()) and (out[..., channels:] == 5).all()


@pytest.mark.parametrize("width", [32, 65, 160])
@pytest.mark.parametrize("rows", [1, 2, 8, 13])
def test_products_with_adapters_have_them_too(isa, threads, rows, width):
    """A few of each adapter, one of a rank above a tile's, and as many as a tile takes."""
    ranks, slots = (5, 40, 16), torch.tensor([1, 0, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1][-rows:], dtype=torch.int32)
    table = AdapterTable(3, max(ranks), [9, 9], torch.bfloat16)
    for slot, rank in enumerate(ranks):
        table.set(slot, spread((2 * rank, width), slot, 20), torch.ones(rank, 18).bfloat16())
    x = spread((rows, width), 9, 20)
    for count in (1, 2):
        threads(count)
        out = cpu.lora_shrink(x, table, slots)
        for row, slot in enumerate(slots.tolist()):
            expected = emulated_amx.linear_by_tiles(x[row : row + 1], spread((2 * ranks[slot], width), slot, 20))
            assert_same(out[row : row + 1, : 2 * ranks[slot]], expected)


def test_threads_hold_no_tiles_when_they_leave_nor_rely_on_those_they_left(isa, threads):
    if isa != emulated_amx.NAME:
        pytest.skip("a processor does not tell")
    x, packed = spread((300, 64), 5, 9), packing.pack_dense(spread((96, 64), 6, 9))
    expected = emulated_amx.linear_by_tiles(x, spread((96, 64), 6, 9))
    for count in (1, 2, 3):
        threads(count)
        for rows in (1, 40, 300):
            out = cpu.dense_linear(x[:rows], packed, out_dtype=torch.float32)
            assert torch.equal(out, expected[:rows])
            assert emulated_amx.configured_threads() == 0
            emulated_amx.disturb()
