"""Products with weights in groups (`octavo_kernels.group_weight`) in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels.group_weight import FORMS, GroupWeight, unpack_codes

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def group_values(weight: GroupWeight) -> Tensor:
    """The elements float32 [channels, width], columns in the order of the codes."""
    codes = unpack_codes(weight)
    scales = weight.scales
    if scales.dtype == torch.uint8:
        scales = torch.exp2(scales.float() - 127)

    def spread(numbers: Tensor) -> Tensor:
        return numbers.t().float().repeat_interleave(weight.group, dim=1)[:, : weight.width]

    if weight.form == "e2m1":
        values = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=codes.device)[codes.long()]
    elif weight.form == "e4m3":
        values = codes.contiguous().view(torch.float8_e4m3fn).float()
    else:
        zero = 1 << (FORMS[weight.form] - 1)
        values = codes.float() - (zero if weight.zeros is None else spread(weight.zeros))
    return values * spread(scales)


def group_dequantize(weight: GroupWeight, dtype: torch.dtype) -> Tensor:
    """See `octavo_kernels.group_dequantize`."""
    values = group_values(weight).to(dtype)
    if weight.order is None:
        return values
    out = torch.empty_like(values)
    out[:, weight.order] = values
    return out


def group_linear(x: Tensor, weight: GroupWeight, bias: Tensor | None = None) -> Tensor:
    """See `octavo_kernels.group_linear`."""
    return torch.nn.functional.linear(x, group_dequantize(weight, x.dtype), bias)


def group_row_counts(weight: GroupWeight) -> list[int]:
    """See `octavo_kernels.group_row_counts`: there is nothing to compile."""
    return []
