"""Group-quantised weights and activations: how they lie in memory (`octavo_kernels.packing` makes them from files).

A weight is stored in groups of 32 columns, each with its scale, as a file's codes of 2, 4, 5, 6 or 8 bits (`Kind`).
Activations become int8 with one scale for each group of 32 values of a row. Sums within a group are exact
integers and groups are added in order, so a row's result never depends on other rows. cpu/csrc/quant.h describes the
layout of the packed bytes and what happens to a file's scales.

Activations of one int8 ``term`` lose about as much accuracy as 8-bit weights do. With two terms they have 15 bits (a
second int8 holds the remainder of the first) for twice the arithmetic; products with weights of fewer than 8 bits keep
about 11 bits. Only the largest logits of a head need two terms: with a ``margin`` the others are computed with one.

8-bit weights may have one scale for each channel instead. Rows of activations then have one, too (`BY_ROW`), and sums
over a whole row are exact. The scale is that of the many small values: larger ones are sums of two integers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32  # columns with one scale
STRIP = 16  # channels that are stored together
BLOCK = 32  # the number of channels is padded to a multiple of this
TABLE_ZERO = 128  # is added to the integers of a table
BY_ROW = -1  # in place of a number of terms: rows with one scale
SECOND_UNIT = 255  # of the second integers of such rows
SCALE_BITS, OFFSET_BITS, RELATIVE_BITS = (
    15,
    9,
    11,
)  # of integers beside their channel's unit or their row's largest scale


@dataclass(frozen=True)
class Kind:
    """The meaning of codes: ``scale * (code - zero)``, ``... + offset`` if affine, or ``scale * table[code]``."""

    bits: int  # 2, 4, 5, 6 or 8
    affine: bool = False  # with offsets, as many as scales
    halves: bool = False  # with two scales a group, one for each half of its columns
    table: bool = False  # 4-bit codes are indices of 16 integers of 8 bits
    by_row: bool = False  # 8-bit codes with one scale, float32, for a channel

    def __str__(self) -> str:
        flags = ("affine", self.affine), ("halves", self.halves), ("table", self.table), ("by_row", self.by_row)
        return "_".join([f"{self.bits}bit", *(name for name, there in flags if there)])

    @property
    def zero(self) -> int:
        """The code of 0, of codes without a table."""
        return 1 << (self.bits - 1)

    @property
    def step(self) -> int:
        """The factor of codes as they are unpacked, with scales that are as much smaller: sums of 2-bit codes then fill
        16 bits as those of 4-bit codes do."""
        return 4 if self.bits == 2 else 1

    @property
    def has_float_scales(self) -> bool:
        """True if scales are float16, and sums of a group become float32; else both are integers of 16 bits."""
        return self.bits == 8 or (self.table and not self.halves)

    @property
    def shift(self) -> int:
        """Sums of a group (or of half of it) lose so many bits, rounded, to fit 16; 0 where they become float32."""
        if self.has_float_scales:
            return 0
        largest = (TABLE_ZERO if self.table else self.zero * self.step) * GROUP >> self.halves
        return max(0, largest.bit_length() - 9)

    @property
    def flags(self) -> int:
        """The flags as the C kernels take them (cpu/csrc/quant.h)."""
        return self.affine | self.halves << 1 | self.table << 2 | self.by_row << 3

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of a pair of groups in a strip."""
        return STRIP * 2 * GROUP * self.bits // 8

    @property
    def pair_bytes(self) -> int:
        """Bytes of a pair of groups in a strip."""
        return self.code_bytes + STRIP * 2 * 2 * (1 + self.affine) * (1 + self.halves)

    @property
    def head_bytes(self) -> int:
        """Bytes before the pairs of a strip: units and table."""
        return 0 if self.bits == 8 else STRIP * 4 * (1 + self.table)


@dataclass(frozen=True)
class PackedPart:
    """Channels of one kind. The kernels read ``data``, uint8."""

    data: Tensor
    channels: int
    kind: Kind

    @property
    def stored_as(self) -> str:
        """The storage of the numbers, for the memory ledger: "int4", "table4"."""
        return f"{'table' if self.kind.table else 'int'}{self.kind.bits}"


@dataclass(frozen=True)
class PackedLinear:
    """A quantised weight ``[channels, width]`` in consecutive parts: merged layers may have parts of several kinds.

    It takes rows of ``activation_terms`` terms, or `BY_ROW`, if its parts have one scale a channel. A ``margin`` above
    0 is for one part and two terms, as in a head: products are float32 whatever the rows' dtype, and for each row the
    second term is applied only to BLOCKs of channels with a product (of the first term) within ``margin`` of the row's
    largest.
    """

    parts: tuple[PackedPart, ...]
    channels: int
    width: int
    activation_terms: int = 1
    margin: float = 0.0

    def __post_init__(self) -> None:
        if any(part.kind.by_row != (self.activation_terms == BY_ROW) for part in self.parts):
            raise ValueError(f"activation_terms: {self.activation_terms} do not fit a scale for each row, or group")
        if self.margin and (self.activation_terms != 2 or len(self.parts) != 1):
            raise ValueError(
                f"margin: is for one part and two terms, not {len(self.parts)} and {self.activation_terms}"
            )

    @property
    def groups(self) -> int:
        """The groups of a row, padding included."""
        return num_groups(self.width)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.data.numel() for part in self.parts)


@dataclass(frozen=True)
class QuantizedRows:
    """Activations ``[T, width]`` in the layout of cpu/csrc/quant.h (row_pair, row_meta); G groups, an even number.

    ``pairs`` uint8 [T, terms, G / 2, 80] holds the integers of two groups and values derived from their sums. ``meta``
    float32 [T, 6 G + 16] holds the scales of groups, the sums of both terms, those of the first half of each group,
    whether there is a second term (all these as the bits of int32), the largest scale, and padding.
    Rows with one scale are ``pairs`` uint8 [T, bytes] alone (scaled_row), ``meta`` is empty.
    """

    pairs: Tensor
    meta: Tensor
    width: int
    dtype: torch.dtype  # of the rows that were quantised, and of products with them

    @property
    def terms(self) -> int:
        """The int8 terms of each value: 1 or 2; `BY_ROW`: the row has one scale."""
        return BY_ROW if self.pairs.dim() == 2 else self.pairs.shape[1]


def num_groups(width: int) -> int:
    """The number of groups of a row, which is always even: the kernels take two at a time."""
    return -(-width // (2 * GROUP)) * 2


def row_words(groups: int) -> int:
    """4-byte words of a row's ``meta`` (cpu/csrc/quant.h)."""
    return 6 * groups + 16


def scaled_row_steps(groups: int) -> int:
    """Bytes of the bits that say which steps of a row with one scale have second integers (cpu/csrc/quant.h)."""
    return -(-groups // 64) * 64


def scaled_row_bytes(groups: int) -> int:
    """Bytes of a row with one scale."""
    return 64 + scaled_row_steps(groups) + 2 * groups * GROUP


def empty_rows(rows: int, terms: int, width: int, dtype: torch.dtype) -> QuantizedRows:
    """Rows with undefined contents, for a kernel to fill."""
    groups = num_groups(width)
    if terms == BY_ROW:
        pairs = torch.empty((rows, scaled_row_bytes(groups)), dtype=torch.uint8)
        return QuantizedRows(pairs, torch.empty(0), width, dtype)
    pairs = torch.empty((rows, terms, groups // 2, 16 + 2 * GROUP), dtype=torch.uint8)
    return QuantizedRows(pairs, torch.empty((rows, row_words(groups)), dtype=torch.float32), width, dtype)


def part_nbytes(channels: int, width: int, kind: Kind) -> int:
    """Bytes of the data of a `PackedPart`."""
    if kind.by_row:
        return -(-channels // BLOCK) * BLOCK * (4 + num_groups(width) * GROUP)
    strip = kind.head_bytes + num_groups(width) // 2 * kind.pair_bytes
    return -(-channels // BLOCK) * (BLOCK // STRIP) * strip


@dataclass(frozen=True)
class Unpacked:
    """The contents of a part: ``codes`` int8 [N, G, 32] minus the zero point and times the step, or what the table has.

    ``scales`` and, if affine, ``offsets`` [N, G, 1] or, of halves, [N, G, 2] are float32 for kinds with float
    scales, else int16 beside the ``units`` float32 [N].
    """

    kind: Kind
    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    units: Tensor | None

    def values(self) -> Tensor:
        """The weight, float32 [N, G * 32]."""
        codes: Tensor = self.codes.float().unflatten(2, (self.scales.shape[2], -1))
        if self.units is None:
            return (codes * self.scales[..., None]).flatten(1)
        unit = self.units[:, None, None] * 2.0 ** -(SCALE_BITS + self.kind.shift)
        out: Tensor = codes * (unit * self.scales.float())[..., None]
        if self.offsets is not None:
            out = out + (self.units[:, None, None] * 2.0**-OFFSET_BITS * self.offsets.float())[..., None]
        return out.flatten(1)


def unpack_part(part: PackedPart, groups: int) -> Unpacked:
    """The codes, scales and offsets that the bytes of ``part`` hold, in rows of ``groups`` groups."""
    kind = part.kind
    if kind.by_row:
        block = part.data.view(-1, BLOCK * (4 + groups * GROUP))
        scales = block[:, : BLOCK * 4].contiguous().view(torch.float32).view(-1, 1, 1)[: part.channels]
        steps = block[:, BLOCK * 4 :].unflatten(1, (-1, BLOCK, 4)).transpose(1, 2).reshape(-1, groups, GROUP)
        codes = (steps[: part.channels].to(torch.int16) - kind.zero).to(torch.int8)
        return Unpacked(kind, codes, scales.expand(-1, groups, 1), None, None)
    stream: Tensor = part.data.view(-(-part.channels // BLOCK) * (BLOCK // STRIP), -1)
    head, stream = stream[:, : kind.head_bytes], stream[:, kind.head_bytes :].unflatten(1, (groups // 2, -1))
    codes = _signed(_unpack_codes(stream[:, :, : kind.code_bytes], kind), head, kind)
    # [strip, pair, step, n, four of channels, channel, group, column], see pack_codes
    codes = codes.permute(0, 4, 3, 5, 1, 6, 2, 7).reshape(-1, groups, GROUP)[: part.channels]
    numbers = stream[:, :, kind.code_bytes :].contiguous()
    units = head[:, : STRIP * 4].contiguous().view(torch.float32).flatten()[: part.channels]
    if kind.has_float_scales:
        halves: Tensor = numbers.view(torch.float16).unflatten(2, (2, 4, 2, 2)).permute(0, 3, 2, 4, 1, 5)
        scales = halves.reshape(-1, groups, 1)[: part.channels].float()
        return Unpacked(kind, codes, scales * units[:, None, None] if kind.table else scales, None, None)
    by_pair: Tensor = numbers.view(torch.int16).unflatten(2, (-1, STRIP, 2)).permute(0, 3, 1, 4, 2)
    integers = by_pair.reshape(-1, groups, by_pair.shape[-1])[: part.channels]
    count = 1 + kind.halves
    return Unpacked(kind, codes, integers[..., :count], integers[..., count:] if kind.affine else None, units)


def _unpack_codes(stream: Tensor, kind: Kind) -> Tensor:
    """uint8 [strips, pairs, bytes] -> [strips, pairs, 8 steps, 2, 4, 2, 2, 4]"""
    vectors: Tensor = stream.unflatten(2, (-1, 2, 4, 2, 2, 4))
    if kind.bits == 8:
        return vectors
    if kind.bits == 2:
        return torch.cat([vectors >> shift & 3 for shift in range(0, 8, 2)], dim=2)
    codes = torch.cat([vectors[:, :, :4] & 15, vectors[:, :, :4] >> 4], dim=2)
    if kind.bits > 4:
        extra = kind.bits - 4  # bits of a step in a byte of the planes
        shifts = torch.arange(0, 8, extra, dtype=torch.uint8).view(-1, *[1] * 5)
        high = (vectors[:, :, 4:, None] >> shifts) & ((1 << extra) - 1)
        codes = codes | high.flatten(2, 3) << 4
    return codes


def _signed(codes: Tensor, head: Tensor, kind: Kind) -> Tensor:
    """int8: codes minus their zero point and times their step, or what the table in each strip's head has for them."""
    if kind.table:
        table = (head[:, STRIP * 4 :][:, :16].to(torch.int16) - TABLE_ZERO).to(torch.int8)
        flat = codes.flatten(1).long()
        return table.gather(1, flat).view(codes.shape)
    return ((codes.to(torch.int16) - kind.zero) * kind.step).to(torch.int8)


def dequantize(packed: PackedLinear) -> Tensor:
    """The weight that the packed bytes represent, float32 ``[channels, width]``."""
    return torch.cat([unpack_part(part, packed.groups).values() for part in packed.parts])[:, : packed.width]
