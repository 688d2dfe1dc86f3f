"""Weights of 16 or 32 bits as the CPU's kernels read them (`octavo_kernels.packing` makes them).

The numbers are the stored ones, in another order: cpu/csrc/dense_linear.c describes it. Every sum of a row and a
channel is added up in one order, so a row's result never depends on other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo_kernels.weight_memory import empty_weight

DENSE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DENSE_BLOCK = 32  # channels that are stored together; their number is padded to a multiple of this


@dataclass(frozen=True)
class DensePart:
    """Channels of one dtype: ``data`` [blocks, width padded to an even number, DENSE_BLOCK] in that dtype."""

    data: Tensor
    channels: int


@dataclass(frozen=True)
class DenseWeight:
    """A weight ``[channels, width]`` in consecutive parts: merged layers may have parts of several dtypes."""

    parts: tuple[DensePart, ...]
    width: int

    @property
    def channels(self) -> int:
        """Channels of all parts."""
        return sum(part.channels for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.data.nbytes for part in self.parts)


def dense_shape(channels: int, width: int) -> tuple[int, int, int]:
    """The shape of `DensePart.data`."""
    return -(-channels // DENSE_BLOCK), width + width % 2, DENSE_BLOCK


def empty_dense(channels: Sequence[int], width: int, dtypes: Sequence[torch.dtype]) -> DenseWeight:
    """A weight to be filled by `octavo_kernels.packing.fill_dense`, on the current default device: one entry of
    ``channels`` and ``dtypes`` for each run of channels; neighbours of one dtype become one part."""
    merged: list[tuple[int, torch.dtype]] = []
    for count, dtype in zip(channels, dtypes, strict=True):
        if merged and merged[-1][1] == dtype:
            merged[-1] = (merged[-1][0] + count, dtype)
        else:
            merged.append((count, dtype))
    parts = [DensePart(empty_weight(dense_shape(count, width), dtype), count) for count, dtype in merged]
    for part in parts:
        part.data[-1:].zero_()  # channels of padding
    return DenseWeight(tuple(parts), width)


def unpack_dense(weight: DenseWeight) -> Tensor:
    """The numbers of ``weight``, float32 ``[channels, width]``."""
    rows = []
    for part in weight.parts:
        blocks, columns, _ = part.data.shape
        if part.data.dtype == torch.bfloat16:
            plain = part.data.view(blocks, columns // 2, DENSE_BLOCK, 2).permute(0, 2, 1, 3)
        else:
            plain = part.data.permute(0, 2, 1)
        rows.append(plain.reshape(blocks * DENSE_BLOCK, columns)[: part.channels, : weight.width].float())
    return torch.cat(rows)
