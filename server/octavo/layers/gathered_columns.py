"""Columns that a column-parallel layer leaves spread over the ranks, brought together for code that needs them
whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import octavo_kernels
from octavo.layers.parallel import TensorParallel


@dataclass(frozen=True)
class Part:
    """``size`` columns of a rank from column ``start`` on, which ``copies`` neighbouring ranks have alike."""

    start: int
    size: int
    copies: int = 1


class GatheredColumns(nn.Module):
    """Rows ``[T, width]`` of a rank and the same with each of ``parts`` as long as all ranks have it; what the parts
    leave is the rank's own and stays behind them. On one rank the parts, from column 0 on, are whole already."""

    def __init__(self, width: int, parts: Sequence[Part], tp: TensorParallel) -> None:
        super().__init__()
        self.tp, self.width = tp, width
        self.sizes = [part.size * (tp.size // part.copies) for part in parts]
        whole: list[int] = []
        own: list[int] = []
        for part in parts:
            place = tp.rank // part.copies
            own += range(len(whole) + place * part.size, len(whole) + (place + 1) * part.size)
            for rank in range(0, tp.size, part.copies):
                first = rank * width + part.start
                whole += range(first, first + part.size)
        end = parts[-1].start + parts[-1].size
        own += range(len(whole), len(whole) + width - end)
        whole += range(tp.rank * width + end, (tp.rank + 1) * width)
        # A few kilobytes: not among the weights that are counted.
        self.to_whole, self.to_own = (torch.tensor(columns, dtype=torch.int32) for columns in (whole, own))

    def gather(self, x: Tensor) -> Tensor:
        """Gather whole columns from each rank's ``[T, width]``."""
        if self.tp.size == 1:
            return x
        return octavo_kernels.take_columns(self.tp.all_gather(x, self.width * self.tp.size), self.to_whole)

    def own(self, whole: Tensor) -> Tensor:
        """Back to ``[T, width]``."""
        return whole if self.tp.size == 1 else octavo_kernels.take_columns(whole, self.to_own)
