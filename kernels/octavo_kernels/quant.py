"""Group-quantised weights and activations: how they lie in memory (`octavo_kernels.packing` makes them from files).

A weight is stored in groups of 32 columns, each with its scale, as 8-bit codes (W8A8) or as the 4-bit codes of a GGUF
file (W4A8). Activations become int8 with one scale for each group of 32 values of a row. Sums within a group are exact
integers and groups are added in order, so a row's result never depends on other rows. cpu/csrc/quant.h describes the
layout of the packed bytes and what happens to a file's scales.

Activations of one int8 ``term`` lose about as much accuracy as 8-bit weights do. With two terms they have 15 bits (a
second int8 holds the remainder of the first) for twice the arithmetic; products with 4-bit weights keep about 11 bits.
Only the largest logits of a head need two terms: with a ``margin`` the others are computed with one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32  # columns with one scale
STRIP = 16  # channels that are stored together
BLOCK = 32  # the number of channels is padded to a multiple of this
ZERO_POINT = {4: 8, 8: 128}  # the code of 0, by bits
SCALE_BITS, OFFSET_BITS, RELATIVE_BITS = (
    15,
    9,
    11,
)  # of integers beside their channel's unit or their row's largest scale


@dataclass(frozen=True)
class PackedPart:
    """Channels of one kind. The kernels read ``data``, uint8."""

    data: Tensor
    channels: int
    bits: int  # 4 or 8
    affine: bool  # with offsets: scale * (q - zero point) + offset instead of scale * (q - zero point)


@dataclass(frozen=True)
class PackedLinear:
    """A quantised weight ``[channels, width]`` in consecutive parts: merged layers may have parts of several kinds.

    It takes rows of ``activation_terms`` terms. A ``margin`` above 0 is for one part and two terms, as in a head:
    products are float32 whatever the rows' dtype, and for each row the second term is applied only to BLOCKs of
    channels with a product (of the first term) within ``margin`` of the row's largest.
    """

    parts: tuple[PackedPart, ...]
    channels: int
    width: int
    activation_terms: int = 1
    margin: float = 0.0

    def __post_init__(self) -> None:
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
    float32 [T, 4 G + 16] holds the scales of groups, the sums of both terms, whether there is a second one (these as
    the bits of int32), the largest scale, and padding.
    """

    pairs: Tensor
    meta: Tensor
    width: int
    dtype: torch.dtype  # of the rows that were quantised, and of products with them

    @property
    def terms(self) -> int:
        """The int8 terms of each value: 1 or 2."""
        return self.pairs.shape[1]


def num_groups(width: int) -> int:
    """The number of groups of a row, which is always even: the kernels take two at a time."""
    return -(-width // (2 * GROUP)) * 2


def empty_rows(rows: int, terms: int, width: int, dtype: torch.dtype) -> QuantizedRows:
    """Rows with undefined contents, for a kernel to fill."""
    groups = num_groups(width)
    pairs = torch.empty((rows, terms, groups // 2, 16 + 2 * GROUP), dtype=torch.uint8)
    return QuantizedRows(pairs, torch.empty((rows, 4 * groups + 16), dtype=torch.float32), width, dtype)


def part_nbytes(channels: int, width: int, bits: int, affine: bool) -> int:
    """Bytes of the data of a `PackedPart`."""
    pair = STRIP * 2 * GROUP * bits // 8 + STRIP * 2 * 2 * (1 + affine)
    strip = (STRIP * 4 if bits == 4 else 0) + num_groups(width) // 2 * pair
    return -(-channels // BLOCK) * (BLOCK // STRIP) * strip


@dataclass(frozen=True)
class Unpacked:
    """The contents of a part: ``codes`` int8 [N, G, 32] minus the zero point, ``scales`` and, if affine, ``offsets``
    [N, G]: float32 for 8 bits; int16 in ``units`` float32 [N] for 4 bits.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    units: Tensor | None

    def values(self) -> Tensor:
        """The weight, float32 [N, G * 32]."""
        codes = self.codes.float()
        if self.units is None:
            return (codes * self.scales[:, :, None]).flatten(1)
        out = codes * (self.units[:, None] * 2.0**-SCALE_BITS * self.scales.float())[:, :, None]
        if self.offsets is not None:
            out = out + (self.units[:, None] * 2.0**-OFFSET_BITS * self.offsets.float())[:, :, None]
        return out.flatten(1)


def unpack_part(part: PackedPart, groups: int) -> Unpacked:
    """The codes, scales and offsets that the bytes of ``part`` hold, in rows of ``groups`` groups."""
    pairs, code_bytes, scale_bytes = groups // 2, STRIP * GROUP * 2 * part.bits // 8, STRIP * 2 * 2
    stream: Tensor = part.data.view(-(-part.channels // BLOCK) * (BLOCK // STRIP), -1)
    units = None
    if part.bits == 4:
        units = stream[:, : STRIP * 4].contiguous().view(torch.float32).flatten()[: part.channels]
        stream = stream[:, STRIP * 4 :]
    stream = stream.unflatten(1, (pairs, code_bytes + scale_bytes * (1 + part.affine)))
    codes = stream[:, :, :code_bytes].unflatten(2, (part.bits, 2, 4, 2, 2, 4))
    if part.bits == 4:
        codes = torch.cat([codes & 15, codes >> 4], dim=2)
    # [strip, pair, step, n, four of channels, channel, group, column], see pack_codes
    signed = (codes.to(torch.int16) - ZERO_POINT[part.bits]).to(torch.int8)
    codes = signed.permute(0, 4, 3, 5, 1, 6, 2, 7).reshape(-1, groups, GROUP)[: part.channels]

    def numbers(at: int, dtype: torch.dtype) -> Tensor:
        return stream[:, :, at : at + scale_bytes].contiguous().view(dtype)

    if part.bits == 8:
        halves: Tensor = numbers(code_bytes, torch.float16).unflatten(2, (2, 4, 2, 2)).permute(0, 3, 2, 4, 1, 5)
        return Unpacked(codes, halves.reshape(-1, groups)[: part.channels].float(), None, None)

    def integers(at: int) -> Tensor:
        by_pair: Tensor = numbers(at, torch.int16).unflatten(2, (STRIP, 2))
        return by_pair.transpose(1, 2).reshape(-1, groups)[: part.channels]

    offsets = integers(code_bytes + scale_bytes) if part.affine else None
    return Unpacked(codes, integers(code_bytes), offsets, units)


def dequantize(packed: PackedLinear) -> Tensor:
    """The weight that the packed bytes represent, float32 ``[channels, width]``."""
    return torch.cat([unpack_part(part, packed.groups).values() for part in packed.parts])[:, : packed.width]
