"""Products by Arm's matrix instructions: bit for bit as the architecture defines them, emulated or on such a CPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support import emulated_kernels
from support.bf16_values import assert_same, spread
from support.bfmmla import linear_by_pairs

from octavo_kernels import cpu, packing
from octavo_kernels.cpu import latent, library

FIXTURES = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}
ISAS = [isa for isa in emulated_kernels.all_parameters() if "i8mm" in str(getattr(isa, "values", isa))]
pytestmark = [
    pytest.mark.skipif(not ISAS, reason="neither these instructions nor an emulator of them are here"),
    pytest.mark.parametrize("isa", ISAS, indirect=True),
]


@given(
    shape=st.tuples(st.integers(1, 70), st.integers(1, 70), st.integers(1, 140)),
    exponents=st.sampled_from([0, 20, 60, 110]),
    special=st.lists(st.sampled_from([float("nan"), float("inf"), float("-inf")]), max_size=2),
    seed=st.integers(0, 99),
)
@example((1, 1, 1), 0, [], 0)
@example((33, 65, 97), 60, [], 1)
@example((12, 32, 32), 110, [], 2)
@settings(max_examples=20, **FIXTURES)
def test_sums_of_bfloat16_have_the_bits_of_the_architecture(isa, threads, shape, exponents, special, seed):
    rows, channels, width = shape
    x, weight = spread((rows, width), seed, exponents), spread((channels, width), seed + 1, exponents)
    for i, value in enumerate(special):
        x[(seed + i) % rows, (seed * 7 + i) % width] = value
    threads(1 + seed % 2)
    out = cpu.dense_linear(x, packing.pack_dense(weight), out_dtype=torch.float32)
    assert_same(out, linear_by_pairs(x, weight))


def test_a_row_is_the_same_alone_in_a_batch_and_in_a_prompt(isa, threads):
    """Whatever tile it is in, and whether another row shares its instructions."""
    x, packed = spread((71, 200), 3, 12), packing.pack_dense(spread((40, 200), 4, 12))
    threads(1)
    prompt = cpu.dense_linear(x, packed)
    for rows in range(1, 27):
        threads(1 + rows % 2)
        assert torch.equal(cpu.dense_linear(x[-rows:], packed), prompt[-rows:]), rows


@pytest.mark.parametrize("width", [32, 37, 96])
@pytest.mark.parametrize("channels", [1, 33, 128])
@pytest.mark.parametrize("rows", [1, 2, 7, 33])
def test_products_of_heads_have_them_too(isa, threads, rows, channels, width):
    """Rows lie apart, in part of a wider row of each head, and there is nothing but NaN around."""
    heads, around = 3, torch.full((rows, 3, width + 24), torch.nan).bfloat16()
    x, weight = spread((rows, heads, width), 7, 20), spread((heads, width, channels), 8, 20)
    around[..., :width] = x
    expected = torch.stack([linear_by_pairs(x[:, h], weight[h].T) for h in range(heads)], 1)
    threads(2)
    out = torch.full((rows, heads, channels + 3), 5.0).bfloat16()
    latent._head_linear(library.get_library(), around, weight, out)
    assert torch.equal(out[..., :channels], expected.bfloat16()) and (out[..., channels:] == 5).all()


def test_what_follows_a_weight_of_an_odd_number_of_steps_stays_out(isa):
    """The last four columns are two of the weight and two zeros, not the next block's: NaN times 0 would be NaN."""
    weight = torch.ones(64, 38).bfloat16()
    weight[32:] = torch.nan
    out = cpu.dense_linear(torch.ones(3, 38).bfloat16(), packing.pack_dense(weight))
    assert torch.equal(out[:, :32], torch.full((3, 32), 38.0).bfloat16()) and out[:, 32:].isnan().all()
