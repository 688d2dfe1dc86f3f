"""Operations on streams of hidden states, and sparse gates, against plain torch and the formulae of transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import Gemma3nTextConfig
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP

from octavo_kernels import cpu, reference

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.sampled(strength=2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 16, 37])
@pytest.mark.parametrize("second, depth", [(0, 0), (2, 0), (0, 3), (1, 3)])
def test_mixed_streams(isa, assert_close, second, depth, width, dtype):
    torch.manual_seed(width)
    x, y = torch.randn(5, 3 * width).to(dtype), torch.randn(5, second * width).to(dtype) if second else None
    constants = torch.randn(4, 3 + second)
    matrix, given = (torch.randn(4, 3 + second, depth), torch.randn(5, depth)) if depth else (None, None)
    out = cpu.mix_streams(x, constants, y, matrix, given)
    wide = [None if t is None else t.double() for t in (constants, y, matrix, given)]
    plain = reference.mix_streams(x, constants, y, matrix, given)
    assert_close(out, reference.mix_streams(x.double(), *wide), plain, slack=1e-6)
    streams = torch.cat([x, x.new_empty(5, 0) if y is None else y], dim=1).view(5, 3 + second, width).double()
    for row, stream in ((0, 0), (4, 3)):
        factors = constants[stream].double()
        if matrix is not None and given is not None:
            factors = factors + matrix[stream].double() @ given[row].double()
        expected = (factors[:, None] * streams[row]).sum(0)
        found = out[row, stream * width : (stream + 1) * width].double()
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-5 if dtype == torch.float32 else 5e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_parts_lie_side_by_side(isa, count, dtype):
    parts = [torch.randn(3, 37).to(dtype) for _ in range(count)]
    expected = torch.cat(parts, dim=1)
    assert torch.equal(cpu.concat(*parts), expected) and torch.equal(reference.concat(*parts), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 16, 37])
def test_magnitudes_are_matched(isa, assert_close, width, dtype):
    """Of each stream, below the floor too; rows of what they are matched with lie apart."""
    torch.manual_seed(width)
    x, wide = (torch.randn(5, 3 * width) * 3).to(dtype), torch.randn(5, 2 * width + 3).to(dtype)
    x[1, :width] *= 1e-4
    x[2] = 0.0
    like, found = wide[:, 3 : 3 + width], x.clone()
    cpu.match_rms_(found, like, 1e-5)
    plain, exact = x.clone(), x.double()
    reference.match_rms_(plain, like, 1e-5)
    reference.match_rms_(exact, like.double(), 1e-5)
    assert_close(found, exact, plain, slack=1e-6)
    assert not found[2].any()
    rms = found[0].double().view(3, width).pow(2).mean(1).sqrt()
    torch.testing.assert_close(rms, like[0].double().pow(2).mean().sqrt().expand(3), rtol=1e-2, atol=0)
    assert found[1, :width].abs().max() < like[1].abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 16, 300])
def test_only_the_largest_gates_stay(isa, assert_close, width, dtype):
    torch.manual_seed(width)
    whole = torch.randn(5, width + 9).to(dtype)
    before, found = whole.clone(), whole[:, 4 : 4 + width]
    plain, exact = found.clone(), found.double()
    cpu.sparsify_(found, 1.2)
    reference.sparsify_(plain, 1.2)
    reference.sparsify_(exact, 1.2)
    assert_close(found, exact, plain, slack=2e-6)
    assert torch.equal(whole[:, :4], before[:, :4]) and torch.equal(whole[:, 4 + width :], before[:, 4 + width :])


def test_gates_are_those_of_transformers():
    config = Gemma3nTextConfig(
        hidden_size=8,
        num_attention_heads=2,
        intermediate_size=64,
        num_hidden_layers=1,
        num_kv_shared_layers=0,
        activation_sparsity_pattern=[0.9],
    )
    x = torch.randn(7, 64)
    expected = Gemma3nTextMLP(config)._gaussian_topk(x.clone())
    cpu.sparsify_(x, 1.2815515655446004)
    torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_times_a_row(isa, dtype):
    """An activation that is none, of some columns, with the same `up` for all rows (plain torch has several loops)."""
    whole, row = torch.randn(5, 60).to(dtype), torch.randn(37).to(dtype)
    x = whole[:, 11:48]
    assert torch.equal(cpu.activate(x, "none", up=row.expand_as(x)), x * row)
    plain = cpu.activate(x.contiguous(), "gelu_tanh")
    torch.testing.assert_close(cpu.activate(x, "gelu_tanh"), plain, rtol=1e-5 * (isa == "torch"), atol=0)
