"""Quantised linears: codes are the file's own, sums exact, rows independent, the error where it should be."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.emulated_kernels import all_parameters
from support.packed_weights import SCALES, make

import octavo_kernels
from octavo_kernels import cpu, packing, quant, reference
from octavo_kernels.cpu import compiler, library
from octavo_kernels.cpu.quant import PACKED_TYPES

FIXTURES = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}
C_ISAS = all_parameters()
KINDS = [*PACKED_TYPES, "w8"]  # the other types are packed to the same kinds


def fields(rows: quant.QuantizedRows) -> torch.Tensor:
    """The bits of what `QuantizedRows.meta` holds, but for the room and for sums of second terms that are not there."""
    bits, groups = rows.meta.view(torch.int32)[:, :-15].clone(), quant.num_groups(rows.width)
    if rows.terms == 1:
        for field in (2, 4):  # of sums and of half_sums
            bits[:, field * groups : (field + 1) * groups] = 0
    return bits


@pytest.mark.sampled(strength=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_agrees_with_plain_torch(isa, kind, terms, dtype):
    """The same integers as plain torch has, hence the same results up to the rounding of float32 sums."""
    packed, stored = make(kind, 70, 512, terms)
    x = torch.randn(37, 512) * torch.logspace(-2, 2, 37)[:, None]
    x[:, 7] *= 50
    x[5] = 0
    x, bias = x.to(dtype), torch.randn(70)
    rows, expected = cpu.quantize_rows(x, terms), reference.quantize_rows(x, terms)
    assert torch.equal(rows.pairs, expected.pairs)
    assert torch.equal(fields(rows), fields(expected))
    out, plain = cpu.quantized_linear(x, packed, bias), reference.quantized_linear(x, packed, bias)
    assert out.dtype == dtype
    size = x.double().abs() @ stored.double().abs().T + 1  # of the terms that are added up
    rounding = 0 if dtype == torch.float32 else 2**-8  # of the result
    assert ((out.double() - plain.double()).abs() <= 2e-6 * size + rounding * plain.double().abs()).all()
    # The whole error, against float64 on the stored weight: half a step of the group's largest in each value.
    error = (cpu.quantized_linear(x.float(), packed, bias).double() - (x.double() @ stored.double().T + bias)).abs()
    # Products of fewer bits pass through 16 bits: a second term leaves a seventh of the error, not nothing.
    limit = 0.02 if terms == 1 else 2e-4 if packed.parts[0].kind.bits == 8 else 4e-3
    assert (error / size).max() < (1.5 * limit if kind in SCALES else limit)  # random scales spread more


@pytest.mark.parametrize("channels", [1, 70, 320])
@pytest.mark.parametrize("kind", ["w8", "Q4_1"])
def test_the_best_of_a_head_have_both_terms(isa, kind, channels):
    """Within the margin of a row's best (and beside such a one in its block) products are those of two terms to the
    bit, the others those of the first term.
    """
    full, _ = make(kind, channels, 512, terms=2)
    x, bias = torch.randn(9, 512), torch.randn(channels)
    x[0], x[1, 3] = 0, float("nan")
    exact = cpu.quantized_linear(x, full, bias)
    margin = 0.3 * (exact[2:].amax() - exact[2:].amin()).item()
    head = replace(full, margin=margin)
    out, plain = cpu.quantized_linear(x, head, bias), reference.quantized_linear(x, head, bias)
    torch.testing.assert_close(out, plain, rtol=1e-5, atol=1e-4, equal_nan=True)
    best = out.amax(dim=1, keepdim=True)
    near = (out > best - 0.9 * margin) & out.isfinite()
    assert near[2:].any(dim=1).all() and torch.equal(out[near], exact[near])
    assert channels < 100 or not torch.equal(out[2:], exact[2:])
    narrow = x[2:].bfloat16()
    wide = cpu.quantized_linear(narrow, head)  # logits are float32 whatever the rows are
    assert wide.dtype == torch.float32 and torch.equal(wide, cpu.quantized_linear(narrow.float(), head))
    with pytest.raises(ValueError, match="margin"):
        replace(head, activation_terms=1)


@pytest.mark.parametrize("isa", C_ISAS, indirect=True)
@given(
    kind=st.sampled_from(KINDS),
    shape=st.tuples(st.integers(1, 130), st.sampled_from([256, 512, 768])),
    terms=st.integers(1, 2),
    margin=st.sampled_from([0.0, 2.0]),
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    seed=st.integers(0, 99),
)
@settings(max_examples=30, **FIXTURES)
def test_rows_are_bit_equal_whatever_their_number(isa, threads, kind, shape, terms, margin, counts, seed):
    packed, _ = make(kind, *shape, terms, seed)
    packed = replace(packed, margin=margin if terms == 2 else 0.0)
    x = torch.randn(sum(counts), shape[1])
    threads(1)
    together = cpu.quantized_linear(x, packed)
    threads(2)
    assert torch.equal(cpu.quantized_linear(x, packed), together)
    assert torch.equal(torch.cat([cpu.quantized_linear(part, packed) for part in x.split(counts)]), together)


def codes_of(kind: quant.Kind, *shape: int) -> torch.Tensor:
    return torch.randint(1 if kind.bits == 8 else 0, 1 << kind.bits, shape, dtype=torch.uint8)


# Even, as large as they may be, and not monotone
TABLE = [2 * v for v in (0, 1, 2, 3, 4, 6, 8, 60, -60, -1, -2, -3, -4, -6, -8, 5)]


def pack(kind: quant.Kind, codes: torch.Tensor, scale: float, minimum: float = 0.0, table=TABLE) -> quant.PackedLinear:
    scales = torch.full(codes.shape[:2] + (2,) * kind.halves, scale)
    minima = torch.full_like(scales, minimum) if kind.affine else None
    return packing.pack_codes(codes, scales, minima, bits=kind.bits, table=table if kind.table else None)


@pytest.mark.parametrize("kind", packing.KINDS, ids=str)
def test_every_instruction_set_gives_the_same_integers(isa, kind):
    """With powers of two as scales and codes of which the bits that get lost are zeros nothing is rounded: results have
    the same bits on every machine.
    """
    torch.manual_seed(1)
    codes = codes_of(kind, 33, 4, 32)
    if not kind.table:
        codes &= 0x100 - (2 << kind.shift)
    packed = pack(kind, codes, 0.5, -3.75, [32 * v for v in (0, 1, 2, 3, -1, -2, -3, 0, 3, 2, 1, 0, -3, -2, -1, 3)])
    x = torch.randint(-127, 128, (9, 128)).float()
    x[:, ::32] = 127  # every group's scale is 1
    assert torch.equal(cpu.quantized_linear(x, packed), x @ quant.dequantize(packed).T)


@pytest.mark.parametrize("kind", [kind for kind in packing.KINDS if kind.affine and kind.bits <= 4], ids=str)
def test_the_largest_sums_there_can_be_do_not_overflow(isa, kind):
    """Every product at its largest, all of one sign, over more groups than an int32 could add up."""
    # With code 0 and -11.98 both the scale and the least, -11.98 + 8 * 0.9995, are next to the largest of one sign.
    last = (1 << kind.bits) - 1
    for code, minimum, sign in ((0, -11.98, 1), (0, -11.98, -1), (0, 0.0, 1), (last, 7.99, 1), (last, 7.99, -1)):
        packed = pack(kind, torch.full((32, 48, 32), code, dtype=torch.uint8), 0.9995 * kind.step, minimum)
        x = torch.full((7, 1536), sign * 3.0)
        expected = x @ quant.dequantize(packed).T
        torch.testing.assert_close(cpu.quantized_linear(x, packed), expected, rtol=1e-3, atol=1.0)


@pytest.mark.parametrize("kind", packing.KINDS, ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_of_every_kind_do_not_overflow(isa, kind, sign):
    table = [-127] + [127] * 15
    for code in (0, (1 << kind.bits) - 1):
        codes = torch.full((32, 48, 32), max(code, kind.bits == 8), dtype=torch.uint8)
        packed = pack(kind, codes, 0.9995, 0.0, table)
        x = torch.full((7, 1536), sign * 3.0)
        expected = x @ quant.dequantize(packed).T
        torch.testing.assert_close(cpu.quantized_linear(x, packed), expected, rtol=1e-3, atol=1.0)


@pytest.mark.parametrize("halves", [False, True])
def test_tables_of_few_bits_keep_small_sums_of_powers_of_two(isa, halves):
    """As of MXFP4, where rounding each group's sum would meet nothing but ties: what is left are the activations' own
    errors, and they favour no direction.
    """
    torch.manual_seed(3)
    codes = torch.randint(0, 16, (64, 48, 32), dtype=torch.uint8)
    size = (64, 48, 2) if halves else (64, 48)
    scales = 2.0 ** torch.randint(-12, -8, size) * (torch.rand(size) + 0.5 if halves else 1)
    e2m1 = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]
    packed = packing.pack_codes(codes, scales, bits=4, table=e2m1)
    x = torch.randn(200, 1536) * torch.rand(200, 1536) ** 3  # few values of a group are large
    rows = cpu.quantize_rows(x)
    exact = (reference.quant.unpack_rows(rows)[0][:, 0] * rows.meta[:, :48, None]).flatten(1).double()
    expected = exact @ quant.dequantize(packed).double().T
    error = (cpu.quantized_linear(rows, packed).double() - expected) / expected.square().mean().sqrt()
    assert error.mean().abs() < (3e-4 if halves else 1e-6)
    assert error.abs().max() < (2e-2 if halves else 1e-5)


@pytest.mark.parametrize("kind", packing.KINDS, ids=str)
@pytest.mark.parametrize("terms", [1, 2])
def test_every_kind_has_the_products_of_its_weight(isa, kind, terms):
    """Codes with scales of many sizes, as `pack_codes` takes them: dequantised right, and multiplied as dequantised."""
    torch.manual_seed(2)
    codes, size = codes_of(kind, 50, 5, 32), (50, 5, 2) if kind.halves else (50, 5)
    scales = torch.rand(size) + 0.1
    minima = torch.randn(size) if kind.affine else None
    table = TABLE if kind.table else None
    packed = packing.pack_codes(codes, scales, minima, bits=kind.bits, table=table, activation_terms=terms)
    values = torch.tensor(TABLE)[codes.long()] if kind.table else codes.float() - (0 if kind.affine else kind.zero)
    expected = values.unflatten(2, (2, 16) if kind.halves else (1, 32)) * scales.view(50, 5, -1, 1)
    weight = (expected + (0 if minima is None else minima.view(50, 5, -1, 1))).flatten(1)
    torch.testing.assert_close(quant.dequantize(packed), weight, rtol=1e-3, atol=1e-2)
    x = torch.randn(12, 160)
    out = cpu.quantized_linear(x, packed)
    largest = out.abs().max().item()
    torch.testing.assert_close(out, reference.quantized_linear(x, packed), rtol=1e-5, atol=1e-4 * largest)
    rows = octavo_kernels.quantized_embedding(torch.arange(50), packed, torch.float32)
    torch.testing.assert_close(rows, quant.dequantize(packed), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.skipif("avx512" not in C_ISAS, reason="needs the instructions in one of their forms")
def test_avx2_with_vnni(monkeypatch):
    """The code for CPUs that have VNNI without AVX-512, with the same instructions as AVX-512 encodes them.

    Compiling it takes 20 seconds, so it is kept with the other libraries while the sources are the same.
    """
    flags = "-march=x86-64-v3 -mavx512vnni -mavx512vl -DVECTORS_OF_256_BITS -O1"  # the bits of -O3, in half the time
    monkeypatch.setitem(compiler._TARGETS["x86_64"], "avxvnni", (flags, frozenset()))
    before = library.get_library()
    built = compiler.build("avxvnni", compiler.LIBRARIES / "encoded-as-avx512")
    for old in set(built.parent.glob("*.so")) - {built}:
        old.unlink(missing_ok=True)
    library.use_library(library.Library(built, "avxvnni"))
    try:
        for kind in packing.KINDS:
            for terms in (1, 2):
                test_every_kind_has_the_products_of_its_weight(None, kind, terms)
            test_the_largest_sums_of_every_kind_do_not_overflow(None, kind, -1)
    finally:
        library.use_library(before)


def test_codes_without_a_kernel_are_refused():
    codes, scales = torch.zeros(1, 1, 32, dtype=torch.uint8), torch.ones(1, 1)
    with pytest.raises(ValueError, match="no kernel takes"):
        packing.pack_codes(codes, scales, scales, bits=8)
    with pytest.raises(ValueError, match="no kernel takes"):
        packing.pack_codes(codes, scales[..., None].expand(-1, -1, 2), scales, bits=2)
    with pytest.raises(ValueError, match="table: must be 16 integers"):
        packing.pack_codes(codes, scales, bits=4, table=[128] * 16)


@pytest.mark.parametrize("kind", ["Q4_1", "w8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("terms", [1, 2])
def test_fused_steps_have_the_bits_of_separate_ones(isa, kind, dtype, terms):
    torch.manual_seed(0)
    x, residual, weight = (torch.randn(9, 576).to(dtype) for _ in range(3))
    packed, _ = make(kind, 64, 576, terms)

    def check(rows, plain, second_term_where_large=True):
        expected = reference.quantize_rows(plain, terms, second_term_where_large=second_term_where_large)
        assert torch.equal(rows.pairs, expected.pairs)
        assert torch.equal(fields(rows), fields(expected))
        products = cpu.quantized_linear(rows, packed)
        assert torch.equal(products, cpu.quantized_linear(expected, packed))
        rows.meta.view(torch.int32)[:, 90:108] = 1  # second terms that are not there are zeros
        assert torch.equal(products, cpu.quantized_linear(rows, packed))

    x[:4, 3] *= 30  # so that one group is above the others, in some rows one that is the second of its pair
    x[4:, 35] *= 100
    weight[0, [3, 35]] = 1
    rows, same = cpu.rms_norm_quantize(x, weight[0], 1e-5, terms=terms)
    check(rows, cpu.rms_norm(x, weight[0], 1e-5))
    assert torch.equal(same, x)
    rows, total = cpu.rms_norm_quantize(x, weight[0], 1e-5, residual, terms)
    normed, expected_total = cpu.fused_add_rms_norm(x, residual, weight[0], 1e-5)
    check(rows, normed)
    assert torch.equal(total, expected_total)
    wide, plain = torch.randn(9, 2 * x.shape[1]).to(dtype), torch.empty_like(x)
    cpu.rms_norm_quantize(x, weight[0], 1e-5, residual, terms, plain)
    assert torch.equal(plain, normed)
    check(cpu.silu_and_mul_quantize(wide, terms, plain), cpu.silu_and_mul(wide), second_term_where_large=False)
    assert torch.equal(plain, cpu.silu_and_mul(wide))


@pytest.mark.sampled(strength=2)
@pytest.mark.parametrize("inner", [32, 160, 80])  # the last one in separate steps
@pytest.mark.parametrize("kind", ["w8", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("terms, out_terms", [(1, 1), (2, 1), (1, 2)])
def test_a_gated_linear_has_the_bits_of_separate_steps(isa, threads, inner, kind, dtype, terms, out_terms):
    packed, _ = make(kind, 2 * inner, 256, terms)
    x = torch.randn(29, 256).to(dtype)
    x[3], x[4, 7] = 0, float("nan")
    for count in (1, 7, 29):
        rows = cpu.quantize_rows(x[:count], terms)
        expected = cpu.silu_and_mul_quantize(cpu.quantized_linear(rows, packed), out_terms)
        for number in (1, 2):
            threads(number)
            out = cpu.gated_linear_quantize(rows, packed, out_terms)
            assert (out.width, out.dtype) == (inner, dtype)
            assert torch.equal(out.pairs, expected.pairs)
            assert torch.equal(fields(out), fields(expected))


@pytest.mark.parametrize("isa", C_ISAS, indirect=True)
def test_the_operation_behind_a_gated_linear_waits_for_its_rows(isa, threads):
    """In one program, whose operations meet at nothing but their own ends."""
    gate_up, down = make("Q4_1", 2 * 480, 64)[0], make("Q4_1", 32, 480)[0]
    rows = cpu.quantize_rows(torch.randn(40, 64))
    expected = cpu.quantized_linear(cpu.gated_linear_quantize(rows, gate_up), down)
    program = cpu.record(lambda: cpu.quantized_linear(cpu.gated_linear_quantize(rows, gate_up), down))
    threads(2)
    for _ in range(50):
        program.outputs.zero_()
        program.replay()
        assert torch.equal(program.outputs, expected)


def test_merged_layers_may_mix_kinds(isa):
    """q, k and v of one product may be stored differently, as Q4_K_M files do."""
    parts = [
        make(kind, n, 512, seed=i)[0]
        for i, (kind, n) in enumerate([("Q4_1", 64), ("Q4_1", 33), ("Q8_0", 40), ("Q4_0", 7)])
    ]
    merged = packing.concat(parts)
    assert [p.channels for p in merged.parts] == [97, 40, 7]
    x, bias = torch.randn(8, 512), torch.randn(144)
    expected = torch.cat([cpu.quantized_linear(x, p) for p in parts], dim=1) + bias
    torch.testing.assert_close(cpu.quantized_linear(x, merged, bias), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_embedding_rows_are_the_stored_ones(isa, kind):
    packed, _ = make(kind, 70, 256)
    ids = torch.tensor([[0, 69, 31], [32, 32, 5]])
    out = octavo_kernels.quantized_embedding(ids, packed, torch.float32)
    torch.testing.assert_close(out, quant.dequantize(packed)[ids], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("width", [32, 96, 160])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "w8"])
def test_an_odd_number_of_groups(isa, kind, width):
    packed, _ = make(kind, 40, width)
    x = torch.randn(9, width)
    torch.testing.assert_close(
        cpu.quantized_linear(x, packed), reference.quantized_linear(x, packed), rtol=1e-5, atol=1e-4
    )


@pytest.mark.parametrize("size", [1e-33, 1e-29, 1e-20, 1e20, 1e34])
def test_rows_of_any_size(isa, size):
    """Results neither overflow before they have to, nor are they anything but zeros where rows are too small."""
    packed, _ = make("Q4_1", 32, 128)
    x = torch.randn(5, 128) * size
    assert torch.equal(cpu.quantize_rows(x).pairs, reference.quantize_rows(x).pairs)
    out = cpu.quantized_linear(x, packed)
    assert out.isfinite().all()
    torch.testing.assert_close(out, reference.quantized_linear(x, packed), rtol=1e-5, atol=1e-5 * size)
    assert size < 1e-27 or out.abs().max() > size


@pytest.mark.parametrize("bits", [4, 8])
def test_a_scale_that_is_not_finite_spoils_its_channel_alone(isa, bits):
    codes = torch.randint(1, 1 << bits, (40, 4, 32), dtype=torch.uint8)
    scales = torch.full((40, 4), 0.5).half()
    x = torch.randn(9, 128)
    clean = cpu.quantized_linear(x, packing.pack_codes(codes, scales, bits=bits))
    scales[3, 1], scales[20, 0] = float("nan"), float("inf")
    out = cpu.quantized_linear(x, packing.pack_codes(codes, scales, bits=bits))
    others = [i for i in range(40) if i not in (3, 20)]
    assert not out[:, [3, 20]].isfinite().any() and torch.equal(out[:, others], clean[:, others])


@pytest.mark.parametrize("kind", ["w8", "Q4_1"])
@pytest.mark.parametrize("channels", [7, 70, 320])
def test_the_best_of_a_head_without_its_logits(isa, kind, channels):
    """The best is that of the logits, which need not be written; ties go to the lowest index, NaN before all."""
    full, _ = make(kind, channels, 96, terms=2)
    head = replace(full, margin=1.0)
    x = torch.randn(11, 96)
    x[2], x[3, 5], x[4] = 0, float("nan"), x[1]
    wants = torch.ones(1, dtype=torch.int64)
    found = cpu.quantized_head(x, head, wants)
    if found is None:  # plain torch
        return
    logits, index, best, maxima = found
    assert torch.equal(logits.nan_to_num(9e9), cpu.quantized_linear(x, head).nan_to_num(9e9))
    numbers = [i for i in range(11) if i != 3]
    for block, largest in enumerate(maxima[numbers].unbind(1)):
        assert torch.equal(largest, logits[numbers, block * 32 : (block + 1) * 32].amax(1))
    expected = cpu.argmax(logits)
    assert torch.equal(index, expected[0]) and torch.equal(best.nan_to_num(9e9), expected[1].nan_to_num(9e9))
    assert index[2] == 0 and best[3].isnan() and index[4] == index[1]
    wants[0] = 0
    again = cpu.quantized_head(x, head, wants)
    assert again is not None
    assert torch.equal(again[1], index) and torch.equal(again[2].nan_to_num(9e9), best.nan_to_num(9e9))


def test_values_that_are_not_finite_stay_visible_and_in_their_row(isa):
    """An infinity or NaN in a row makes that row NaN and leaves the others alone."""
    packed, _ = make("w8", 32, 64)
    x = torch.randn(5, 64)
    clean = cpu.quantized_linear(x, packed)
    x[1, 3], x[3, 40] = float("inf"), float("nan")
    out = cpu.quantized_linear(x, packed)
    assert out[[1, 3]].isnan().all()
    assert torch.equal(out[[0, 2, 4]], clean[[0, 2, 4]])


def test_tiny_and_empty_rows(isa):
    packed, _ = make("Q4_1", 32, 64)
    out = cpu.quantized_linear(torch.full((2, 64), 1e-42), packed)
    assert torch.isfinite(out).all() and out.abs().max() < 1e-30
    assert cpu.quantized_linear(torch.empty(0, 64), packed).shape == (0, 32)
