"""Values of bfloat16 that find differences in rounding, and a comparison of float32 bit by bit."""

from __future__ import annotations

import torch
from torch import Tensor


def spread(shape: tuple[int, ...], seed: int, exponents: int = 60) -> Tensor:
    """bfloat16 of very unlike sizes, denormals and zeros among them."""
    g = torch.Generator().manual_seed(seed)
    powers = torch.randint(-exponents, exponents // 3 + 1, shape, generator=g)
    values = torch.ldexp(torch.randn(shape, generator=g), powers)
    denormal = torch.rand(shape, generator=g)
    values = torch.where(denormal < 0.03, values.sign() * 1e-39, values)
    return torch.where(denormal > 0.97, 0.0, values).bfloat16()


def assert_same(out: Tensor, expected: Tensor) -> None:
    """The same bits, any NaN for a NaN."""
    assert torch.equal(out.isnan(), expected.isnan())
    equal = out.view(torch.int32) == expected.view(torch.int32)
    assert (equal | out.isnan()).all(), f"{(~equal).sum()} of {equal.numel()} differ"
