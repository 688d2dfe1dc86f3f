"""Norms and activation against the formulae of transformers, in the same order of operations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from octavo_kernels import cpu, reference

INF, NAN = float("inf"), float("nan")
WIDTHS = [1, 7, 16, 576, 1000, 4096]


@pytest.mark.sampled(strength=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_is_the_one_of_transformers(isa, assert_close, width, dtype):
    torch.manual_seed(width)
    x, weight = (torch.randn(5, width) * 3).to(dtype), (torch.randn(width) + 1).to(dtype)
    norm = LlamaRMSNorm(width, eps=1e-5)
    norm.weight.data = weight
    out, expected = cpu.rms_norm(x, weight, 1e-5), norm(x)
    assert out.dtype == dtype
    exact = reference.rms_norm(x.double(), weight.double(), 1e-5)
    assert_close(out, exact, expected, slack=2e-7)


@pytest.mark.parametrize("width", [7, 640])
def test_a_float32_weight_is_applied_before_the_rounding(isa, width):
    """Gemma's norm, bit for bit but for the last place of the root, alone, with a residual and before quantising."""
    torch.manual_seed(width)
    x, residual, weight = (
        torch.randn(5, width).bfloat16() * 3,
        torch.randn(5, width).bfloat16(),
        torch.rand(width) + 0.5,
    )
    norm = Gemma3RMSNorm(width, eps=1e-6)
    norm.weight.data = weight - 1
    out, expected = cpu.rms_norm(x, weight, 1e-6), norm(x)
    assert out.dtype == torch.bfloat16
    assert (out == expected).float().mean() > 0.98
    assert (cpu.rms_norm(x, weight.bfloat16(), 1e-6) == expected).float().mean() < 0.9, "the order makes no difference"
    total = residual + x
    assert torch.equal(cpu.fused_add_rms_norm(x, residual, weight, 1e-6)[0], cpu.rms_norm(total, weight, 1e-6))
    rows, _ = cpu.rms_norm_quantize(x, weight, 1e-6, residual)
    assert torch.equal(rows.pairs, cpu.quantize_rows(cpu.rms_norm(total, weight, 1e-6)).pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cap", [None, 30.0])
@pytest.mark.parametrize("width", [1, 320, 1000])
def test_scale_and_cap(isa, assert_close, width, cap, dtype):
    torch.manual_seed(width)
    x = (torch.randn(3, width) * 40).to(dtype)
    exact = reference.scale(x.double(), 1.3, cap)
    assert_close(cpu.scale(x, 1.3, cap), exact, reference.scale(x, 1.3, cap), slack=2e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", WIDTHS)
def test_fused_add_keeps_the_rounded_sum(isa, width, dtype):
    """The new residual is exactly residual + x, and the norm is exactly the norm of it."""
    torch.manual_seed(width)
    x, residual, weight = (torch.randn(3, width).to(dtype) for _ in range(3))
    weight = weight[0]
    normed, total = cpu.fused_add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, residual + x)
    assert torch.equal(normed, cpu.rms_norm(total, weight, 1e-6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", WIDTHS)
def test_silu_and_mul(isa, assert_close, width, dtype):
    torch.manual_seed(width)
    x = (torch.randn(4, 2 * width) * 8).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    exact = gate * torch.sigmoid(gate) * up
    assert_close(cpu.silu_and_mul(x), exact, reference.silu_and_mul(x), slack=2e-7)


def test_silu_of_extreme_gates(isa):
    """Gates far out give 0 or the gate itself, never NaN."""
    gate = torch.tensor([[-1e30, -200.0, -88.0, -0.0, 0.0, 88.0, 200.0, 1e30]])
    out = cpu.silu_and_mul(torch.cat([gate, torch.ones_like(gate)], dim=-1))
    torch.testing.assert_close(out, torch.nn.functional.silu(gate), atol=1e-35, rtol=2e-7)


@pytest.mark.sampled(strength=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm(isa, assert_close, affine, width, dtype):
    torch.manual_seed(width)
    x, residual = ((torch.randn(5, width) * 3 + 10).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(width).to(dtype) for _ in range(2)) if affine else (None, None)
    out, total = cpu.layer_norm(x, weight, bias, 1e-5, residual)
    assert torch.equal(total, residual + x)
    wide = (None if t is None else t.double() for t in (weight, bias))
    exact = reference.layer_norm(total.double(), *wide, 1e-5)[0]
    # A norm of one or two elements is their difference over itself: as wrong as their sum was rounded.
    assert_close(out, exact, reference.layer_norm(x, weight, bias, 1e-5, residual)[0], slack=1e-5)
    alone, same = cpu.layer_norm(total, weight, bias, 1e-5)
    assert torch.equal(alone, out) and same is total


@pytest.mark.sampled(strength=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("kind", ["relu", "silu", "gelu", "gelu_tanh"])
def test_activations(isa, assert_close, kind, gated, dtype):
    x = torch.cat([torch.linspace(-12, 12, 999), torch.tensor([0.0, -0.0, 1e30, -1e30, -80.0])]).repeat(2, 2)
    if not gated:
        x = x[:, :1004]
    x = x.to(dtype)
    exact, plain = reference.activate(x.double(), kind, gated), reference.activate(x, kind, gated)
    near = (x[:, :1004].abs() < 100).expand_as(exact)  # an element of 1e30 says nothing of the others
    assert_close(cpu.activate(x, kind, gated)[near], exact[near], plain[near], slack=5e-7)
    torch.testing.assert_close(cpu.activate(x, kind, gated), plain, rtol=0.02, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", WIDTHS)
def test_sums(isa, width, dtype):
    x, y = (torch.randn(7, width).to(dtype) for _ in range(2))
    assert torch.equal(cpu.add(x, y), x + y)


@pytest.mark.parametrize("function", ["rms_norm", "fused_add_rms_norm", "silu_and_mul"])
def test_rows_do_not_depend_on_each_other_or_on_threads(isa, threads, function):
    torch.manual_seed(0)
    x, residual, weight = torch.randn(300, 576), torch.randn(300, 576), torch.randn(576)
    arguments = {"rms_norm": (weight, 1e-6), "fused_add_rms_norm": (residual, weight, 1e-6), "silu_and_mul": ()}[
        function
    ]
    results = []
    for count in (1, 2):
        threads(count)
        result = getattr(cpu, function)(x, *arguments)
        results.append(result[0] if isinstance(result, tuple) else result)
    assert torch.equal(*results)
    some = tuple(a[7:9] if isinstance(a, torch.Tensor) and a.ndim == 2 else a for a in arguments)
    alone = getattr(cpu, function)(x[7:9], *some)
    assert torch.equal(alone[0] if isinstance(alone, tuple) else alone, results[0][7:9])


def test_rows_of_a_wider_tensor(isa):
    """Views that are not contiguous are taken as they are."""
    torch.manual_seed(0)
    wide, weight = torch.randn(6, 64), torch.randn(32)
    assert torch.equal(
        cpu.rms_norm(wide[:, 16:48], weight, 1e-6), cpu.rms_norm(wide[:, 16:48].contiguous(), weight, 1e-6)
    )
    assert torch.equal(cpu.silu_and_mul(wide[::2]), cpu.silu_and_mul(wide[::2].contiguous()))


@given(data=st.data(), rows=st.integers(1, 5), width=st.sampled_from([1, 3, 15, 16, 17, 500, 512, 513, 2000]))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_argmax_is_that_of_numpy(isa, data, rows, width):
    """With ties, infinities and NaN anywhere: the first of the largest, or of the NaN."""
    x = torch.randint(
        -3, 4, (rows, width), generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    ).float()
    odd = st.tuples(st.integers(0, rows - 1), st.integers(0, width - 1), st.sampled_from([INF, -INF, NAN, 9.0]))
    for row, column, value in data.draw(st.lists(odd, max_size=6)):
        x[row, column] = value
    if data.draw(st.booleans()):
        x[0] = -INF
    index, best = cpu.argmax(x)
    assert index.tolist() == x.numpy().argmax(-1).tolist()
    assert torch.equal(best.nan_to_num(77.0), x[range(rows), index].nan_to_num(77.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_columns_are_taken_in_their_order(isa, dtype):
    torch.manual_seed(0)
    for rows, width, count in ((1, 7, 7), (5, 96, 96), (40, 576, 100)):
        x, columns = torch.randn(rows, width).to(dtype), torch.randperm(width)[:count].int()
        assert torch.equal(cpu.take_columns(x, columns), reference.take_columns(x, columns))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_with_a_number(isa, dtype):
    x = torch.randn(7, 50).to(dtype)
    for factor, cap in ((0.22, None), (12.0, None), (1.5, 3.0)):
        wide = x.double() * factor
        exact = wide if cap is None else cap * torch.tanh(wide / cap)
        torch.testing.assert_close(
            cpu.scale(x, factor, cap), exact.to(dtype), rtol=1e-2 if x.itemsize == 2 else 1e-6, atol=1e-6
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", WIDTHS)
def test_columns_are_normed_in_place(isa, width, dtype):
    """With the bits of a norm of them alone; the columns around them stay as they are."""
    torch.manual_seed(width)
    whole, weight = torch.randn(5, width + 9).to(dtype), torch.randn(width).to(dtype)
    before = whole.clone()
    cpu.rms_norm_(whole[:, 4 : 4 + width], weight, 1e-6)
    assert torch.equal(whole[:, 4 : 4 + width], cpu.rms_norm(before[:, 4 : 4 + width], weight, 1e-6))
    assert torch.equal(whole[:, :4], before[:, :4]) and torch.equal(whole[:, 4 + width :], before[:, 4 + width :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [5, 16, 40])
def test_columns_are_normed_head_by_head(isa, width, dtype):
    """With the bits of one head at a time; the columns around them stay as they are."""
    torch.manual_seed(width)
    whole, weight = torch.randn(5, 3 * width + 9).to(dtype), torch.randn(width)
    expected = whole.clone()
    for head in range(3):
        cpu.rms_norm_(expected[:, 4 + head * width : 4 + (head + 1) * width], weight, 1e-6)
    plain = whole.clone()
    cpu.rms_norm_(whole[:, 4 : 4 + 3 * width], weight, 1e-6)
    assert torch.equal(whole, expected)
    reference.rms_norm_(plain[:, 4 : 4 + 3 * width], weight, 1e-6)
    torch.testing.assert_close(whole, plain, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 16, 37])
def test_gates_of_another_tensors_columns(isa, width, dtype):
    """With the bits of gates and ups that lie in one tensor (plain torch has several loops, by alignment)."""
    gate, wide = torch.randn(5, width).to(dtype), torch.randn(5, 3 * width).to(dtype)
    up = wide[:, width : 2 * width]
    expected = cpu.activate(torch.cat([gate, up], dim=1), "gelu_tanh", True)
    torch.testing.assert_close(cpu.activate(gate, "gelu_tanh", up=up), expected, rtol=1e-5 * (isa == "torch"), atol=0)
    torch.testing.assert_close(reference.activate(gate, "gelu_tanh", up=up), expected, rtol=0.02, atol=1e-6)
