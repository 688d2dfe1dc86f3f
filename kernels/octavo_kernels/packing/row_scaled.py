"""Packing of 8-bit codes with one scale for each channel (a row of the weight)."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels.quant import BLOCK, BY_ROW, GROUP, Kind, PackedLinear, PackedPart, num_groups

KIND = Kind(8, by_row=True)
_MOST_COLUMNS = 1 << 16  # more products of 8 bits do not fit an int32


def fits_row_scales(width: int) -> bool:
    """True if the kernels add up so many columns."""
    return width <= _MOST_COLUMNS


def pack_row_scaled(codes: Tensor, scales: Tensor) -> PackedLinear:
    """Pack ``codes`` uint8 [N, K] with ``scales`` [N], kept in float32: the weight ``scale * (code - 128)``.

    It takes rows with one scale (`octavo_kernels.quant.BY_ROW`). Raises ValueError for more than 65,536 columns.
    """
    channels, width = codes.shape
    if not fits_row_scales(width):
        raise ValueError(f"codes: {width} columns are more than the {_MOST_COLUMNS} that one scale can have")
    fill = (0, num_groups(width) * GROUP - width, 0, -channels % BLOCK)
    padded = torch.nn.functional.pad(codes, fill, value=KIND.zero) if any(fill) else codes
    steps = padded.unflatten(0, (-1, BLOCK)).contiguous().view(torch.int32).transpose(1, 2)  # [block, step, channel]
    numbers = torch.nn.functional.pad(scales.float(), (0, -channels % BLOCK)).view(-1, BLOCK)
    stream = [numbers.view(torch.int32), steps.flatten(1)]
    data = torch.cat(stream, dim=1).flatten().view(torch.uint8)
    return PackedLinear((PackedPart(data, channels, KIND),), channels, width, BY_ROW)
