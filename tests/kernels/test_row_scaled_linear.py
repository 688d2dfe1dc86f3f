"""Linears with one scale a channel and a row: integers are exact, rows independent, outliers spare the others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.emulated_kernels import all_parameters

import octavo_kernels
from octavo_kernels import cpu, packing, quant, reference
from octavo_kernels.quant import BY_ROW
from octavo_kernels.reference.quant import unpack_scaled_rows

FIXTURES = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}
C_ISAS = all_parameters()


def make(channels: int, width: int, seed: int = 0) -> tuple[quant.PackedLinear, torch.Tensor]:
    """A packed weight and the float64 weight it stands for."""
    torch.manual_seed(seed)
    codes = torch.randint(0, 256, (channels, width), dtype=torch.uint8)
    scales = torch.rand(channels) * 0.01
    return packing.pack_row_scaled(codes, scales), (codes.double() - 128) * scales.double()[:, None]


def rows_with_outliers(count: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randn(count, width) * torch.logspace(-2, 2, count)[:, None]
    x[::2, 7 % width] *= 300  # some far above what 8 bits reach from the others
    x[1::3, width - 1] *= 20
    return x.to(dtype)


@pytest.mark.parametrize("channels", [1, 31, 32, 96])
@pytest.mark.parametrize("width", [3, 64, 100, 576])
def test_packing_keeps_codes_and_scales(channels, width):
    packed, weight = make(channels, width)
    assert torch.equal(quant.dequantize(packed), weight.float())
    assert packed.nbytes == quant.part_nbytes(channels, width, packed.parts[0].kind)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [3, 64, 100, 576])
def test_rows_are_within_half_a_step(isa, width, dtype):
    """The step is that of the many small values, at most the 127th part of the largest, and sums are right."""
    x = rows_with_outliers(13, width, dtype)
    x[5] = 0
    rows = cpu.quantize_rows(x, BY_ROW)
    scales, values = unpack_scaled_rows(rows)
    error = (scales[:, None].double() * values[:, :width] - x.double()).abs()
    assert (error <= (0.5 + 1e-4) * scales[:, None]).all() and (values[:, width:] == 0).all()
    largest, mean = x.float().abs().amax(1), x.float().abs().mean(1)
    limit = torch.minimum(largest, 6.0 * mean).maximum(largest / 255) / 127
    torch.testing.assert_close(scales, limit, rtol=1e-5, atol=0)
    assert torch.equal(rows.pairs[:, 4:8].contiguous().view(torch.int32)[:, 0], values.sum(1).int())
    assert rows.terms == BY_ROW
    expected = reference.quantize_rows(x, BY_ROW)  # the order of a sum may change a scale's last bit
    differ = (unpack_scaled_rows(expected)[1] - values).abs()
    assert differ.max() <= 1
    packed, weight = make(40, width)
    products, own = (cpu.quantized_linear(some, packed).float() for some in (expected, rows))
    by_codes = scales[:, None] * (differ[:, :width].float() @ weight.float().abs().T)
    assert ((products - own).abs() <= 1e-2 + 1e-2 * own.abs() + by_codes).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 12, 13, 37])
def test_products_are_those_of_the_integers(isa, count, dtype):
    """Exact sums, one rounding each for the sum, the scale, and their product; then the bias."""
    packed, weight = make(70, 576)
    rows, bias = cpu.quantize_rows(rows_with_outliers(count, 576, dtype), BY_ROW), torch.randn(70)
    scales, values = unpack_scaled_rows(rows)
    assert (values.abs() > 127).any()
    expected = values[:, :576].double() * scales.double()[:, None] @ weight.T
    out = cpu.quantized_linear(rows, packed)
    assert out.dtype == dtype
    rounding = 3e-7 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(out.double(), expected, rtol=rounding, atol=1e-9)
    torch.testing.assert_close(reference.quantized_linear(rows, packed).double(), expected, rtol=rounding, atol=1e-9)
    size = expected.abs().max().item()
    torch.testing.assert_close(
        cpu.quantized_linear(rows, packed, bias).double(), expected + bias, rtol=rounding, atol=1e-6 * size
    )


@pytest.mark.parametrize("isa", C_ISAS, indirect=True)
@given(
    shape=st.tuples(st.integers(1, 130), st.sampled_from([32, 100, 576])),
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    seed=st.integers(0, 99),
)
@settings(max_examples=30, **FIXTURES)
def test_rows_are_bit_equal_whatever_their_number(isa, threads, shape, counts, seed):
    packed, _ = make(*shape, seed)
    x = rows_with_outliers(sum(counts), shape[1])
    threads(1)
    together = cpu.quantized_linear(x, packed)
    threads(2)
    assert torch.equal(cpu.quantized_linear(x, packed), together)
    assert torch.equal(torch.cat([cpu.quantized_linear(part, packed) for part in x.split(counts)]), together)


@pytest.mark.parametrize("isa", C_ISAS, indirect=True)
@pytest.mark.parametrize("count", [65, 97, 130])
def test_long_rows_may_be_taken_in_parts(isa, threads, count):
    """Three tiles of rows and more, over so many columns that a block of weights does not fit the nearest cache."""
    packed, _ = make(70, 1300)
    x = rows_with_outliers(count, 1300)
    threads(1)
    together = cpu.quantized_linear(x, packed)
    assert torch.equal(torch.cat([cpu.quantized_linear(part, packed) for part in x.split(20)]), together)
    gates, rows = make(2 * 64, 1300, seed=1)[0], cpu.quantize_rows(x, BY_ROW)
    expected = cpu.silu_and_mul_quantize(cpu.quantized_linear(rows, gates), BY_ROW)
    out, down = cpu.gated_linear_quantize(rows, gates, BY_ROW), make(40, 64)[0]
    assert torch.equal(cpu.quantized_linear(out, down), cpu.quantized_linear(expected, down))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("code", [0, 255])
def test_the_largest_sums_there_can_be_do_not_overflow(isa, sign, code):
    """65,536 products of the largest numbers, and an outlier on top that is as far above the others as one can be."""
    width = 65_536
    packed = packing.pack_row_scaled(torch.full((32, width), code, dtype=torch.uint8), torch.ones(32))
    x = torch.full((13, width), sign * 3.0)
    x[3, 9] = sign * 700.0
    expected = x.double() @ quant.dequantize(packed).double().T
    torch.testing.assert_close(cpu.quantized_linear(x, packed).double(), expected, rtol=5e-3, atol=0)
    with pytest.raises(ValueError, match="65537 columns"):
        packing.pack_row_scaled(torch.zeros(1, width + 1, dtype=torch.uint8), torch.ones(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_steps_have_the_bits_of_separate_ones(isa, dtype):
    torch.manual_seed(0)
    x, residual, weight = (torch.randn(9, 576).to(dtype) for _ in range(3))
    weight[0, [3, 35]] = 100
    rows, same = cpu.rms_norm_quantize(x, weight[0], 1e-5, terms=BY_ROW)
    assert torch.equal(rows.pairs[:, :8], cpu.quantize_rows(cpu.rms_norm(x, weight[0], 1e-5), BY_ROW).pairs[:, :8])
    assert torch.equal(same, x)
    rows, total = cpu.rms_norm_quantize(x, weight[0], 1e-5, residual, BY_ROW)
    normed, expected_total = cpu.fused_add_rms_norm(x, residual, weight[0], 1e-5)
    packed, _ = make(64, 576)
    assert torch.equal(cpu.quantized_linear(rows, packed), cpu.quantized_linear(normed, packed))
    assert torch.equal(total, expected_total)
    wide = torch.randn(9, 1152).to(dtype)
    fused = cpu.silu_and_mul_quantize(wide, BY_ROW)
    assert torch.equal(cpu.quantized_linear(fused, packed), cpu.quantized_linear(cpu.silu_and_mul(wide), packed))


@pytest.mark.sampled(strength=2)
@pytest.mark.parametrize("inner", [32, 160, 80])  # the last one in separate steps
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_row", [(True, True), (True, False), (False, True)], ids=str)
def test_a_gated_linear_has_the_bits_of_separate_steps(isa, threads, inner, dtype, by_row):
    terms, out_terms = (BY_ROW if one else 1 for one in by_row)
    packed = make(2 * inner, 256)[0] if by_row[0] else packing.pack_w8(torch.randn(2 * inner, 256))
    down = make(40, inner)[0] if by_row[1] else packing.pack_w8(torch.randn(40, inner))
    x = rows_with_outliers(29, 256, dtype)
    x[3], x[4, 7] = 0, float("nan")
    for count in (1, 7, 29):
        rows = cpu.quantize_rows(x[:count], terms)
        expected = cpu.silu_and_mul_quantize(cpu.quantized_linear(rows, packed), out_terms)
        for number in (1, 2):
            threads(number)
            out = cpu.gated_linear_quantize(rows, packed, out_terms)
            assert (out.width, out.dtype, out.terms) == (inner, dtype, out_terms)
            products = cpu.quantized_linear(out, down).nan_to_num(9e9)
            assert torch.equal(products, cpu.quantized_linear(expected, down).nan_to_num(9e9))


def test_values_that_are_not_finite_stay_visible_and_in_their_row(isa):
    packed, _ = make(32, 64)
    x = torch.randn(14, 64)
    clean = cpu.quantized_linear(x, packed)
    x[1, 3], x[13, 40] = float("inf"), float("nan")
    out = cpu.quantized_linear(x, packed)
    assert out[[1, 13]].isnan().all()
    others = [i for i in range(14) if i not in (1, 13)]
    assert torch.equal(out[others], clean[others])
    assert cpu.quantized_linear(torch.empty(0, 64), packed).shape == (0, 32)


@pytest.mark.parametrize("size", [1e-42, 1e-33, 1e-20, 1e20, 1e34])
def test_rows_of_any_size(isa, size):
    packed, weight = make(32, 128)
    x = torch.randn(5, 128) * size
    out = cpu.quantized_linear(x, packed)
    assert out.isfinite().all()
    if 1e-30 < size < 1e30:
        expected = x.double() @ weight.T
        assert (out.double() - expected).abs().max() < 0.02 * expected.abs().max()


def test_rows_and_weights_of_unlike_forms_are_refused():
    packed, _ = make(32, 64)
    with pytest.raises(ValueError, match="do not fit"):
        octavo_kernels.quantized_linear(cpu.quantize_rows(torch.ones(1, 64), 1), packed)
    with pytest.raises(ValueError, match="terms"):
        packing.concat([packed, packing.pack_w8(torch.ones(4, 64))])


def test_merged_layers_are_one_part(isa):
    parts = [make(n, 64, seed)[0] for seed, n in enumerate((64, 32, 40))]
    merged = packing.concat(parts)
    assert [part.channels for part in merged.parts] == [136]
    x = torch.randn(8, 64)
    assert torch.equal(cpu.quantized_linear(x, merged), torch.cat([cpu.quantized_linear(x, p) for p in parts], dim=1))
