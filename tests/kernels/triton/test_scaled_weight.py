"""8-bit weights with 8-bit activations: quantising rows, and the products, against plain torch."""

from __future__ import annotations

import pytest
import torch

from octavo_kernels import ScaledWeight, reference
from octavo_kernels import triton as backend
from octavo_kernels.scaled_weight import HIGHEST
from octavo_kernels.triton import scaled_weight

TYPES = [torch.int8, torch.float8_e4m3fn]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight_of(n: int, k: int, dtype: torch.dtype, blocks: int, device: str) -> ScaledWeight:
    values, scales = reference.quantize_tokens(randn(n, k, seed=1), dtype, blocks)
    return ScaledWeight(values.to(device), scales.t().contiguous().to(device))


@pytest.mark.parametrize("kept", TYPES, ids=str)
@pytest.mark.parametrize("width, blocks", [(70, 1), (8200, 1), (300, 3)])
def test_rows_are_quantised(device, kept, width, blocks):
    """To the nearest number, the largest of a row or block to the largest there is; rows of zeros stay zeros."""
    x = randn(3, width).half()
    x[1] = 0
    x[2, -1] = 1000
    values, scales = (t.cpu() for t in backend.quantize_tokens(x.to(device), kept, blocks))
    assert values.shape == x.shape
    assert scales.shape == (3, blocks)
    size = -(-width // blocks) if blocks == 1 else 128
    spread = scales.repeat_interleave(size, dim=1)[:, :width]
    assert not values[1].float().any()
    assert values[2, -1].float() == HIGHEST[kept]
    error = (values.float() * spread - x.float()).abs()
    half_step = spread / 2 if kept == torch.int8 else (x.float().abs() / 16).maximum(spread / 1024)
    assert (error <= half_step * 1.001).all()
    theirs = reference.quantize_tokens(x, kept, blocks)
    torch.testing.assert_close(scales, theirs[1], rtol=1e-6, atol=0)
    assert (values.view(torch.uint8) != theirs[0].view(torch.uint8)).float().mean() < 0.01, "beyond ties"


@pytest.mark.parametrize("kept", TYPES, ids=str)
def test_nan_is_not_hidden(device, kept):
    x, weight = randn(3, 128).half().to(device), weight_of(64, 128, kept, 1, device)
    x[1, 5] = float("nan")
    out = backend.scaled_linear(x, weight)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


@pytest.mark.sampled(strength=2, share=2)
@pytest.mark.parametrize("kept, blocks", [(torch.int8, 1), (torch.float8_e4m3fn, 1), (torch.float8_e4m3fn, 3)], ids=str)
@pytest.mark.parametrize("rows, n", [(3, 64), (20, 70), (70, 130)])
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
def test_products(device, kept, blocks, rows, n, half):
    k = 300
    weight, x, bias = weight_of(n, k, kept, blocks, device), randn(rows, k).to(device, half), randn(n).to(device, half)
    values, scales = reference.quantize_tokens(x, kept, blocks)
    scales = scales.t().contiguous().t()  # as `backend.quantize_tokens` leaves them
    ours = scaled_weight.launch(values, scales, weight, bias, half)
    exact = reference.scaled_linear(x.double(), weight, bias.double())
    rounding = torch.finfo(half).eps / 2
    assert ours.dtype == half
    assert (((ours.double() - exact).abs() - rounding * exact.abs()).max() / exact.abs().max()) <= 1e-5
    again = scaled_weight.launch(values[1:2], scales[1:2], weight, bias, half)
    assert torch.equal(again, ours[1:2]) or rows > 16, "a row's result depends on its company"
    near = backend.scaled_linear(x, weight, bias)
    torch.testing.assert_close(near, ours, atol=2e-2 * exact.abs().max().item(), rtol=0)


def test_parts_of_k_are_added(device, monkeypatch):
    """As many parts as there may be, in any order; the counters are left as they were found."""
    monkeypatch.setattr(scaled_weight, "splits_of", lambda tiles, blocks, programs: 3)
    for kept in TYPES:
        weight, x = weight_of(70, 600, kept, 1, device), randn(5, 600).half().to(device)
        first, second = (backend.scaled_linear(x, weight) for _ in range(2))
        assert torch.equal(first, second)
        exact = reference.scaled_linear(x.double(), weight)
        torch.testing.assert_close(first.double(), exact, atol=2e-3 * exact.abs().max().item(), rtol=0)


@pytest.mark.parametrize("n, k", [(6144, 4096), (4096, 14336), (1000, 1088)])
def test_every_launch_is_known_before_serving(n, k, any_gpu):
    """`scaled_row_counts` names each pair of tile and parts that a number of rows leads to."""
    weight = ScaledWeight(torch.empty(n, k, dtype=torch.int8, device="meta"), torch.empty(1, n, device="meta"))

    def launch(rows):
        config = scaled_weight.tile_config(scaled_weight.configs_for(any_gpu), rows, n)
        return config, scaled_weight._splits(config, rows, n, k, any_gpu)

    counts = scaled_weight.scaled_row_counts(weight)
    assert {launch(rows) for rows in counts} >= {launch(rows) for rows in (*range(1, 600), *range(600, 40000, 500))}
    assert len(counts) <= 12
