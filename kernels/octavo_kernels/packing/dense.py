"""Packing of weights of 16 or 32 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels import cpu
from octavo_kernels.dense import DENSE_BLOCK, DensePart, DenseWeight, empty_dense


def pack_dense(*parts: Tensor) -> DenseWeight:
    """``parts [N_i, K]``, each float32, bfloat16 or float16, one after the other, in the dtypes that they have."""
    weight = empty_dense([len(part) for part in parts], parts[0].shape[1], [part.dtype for part in parts])
    first = 0
    for part in parts:
        fill_dense(weight, first, part)
        first += len(part)
    return weight


def fill_dense(weight: DenseWeight, first: int, rows: Tensor) -> None:
    """Write ``rows [n, K]`` to the channels from ``first`` on of ``weight``; they have the dtype of the channels' part.

    Several threads may fill different channels at once. Raises ValueError if the rows do not fit into one part.
    """
    at = first
    for part in weight.parts:
        if at < part.channels:
            break
        at -= part.channels
    if at + len(rows) > part.channels or rows.shape[1] != weight.width or rows.dtype != part.data.dtype:
        raise ValueError(
            f"rows: {tuple(rows.shape)} in {rows.dtype} do not belong at channel {first} of a weight of width "
            f"{weight.width} and parts {[(p.channels, p.data.dtype) for p in weight.parts]}"
        )
    if not cpu.fill_dense(part.data, at, rows):
        _fill(part, at, rows)


def _fill(part: DensePart, at: int, rows: Tensor) -> None:
    """Fill without the C kernels."""
    blocks, columns, _ = part.data.shape
    padded = torch.nn.functional.pad(rows, (0, columns - rows.shape[1]))
    channels = torch.arange(at, at + len(rows))
    block, channel = channels // DENSE_BLOCK, channels % DENSE_BLOCK
    if part.data.dtype == torch.bfloat16:
        pairs = part.data.view(blocks, columns // 2, DENSE_BLOCK, 2)
        pairs[block, :, channel] = padded.view(len(rows), -1, 2)
    else:
        part.data[block, :, channel] = padded
