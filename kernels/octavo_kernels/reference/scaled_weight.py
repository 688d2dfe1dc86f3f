"""Products of 8-bit weights and 8-bit activations (`octavo_kernels.scaled_weight`) in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels.scaled_weight import BLOCK, HIGHEST, ScaledWeight


def quantize_tokens(x: Tensor, dtype: torch.dtype, blocks: int = 1) -> tuple[Tensor, Tensor]:
    """See `octavo_kernels.quantize_tokens`."""
    width = x.shape[1]
    wide = x.float()
    if blocks > 1:
        wide = torch.nn.functional.pad(wide, (0, blocks * BLOCK - width)).unflatten(1, (blocks, BLOCK))
    else:
        wide = wide[:, None]
    highest = wide.abs().amax(dim=2)
    highest = torch.where(wide.isnan().any(dim=2), float("inf"), highest)
    inverse = torch.where(highest > 0, HIGHEST[dtype] / highest, 0.0)
    values = wide * inverse[:, :, None]
    if dtype == torch.int8:
        values = values.nan_to_num(0.0).round()
    values = values.clamp(-HIGHEST[dtype], HIGHEST[dtype]).to(dtype)
    return values.flatten(1)[:, :width].contiguous(), highest / HIGHEST[dtype]


def scaled_linear(x: Tensor, weight: ScaledWeight, bias: Tensor | None = None) -> Tensor:
    """See `octavo_kernels.scaled_linear`."""
    values, scales = quantize_tokens(x, weight.values.dtype, weight.blocks)
    width = x.shape[1]
    wide = torch.float64 if weight.values.dtype == torch.int8 else torch.float32

    def spread(numbers: Tensor) -> Tensor:
        if numbers.shape[1] == 1:
            return numbers.to(wide)
        return numbers.to(wide).repeat_interleave(BLOCK, dim=1)[:, :width]

    left, right = values.to(wide) * spread(scales), weight.values.to(wide) * spread(weight.scales.t())
    out = left @ right.t()
    return (out if bias is None else out + bias.to(wide)).to(x.dtype)


def scaled_row_counts(weight: ScaledWeight) -> list[int]:
    """See `octavo_kernels.scaled_row_counts`: there is nothing to compile."""
    return []
