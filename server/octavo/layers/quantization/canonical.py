"""The forms into which every quantised format is read, and from which it is dequantised or packed for a device.

A form holds one weight ``[N, K]`` (outputs, inputs) of a checkpoint: its codes as they were stored, one an element, and
the numbers that turn them into values. The value of an element is computed in float32, where the product of a code and
a scale is exact for scales of 16 bits; so it equals, rounded to the scales' own type, what the format's library gives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from octavo.errors import ModelError

_ROWS = 1024  # dequantised at a time: bounds the float32 copy


def row_pieces(count: int) -> Iterator[slice]:
    """The rows of a weight, as many at a time as are to be dequantised at once."""
    for start in range(0, count, _ROWS):
        yield slice(start, min(start + _ROWS, count))


class StoredWeight(ABC):
    """One weight ``[N, K]`` as its checkpoint holds it."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """N and K."""

    @abstractmethod
    def take(self, rows: slice | Tensor, columns: slice) -> Self:
        """The part of it at ``rows`` (a range, or their numbers in int64) and ``columns``. Raises ModelError where a
        group of columns would be cut."""

    @abstractmethod
    def values(self, rows: slice) -> Tensor:
        """Rows of the weight, float32 ``[rows, K]``."""

    @abstractmethod
    def multiplied(self, factor: float) -> Self:
        """The weight times ``factor``."""

    def dequantize_into(self, target: Tensor) -> None:
        """Write the weight to ``target [N, K]`` of any floating-point type and device."""
        for rows in row_pieces(self.shape[0]):
            target[rows] = self.values(rows).to(target.dtype).to(target.device)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight ``[N, K]`` in ``dtype``."""
        out = torch.empty(self.shape, dtype=dtype)
        self.dequantize_into(out)
        return out


@dataclass(frozen=True)
class GroupScaled(StoredWeight):
    """``codes`` [N, K], each of which stands for a number, and ``scales`` floating point [N, G], one for each ``group``
    columns of a row: a value is the number times its scale. The last group may be shorter."""

    codes: Tensor
    scales: Tensor
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        """See `StoredWeight`."""
        return self.codes.shape[0], self.codes.shape[1]

    @abstractmethod
    def numbers(self, rows: slice) -> Tensor:
        """Decode ``rows`` to float32 [rows, K], the caller's own."""

    def take(self, rows: slice | Tensor, columns: slice) -> Self:
        """See `StoredWeight`."""
        part = replace(self, codes=self.codes[rows], scales=self.scales[rows])
        if columns == slice(0, self.shape[1]):
            return part
        groups = _group_range(columns, self.shape[1], self.group)
        return replace(part, codes=part.codes[:, columns], scales=part.scales[:, groups])

    def multiplied(self, factor: float) -> Self:
        """See `StoredWeight`."""
        return replace(self, scales=self.scales.float() * factor)

    def values(self, rows: slice) -> Tensor:
        """See `StoredWeight`."""
        return self.numbers(rows).mul_(_spread(self.scales[rows].float(), self.group, self.shape[1]))


@dataclass(frozen=True)
class FloatCodes(GroupScaled):
    """``codes`` are 8-bit floating-point numbers themselves (e4m3)."""

    def numbers(self, rows: slice) -> Tensor:
        """See `GroupScaled`."""
        return self.codes[rows].float()


@dataclass(frozen=True)
class TableCodes(GroupScaled):
    """``codes`` uint8 below 16 are places in ``table`` float32 [16]."""

    table: Tensor

    def numbers(self, rows: slice) -> Tensor:
        """See `GroupScaled`."""
        return self.table[self.codes[rows].int()]


@dataclass(frozen=True)
class GroupCodes(GroupScaled):
    """Integers: a value is ``scale * (code - zero)``.

    ``codes`` uint8 [N, K], below 2^bits; ``zeros`` uint8 [N, G], None: 2^(bits - 1) everywhere; ``order`` int32 [K]:
    column c of ``codes`` is column ``order[c]`` of the weight, so that groups are contiguous in ``codes`` (None: they
    are in the weight itself).
    """

    zeros: Tensor | None
    order: Tensor | None
    bits: int

    @property
    def zero(self) -> int:
        """The zero point where there are no ``zeros``."""
        return 1 << (self.bits - 1)

    def take(self, rows: slice | Tensor, columns: slice) -> Self:
        """See `StoredWeight`."""
        whole = columns == slice(0, self.shape[1])
        if self.order is not None and not whole:
            raise ModelError("a weight with act order (desc_act) cannot be split by columns; use one device")
        part = super().take(rows, columns)
        if self.zeros is None:
            return part
        groups = slice(None) if whole else _group_range(columns, self.shape[1], self.group)
        return replace(part, zeros=self.zeros[rows, groups])

    def numbers(self, rows: slice) -> Tensor:
        """See `GroupScaled`."""
        codes = self.codes[rows].float()
        if self.zeros is None:
            return codes.sub_(self.zero)
        return codes.sub_(_spread(self.zeros[rows].float(), self.group, self.shape[1]))

    def values(self, rows: slice) -> Tensor:
        """See `StoredWeight`."""
        values = super().values(rows)
        if self.order is None:
            return values
        out = torch.empty_like(values)
        out[:, self.order.long()] = values
        return out


def _spread(numbers: Tensor, group: int, columns: int) -> Tensor:
    """Numbers of groups ``[n, G]`` for each column: ``[n, columns]``, or ``[n, 1]`` where all are of one group."""
    return numbers if numbers.shape[1] == 1 else numbers.repeat_interleave(group, dim=1)[:, :columns]


def _group_range(columns: slice, width: int, group: int) -> slice:
    """The groups of ``columns`` of a weight of ``width``. Raises ModelError where one would be cut."""
    if group >= width:
        return slice(0, 1)
    if columns.start % group or (columns.stop % group and columns.stop != width):
        raise ModelError(
            f"{width} columns in groups of {group} cannot be split at {columns.start} and {columns.stop}; "
            f"use a tensor parallel size that divides {width // group}"
        )
    return slice(columns.start // group, -(-columns.stop // group))
