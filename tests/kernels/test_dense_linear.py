"""Linears with weights of 16 and 32 bits: numbers are the stored ones, rows independent, rounding is float32's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.emulated_kernels import all_parameters

from octavo_kernels import cpu, packing, reference
from octavo_kernels.dense import DENSE_DTYPES, empty_dense, unpack_dense

FIXTURES = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}
C_ISAS = all_parameters()
ACTIVATIONS = [torch.float32, torch.bfloat16]


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("dtype", DENSE_DTYPES, ids=name)
@pytest.mark.parametrize("shape", [(1, 1), (31, 7), (32, 64), (97, 70)])
def test_packing_keeps_every_number(isa, dtype, shape):
    weight = torch.randn(shape).to(dtype)
    assert torch.equal(unpack_dense(packing.pack_dense(weight)), weight.float())


def test_parts_of_unlike_dtypes_lie_side_by_side_whatever_order_they_come_in(isa):
    parts = [torch.randn(n, 33).to(d) for n, d in [(7, DENSE_DTYPES[1]), (40, DENSE_DTYPES[1]), (5, DENSE_DTYPES[2])]]
    weight = empty_dense([7, 40, 5], 33, [part.dtype for part in parts])
    assert [part.channels for part in weight.parts] == [47, 5]
    for first, part in [(47, parts[2]), (7, parts[1]), (0, parts[0])]:
        packing.fill_dense(weight, first, part)
    stored = torch.cat([part.float() for part in parts])
    assert torch.equal(unpack_dense(weight), stored)
    x, bias = torch.randn(9, 33), torch.randn(52)
    torch.testing.assert_close(cpu.dense_linear(x, weight, bias), x @ stored.T + bias)
    for first, rows in [(46, parts[2]), (0, parts[0].float()), (0, torch.zeros(3, 34).bfloat16())]:
        with pytest.raises(ValueError, match="rows: "):
            packing.fill_dense(weight, first, rows)
    with pytest.raises((ValueError, RuntimeError)):
        cpu.dense_linear(torch.ones(1, 32), weight)


@given(
    dtypes=st.tuples(st.sampled_from(ACTIVATIONS), st.sampled_from(DENSE_DTYPES)),
    shape=st.tuples(st.integers(0, 40), st.integers(1, 130), st.integers(1, 300)),
    biased=st.booleans(),
    wide=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, **FIXTURES)
def test_results_are_within_the_rounding_of_float32(isa, dtypes, shape, biased, wide, seed):
    torch.manual_seed(seed)
    (rows, channels, width), (x_dtype, dtype) = shape, dtypes
    x, weight = torch.randn(rows, width).to(x_dtype), torch.randn(channels, width).to(dtype)
    bias = torch.randn(channels) if biased else None
    out = cpu.dense_linear(x, packing.pack_dense(weight), bias, torch.float32 if wide else None)
    assert out.dtype == (torch.float32 if wide else x_dtype)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    size = x.double().abs() @ weight.double().abs().T + 1  # of the terms that are added up
    rounding = 0.0 if out.dtype == torch.float32 else 2**-8  # of the result
    assert ((out.double() - exact).abs() <= width * 2**-23 * size + rounding * exact.abs()).all()


@pytest.mark.parametrize("isa", C_ISAS, indirect=True)
@given(
    dtypes=st.tuples(st.sampled_from(ACTIVATIONS), st.sampled_from(DENSE_DTYPES)),
    shape=st.tuples(st.integers(1, 130), st.integers(1, 600)),
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, **FIXTURES)
def test_rows_are_bit_equal_whatever_their_number(isa, threads, dtypes, shape, counts, seed):
    torch.manual_seed(seed)
    packed = packing.pack_dense(torch.randn(shape).to(dtypes[1]))
    x = torch.randn(sum(counts), shape[1]).to(dtypes[0])
    threads(1)
    together = cpu.dense_linear(x, packed)
    alone = torch.cat([cpu.dense_linear(row, packed) for row in x.split(1)])
    assert torch.equal(alone, together)
    for count in (2, 3):
        threads(count)
        assert torch.equal(cpu.dense_linear(x, packed), together)
        assert torch.equal(torch.cat([cpu.dense_linear(part, packed) for part in x.split(counts)]), together)


@pytest.mark.parametrize("dtype", DENSE_DTYPES, ids=name)
@pytest.mark.parametrize("x_dtype", ACTIVATIONS, ids=name)
def test_infinities_and_nan_stay_in_their_rows_and_channels(isa, x_dtype, dtype):
    x, weight = torch.rand(4, 65) + 0.5, torch.rand(40, 65) + 0.5
    x[1, 64], x[2, 3] = torch.inf, torch.nan
    weight[33, 0], weight[39, 64], weight[7, 7] = torch.inf, -torch.inf, torch.nan
    x, weight = x.to(x_dtype), weight.to(dtype)
    out, expected = cpu.dense_linear(x, packing.pack_dense(weight)), x.double() @ weight.double().T
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(kind(out), kind(expected)), kind


@pytest.mark.parametrize("dtype", DENSE_DTYPES, ids=name)
@pytest.mark.parametrize("out_dtype", ACTIVATIONS, ids=name)
def test_embedding_rows_are_the_stored_ones(isa, dtype, out_dtype):
    table = torch.randn(70, 45)
    table[3, :4] = torch.tensor([torch.inf, -torch.inf, 6e-8, -0.0])
    table = table.to(dtype)
    ids = torch.tensor([[0, 69, 31], [32, 3, 5]])
    out = cpu.dense_embedding(ids, packing.pack_dense(table), out_dtype)
    assert torch.equal(out, table[ids].to(out_dtype))
    assert torch.equal(reference.dense_embedding(ids, packing.pack_dense(table), out_dtype), out)


@pytest.mark.parametrize("isa", C_ISAS, indirect=True)
@pytest.mark.parametrize("dtype", ACTIVATIONS, ids=name)
def test_many_long_rows_are_multiplied_as_few_are(isa, threads, dtype):
    packed = packing.pack_dense(torch.randn(40, 4096).to(dtype))
    x = torch.randn(300, 4096).to(dtype)  # more than a cache holds: in chunks
    threads(2)
    assert torch.equal(cpu.dense_linear(x, packed), torch.cat([cpu.dense_linear(part, packed) for part in x.split(7)]))
